// The common part of the kernels of experts' products.
#pragma once

#include <string>

#include "../../codegen/job_code.h"
#include "../../schedule/kernel.h"
#include "../../schedule/proof.h"
#include "torch_mpk/abi/sizes.h"
#include "torch_mpk/graph/weight_format.h"

namespace mpk {

inline constexpr int64_t kExpertTileRows = 16;       // of weights
inline constexpr int64_t kExpertEntryColumns = 256;  // of weights, in a box
inline constexpr int64_t kExpertBoxDepth = 64;       // rows of a box of weights that are stored as [E, K, N]

// The tasks of experts' products. The second is that of quantised weights.
inline constexpr const char *kExpertLinear = "expert_linear", *kQuantizedExpertLinear = "quantized_expert_linear";

// A node's factors. Weights are stored as [E, N, K], or as [E, K, N].
struct Experts {
  const Tensor &x, &ids, &weight, &y;
  bool is_transposed;
  int64_t experts, rows, size, pairs, choices;
  std::optional<WeightFormat> format;  // of quantised weights

  explicit Experts(const Node& node);

  int64_t row_bytes() const { return format ? format->row_bytes() : size * size_bytes(x.dtype); }
  // Results of a pair that a tile has.
  int64_t tile_size() const { return is_transposed ? kBoxColumns : kExpertTileRows; }
  int64_t tiles_of_expert() const { return (rows + tile_size() - 1) / tile_size(); }
  // More are left to others: places of results have 31 bits.
  int64_t max_pairs() const;
  // The expected number of chosen experts, if all are equally likely.
  double expected() const;
  // The time to read their weights from memory.
  double memory_ns(const Schedule& schedule) const;
  // Each warp keeps a list of pairs in shared memory: as many as it has sums for.
  int64_t list_bytes(const Schedule& schedule) const;
  // Whether the weights of each expert begin a whole number of rows behind those of the one before.
  bool can_be_stacked() const {
    const int64_t expert = weight.strides[0], row = weight.strides[1];
    return row > 0 && expert % row == 0 && expert >= weight.shape[1] * row;
  }
  // The weights of all experts, stacked, in elements of 16 bits; of quantised ones, what fills lines of a box. There
  // may be other rows between those of two experts.
  Tensor stacked() const;
};

// A kernel of a node of one of the tasks, or of a run that begins with one. Kernels differ in how weights are loaded,
// and in the epilogue.
class ExpertKernel : public Kernel {
 public:
  // `memory_share`: the share of the bandwidth that it reaches.
  ExpertKernel(const std::string& task, const std::string& way, const char* compute, const char* load,
               double memory_share)
      : Kernel(task + "." + way), task_(task), compute_(compute), load_(load), memory_share_(memory_share) {}

 protected:
  // Whether it takes runs that begin with this node.
  bool begins(const Node& node) const { return node.def->name == task_; }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override;
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override;
  void prove(const CutProof& proof) const override;
  codegen::JobCode emit(const codegen::JobPlace& place) const override;

  // Why it refuses what it multiplies.
  virtual std::optional<std::string> refuses_factors(const Experts& own) const;

  // Whether it reads rows of x and of weights by 16 bytes, so that a call's tensors must begin at multiples of them.
  virtual bool reads_aligned() const { return true; }

  // Shared memory beside the ring.
  virtual int64_t staged_bytes(const Schedule& schedule, const Experts& own) const;

  // Bytes of the workspace in which workers leave data for each other.
  virtual int64_t scratch_bytes(const Experts&) const { return 0; }

  // Members of the variant: the results. By default products are stored as they are.
  virtual void add_results(const codegen::JobPlace& place, codegen::JobCode& code, codegen::Refs& refs,
                           const Experts& own) const;

 private:
  // Members of the variant: the map of weights.
  virtual void add_map(codegen::JobCode&, codegen::Refs&, const Node&, const Experts&) const {}

  const std::string task_;
  const char *compute_, *load_;
  const double memory_share_;
};

// A kernel whose loader awaits the choice, and copies weights as boxes of so many rows.
class BoxedExperts : public ExpertKernel {
 public:
  BoxedExperts(const std::string& task, const std::string& way, const char* compute,
               const char* load = "experts::load_boxes", int64_t box_rows = kExpertTileRows)
      : ExpertKernel(task, way, compute, load, 0.9), box_rows_(box_rows) {}

 protected:
  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override;
  void prove(const CutProof& proof) const override;

 private:
  void add_map(codegen::JobCode& code, codegen::Refs& refs, const Node& node, const Experts& own) const override;

  const int64_t box_rows_;
};

// Of nodes of quantised weights: why no kernel takes the operands, why tensor cores do not multiply the weights, and
// members of a variant.
std::optional<std::string> refuses_operands(const Node& node);
std::optional<std::string> refuses_format(const WeightFormat& format);
std::string quantized_members(const Node& node, codegen::Refs& refs);

}  // namespace mpk
