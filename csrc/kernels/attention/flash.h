// FlashAttention: attention of many positions. Each tile of queries goes over tiles of keys.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "../../arch/arch.h"
#include "../../schedule/kernel.h"
#include "../../schedule/refusals.h"
#include "../fields.h"
#include "scores.h"

namespace mpk {

// The query rows of `heads` heads that share keys lie side by side, for all positions of a sequence. A worker takes
// `rows` of them at a time, and a ring entry holds the keys and values of `positions` positions. If the rows are too
// few for all warps, warps share the keys.
struct FlashFields {
  int64_t heads = 1, rows = 0, positions = 0;

  static constexpr std::array<FieldOf<FlashFields>, 3> kAll = {{
      {"heads", "kHeads", &FlashFields::heads},
      {"rows", "kRows", &FlashFields::rows},
      {"positions", "kKeys", &FlashFields::positions},
  }};
};

// Whether there are groups, and each has equally many heads.
inline bool are_equal_groups(int64_t heads, int64_t groups) {
  return groups > 0 && heads >= groups && heads % groups == 0;
}

// Elements of a query or key, and of a value or result.
struct HeadSizes {
  int64_t key, value;

  static HeadSizes of(const Node& node) {
    return {node.operand("q").tensor.shape.back(), node.operands.back().tensor.shape.back()};
  }
  // Bytes of a tile of so many positions, in boxes or row by row.
  int64_t entry_bytes(int64_t positions, bool by_row) const {
    const auto bytes = [&](int64_t size) {
      const int row = static_cast<int>(2 * size);
      return by_row ? key_row_pitch(row) : boxed_row_bytes(row);
    };
    return positions * (bytes(key) + bytes(value));
  }
};

// Why tiles refuse a node with queries [..., heads, size]; nothing if they accept it.
inline std::optional<std::string> refuses_queries(const Node& node, int64_t groups) {
  const Tensor& q = node.operand("q").tensor;
  const HeadSizes sizes = HeadSizes::of(node);
  const int64_t heads = q.shape[q.shape.size() - 2];
  if (q.numel() == 0) return "there are no queries";
  if (!are_equal_groups(heads, groups))
    return std::to_string(heads) + " heads are no multiple of " + std::to_string(groups) + " groups";
  if (q.dtype != DType::kBF16 && q.dtype != DType::kF16)
    return "q is " + std::string(info(q.dtype).name) + ", and tensor cores take bfloat16 and float16 alone";
  for (const int64_t size : {sizes.key, sizes.value})
    if (size % 8 != 0 || size < 8 || size > kLargestHead)
      return "the head size must be a multiple of 8 up to " + std::to_string(kLargestHead) + ", got " +
             std::to_string(size);
  return std::nullopt;
}

class FlashKernel : public Kernel {
 public:
  using Kernel::Kernel;

  std::optional<Demands> demands(const TBGraph&, const Node& node) const override {
    if (refuses_products(node)) return std::nullopt;
    return of_warpgroups();
  }

  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    if (auto why = refuses_products(node)) return why;
    const Operand& q = node.operand("q");
    for (const Operand& operand : node.operands) {
      if (!is_float(operand.tensor.dtype) || operand.name == "sinks" || operand.name == "mask") continue;
      if (auto why = refuses_dtype(operand, q.tensor.dtype)) return why;
      if (auto why = refuses_inner_stride(operand)) return why;
    }
    if (auto why = codegen::refuses_scores(node)) return why;
    return refuses_own(node);
  }

  std::optional<std::string> refuses(const Schedule& schedule, const Job&) const override {
    if (!schedule.warps.all_read_entries)
      return lacks(schedule.target.arch, &Arch::has_warpgroup_products, "products of warpgroups");
    return std::nullopt;
  }

 private:
  // Why tensor cores do not take the node's products.
  virtual std::optional<std::string> refuses_products(const Node& node) const = 0;
  // Why it refuses operands that no other kernel has.
  virtual std::optional<std::string> refuses_own(const Node& node) const = 0;
};

