// FlashDecoding: attention of few queries, whose keys and values are split among workers, in any layout.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "../../schedule/kernel.h"
#include "../fields.h"

namespace mpk {

struct AttentionSizes {
  int64_t batch, heads, groups;
  int64_t size, value_size;  // of a query or key; of a value or result
  DType dtype;
  int64_t row_positions;  // of the longest row
  int64_t of_page;        // positions of a page; 0: no pages
  bool overlap = false;   // of a worker's splits
  // The most heads that a split may compute, by the launch's warps.
  int64_t most_together = std::numeric_limits<int64_t>::max();

  bool are_possible() const { return batch >= 1 && groups >= 1 && heads >= groups && heads % groups == 0; }
  int64_t widest() const { return std::max(size, value_size); }
  int64_t together() const;                             // heads that a split computes
  int64_t units() const { return heads / together(); }  // of a row, each with splits of its own
  int64_t tile() const;                                 // its positions
  int64_t row_tiles() const { return std::max<int64_t>((row_positions + tile() - 1) / tile(), 1); }
  // With several rows: the splits of a long enough row, and the most tiles of a split, see kv_own_count.
  int64_t few_splits(int64_t workers) const;
  int64_t max_split_tiles(int64_t workers) const;
  // A head of a split: up to 256 elements, shared by a warp's 32 lanes, the maximum and the sum.
  int64_t result_bytes() const {
    return 8 * std::max<int64_t>(std::bit_ceil(static_cast<uint64_t>(value_size)), 64) + 32;
  }
};

struct SplitKvFields {
  int64_t heads = 1;         // that a split computes together,
  int64_t few_heads = 1;     // or where that leaves workers without a split
  int64_t positions = 1;     // positions of a tile
  int64_t split_tiles = 0;   // the most of a split; 0: lengths decide at run time, see kv_row_length
  int64_t few_splits = 1;    // of a long enough row, see kv_own_count
  int64_t splits = 0;        // the most of all rows
  int64_t result_bytes = 0;  // of a head of a split, before the merge
  int64_t overlaps = 0;      // producer warps stage a worker's next split while the others compute

  static constexpr std::array<FieldOf<SplitKvFields>, 8> kAll = {{
      {"heads", "kHeads", &SplitKvFields::heads},
      {"few_heads", "kFewHeads", &SplitKvFields::few_heads},
      {"positions", "kTilePositions", &SplitKvFields::positions},
      {"split_tiles", "kSplitTiles", &SplitKvFields::split_tiles},
      {"few_splits", "kFewSplits", &SplitKvFields::few_splits},
      {"splits", "kSplits", &SplitKvFields::splits},
      {"result_bytes", "kPartialBytes", &SplitKvFields::result_bytes},
      {"overlaps", "kOverlaps", &SplitKvFields::overlaps, true},
  }};

  int64_t scratch_bytes() const { return splits * heads * result_bytes; }
};

// The base of these kernels. Each says where its keys lie, and writes code.
class SplitKvKernel : public Kernel {
 public:
  using Kernel::Kernel;

  std::optional<std::string> refuses_node(const Node& node, const Target&) const override;
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override;
  void prove(const CutProof& proof) const override;
  bool takes_companions() const override { return true; }
  bool ends_with_tiles(const Schedule& schedule, const Job& job) const override;

 private:
  virtual AttentionSizes sizes_of(const Node& node) const = 0;
  // The operands of keys and values.
  virtual std::array<const Operand*, 2> caches_of(const Node& node) const = 0;
  // Why it refuses operands that no other kernel has.
  virtual std::optional<std::string> refuses_own(const Node& node) const = 0;
  // Whether workers have several splits each. These overlap if shared memory has room for two.
  virtual bool has_several(const AttentionSizes& sizes, int64_t workers) const = 0;
};

}  // namespace mpk
