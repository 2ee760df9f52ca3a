// The common code of linear's kernels: operands and their checks, row tasks in front, epilogues. The rows of several
// weights follow each other and may have pointwise tasks of their own, or are side by side if a pointwise task combines
// their results.
#pragma once

#include <string>
#include <vector>

#include "../../codegen/chain.h"
#include "../../codegen/job_code.h"
#include "../../codegen/program.h"

namespace mpk::codegen {

class MPK_KERNEL_API LinearWriter {
 public:
  virtual ~LinearWriter() = default;
  JobCode run();

 protected:
  LinearWriter(const JobPlace& place, JobCode code);

  // Adds the references of a weight, and then of x.
  virtual void add_weight(const Node& node, const Tensor& weight) = 0;
  virtual void add_input() {}
  // How loader and warps share the matrices.
  virtual StreamRow stream_row() const;
  virtual std::string shape_constants() const;
  // Members for memory that no other kernel needs.
  virtual std::string write_places() { return ""; }
  virtual const char* type_of_x() const { return "const T*"; }
  // An expression of n for the factor of row `n` of a node's weight; empty: none.
  virtual std::string row_factor(const Node&) { return ""; }
  // Whether consumers read x in place.
  virtual bool reads_x() const;
  // Whether x's rows may be unaligned.
  virtual bool takes_any_x() const { return false; }
  virtual void write_behind() {}

  // Members for the sums of squares that it leaves, if it ends with a norm, and for those of x's rows, if another job's
  // norm made x.
  void write_row_sums();

  KernelContext& context_;
  const JobPlace& place_;
  const Job& job_;
  const Node& first_;
  const Tensor& x_;
  const int64_t batch_, size_, element_;
  const DType dtype_;                         // of results
  const int64_t weight_element_, row_bytes_;  // bytes of a row of weights
  const std::vector<int> owners_;             // of the epilogues, in the body
  const bool paired_;                         // side by side
  const TileShape shape_;                     // if weights are not streamed: one row a tile
  JobCode code_;
  Refs refs_;

 private:
  void check_operands();
  void check_staging() const;
  void find_matrices();
  void write_stream();
  void write_sizes();
  void write_early();
  TileShape whole_rows() const;
  void write_results();
  bool has_common() const { return shape_.x_rows > 0; }
  void write_result(int i);
  void write_rows(int i, const std::vector<const Node*>& tasks);
  void write_segments_with_rows();
  void write_norm(const Node& norm);
  void write_sums(const std::string& name, const std::string& count, const RowSums& sums);
  void write_epilogues(int owner, std::string& finish, std::string& preload);

  Chain chain_{};
  bool early_ = false;
  std::vector<int64_t> rows_;  // of each weight
  int64_t tiles_ = 0;
  std::vector<std::string> first_tile_, num_rows_;  // of each weight, expressions
  std::string fields_, preload_, finish_, fetch_;   // of Extra, and of these functions
  std::string common_fields_, common_;              // of Common
  std::vector<LocalValue> locals_;
  std::vector<int> segments_with_rows_;
};

// Weights that a job reads in place: weight(job, i) and weight_pitch(i), in bytes, of segment or part i.
class MPK_KERNEL_API WeightsInPlace {
 public:
  void add(Refs& refs, const Node& node, const Tensor& weight);
  std::string members() const;

 private:
  std::vector<std::string> weights_, pitches_;  // of each, expressions
};

}  // namespace mpk::codegen