// The cut for so many heads that share keys.
inline FlashFields flash_fields(const WarpLayout& warps, int64_t heads, const HeadSizes& sizes, bool by_row) {
  // Larger tiles of keys and values see more of a causal prompt in part; smaller ones have few products.
  constexpr int64_t kEntryBytes = 32 << 10, kFewPositions = 64;
  FlashFields own;
  own.heads = heads;
  own.rows = kWarpRows * warps.consumers;
  own.positions = kWarpRows;
  while (sizes.entry_bytes(2 * own.positions, false) <= std::min(kEntryBytes, warps.slot_bytes) ||
         (2 * own.positions <= kFewPositions && sizes.entry_bytes(2 * own.positions, by_row) <= warps.slot_bytes))
    own.positions *= 2;
  return own;
}

// The time of query rows that each see so many positions on average: by memory, or tensor cores.
inline double flash_ns(const Schedule& schedule, const Job& job, double seen) {
  const Node& node = schedule.graph.nodes()[job.body.front()];
  const Costs& costs = arch_of(schedule.target.arch).costs;
  const HeadSizes sizes = HeadSizes::of(node);
  const double rows = double(node.operand("q").tensor.numel()) / double(sizes.key);
  const double cycles = rows * seen * double(sizes.key + sizes.value) / costs.attended_per_cycle;
  return std::max(memory_ns(schedule, job), cycles / costs.cycles_per_ns / double(schedule.target.num_workers));
}

// Bytes of shared memory for warps' queries, and for merging results where warps share keys.
inline int64_t flash_bytes(const WarpLayout& warps, const HeadSizes& sizes, bool share_keys) {
  const int key = static_cast<int>(sizes.key);
  const int queries = keeps_queries(key, static_cast<int>(sizes.value)) ? 0 : queries_bytes(key);
  return warps.consumers * std::max(share_keys ? kMergeBytes : 0, queries);
}

// Proves that every warp has as many rows as tensor cores take, every row is in one tile, equally many warps share the
// same rows, and all warps read each entry. `all_heads`: of the result. `tiles`: of all queries. `staged`: bytes for
// warps. `entry`: bytes of a tile of keys and values.
inline void prove_flash(const CutProof& proof, const FlashFields& own, int64_t all_heads, int64_t tiles, int64_t staged,
                        int64_t entry) {
  constexpr int64_t kMostBoxRows = 256;
  const auto str = [](int64_t v) { return std::to_string(v); };
  const Cut& cut = proof.cut();
  const WarpLayout& warps = proof.schedule().warps;
  proof.require(own.heads > 0 && all_heads % own.heads == 0,
                str(own.heads) + " heads side by side do not make all of them");
  proof.require(own.rows > 0 && kWarpRows * warps.consumers % own.rows == 0 && own.rows % kWarpRows == 0,
                str(own.rows) + " rows of queries are not " + str(kWarpRows) + " for each of some of " +
                    str(warps.consumers) + " warps, and for equally many others");
  proof.require(cut.staged_bytes >= staged, "its warps take " + str(staged) + " bytes of " + str(cut.staged_bytes));
  proof.require(own.positions > 0 && own.positions % kWarpRows == 0 && own.positions <= kMostBoxRows,
                "a tile of " + str(own.positions) + " positions is no box that tensor cores take 16 at a time");
  proof.require(cut.num_tiles == tiles, str(cut.num_tiles) + " tiles of " + str(own.rows) +
                                            " rows do not cover the queries, " + str(tiles) + " do");
  proof.require(warps.empty_arrivals == warps.consumers, "all of " + str(warps.consumers) +
                                                             " consumers read an entry, but its slot is empty after " +
                                                             str(warps.empty_arrivals) + " arrivals");
  proof.require(entry <= warps.slot_bytes && warps.slot_bytes % kBoxAlignment == 0,
                "an entry of " + str(entry) + " bytes does not fit a slot of " + str(warps.slot_bytes));
  proof.require_plain_end();
}

}  // namespace mpk
