// The common part of split_kv's variants, for any layout of keys and values: sizes, the result, and rows of q and of
// new positions, which come through chains of row tasks.
#pragma once

#include <string>
#include <vector>

#include "../../codegen/chain.h"
#include "../../codegen/job_code.h"
#include "split_kv.h"

namespace mpk::codegen {

class AttentionWriter {
 public:
  virtual ~AttentionWriter() = default;
  JobCode run();

 protected:
  // `keys` and `values`: the names of their operands.
  AttentionWriter(const JobPlace& place, const std::string& keys, const std::string& values, const char* kind);

  virtual int64_t groups() const = 0;
  virtual int64_t length() const = 0;  // the most positions of a row
  virtual std::string limit() = 0;     // expression of row b's positions
  virtual bool zero_without_keys() const = 0;
  // Operands that decide whether there is a split, which must be known by then.
  virtual std::vector<const Operand*> lengths() const = 0;
  virtual void write_positions() = 0;

  // Bytes from position to position, along a dimension of the keys and values.
  std::string pitches(size_t dimension) const;

  const JobPlace place_;
  KernelContext& context_;
  const int phase_;
  const Job& job_;
  const SplitKvFields own_;
  const Node& node_;
  const Operand &q_, &keys_, &values_;
  const Operand *k_new_, *v_new_;  // null where absent
  const Tensor& y_;
  const DType dtype_;
  JobCode code_;
  Refs refs_;

 private:
  void write_sizes();
  void write_result();
  void write_chains();
  int64_t batch() const { return q_.tensor.shape[0]; }
  int64_t heads() const { return q_.tensor.shape[1]; }
  int64_t size() const { return q_.tensor.shape[2]; }
  int64_t value_size() const { return y_.shape[2]; }
};

}  // namespace mpk::codegen
