// FlashDecoding: attention of few queries, whose keys and values are split among workers, whatever they lie in.
#pragma once

#include <algorithm>
#include <array>
#include <bit>

#include "../../schedule/kernel.h"
#include "../fields.h"

namespace mpk {

struct AttentionSizes {
  int64_t batch, heads, groups;
  int64_t size, value_size;  // of a query and a key; of a value and a result
  DType dtype;
  int64_t row_positions;  // of the longest row
  int64_t of_page;        // positions; 0: all lie side by side
  bool overlap = false;   // of a worker's splits

  bool are_possible() const { return batch >= 1 && groups >= 1 && heads >= groups && heads % groups == 0; }
  int64_t widest() const { return std::max(size, value_size); }
  int64_t together() const;                             // heads that a split works on
  int64_t units() const { return heads / together(); }  // of a row: each has splits of its own
  int64_t tile() const;                                 // its positions
  int64_t row_tiles() const { return std::max<int64_t>((row_positions + tile() - 1) / tile(), 1); }
  // With several rows: splits that each has as far as it is long enough, and tiles of a split at most, see
  // kv_own_count.
  int64_t few_splits(int64_t workers) const;
  int64_t max_split_tiles(int64_t workers) const;
  // Of a head of a split: up to 256 elements, as the 32 lanes of a warp share them, the maximum and the sum.
  int64_t result_bytes() const {
    return 8 * std::max<int64_t>(std::bit_ceil(static_cast<uint64_t>(value_size)), 64) + 32;
  }
};

struct SplitKvFields {
  int64_t heads = 1;         // that a split works on together,
  int64_t few_heads = 1;     // and where more splits give more workers some
  int64_t positions = 1;     // of keys, that a tile has
  int64_t split_tiles = 0;   // of each split at most; 0: as lengths at run time give, see kv_row_length
  int64_t few_splits = 1;    // of each row as far as it is long enough, see kv_own_count
  int64_t splits = 0;        // of all rows, at most
  int64_t result_bytes = 0;  // of a head of a split, before they are put together
  int64_t overlaps = 0;      // of a worker's splits some warps stage the next while the others compute

  static constexpr std::array<FieldOf<SplitKvFields>, 8> kAll = {{
      {"heads", "kHeads", &SplitKvFields::heads},
      {"few_heads", "kFewHeads", &SplitKvFields::few_heads},
      {"positions", "kTilePositions", &SplitKvFields::positions},
      {"split_tiles", "kPieceTiles", &SplitKvFields::split_tiles},
      {"few_splits", "kFewPieces", &SplitKvFields::few_splits},
      {"splits", "kPieces", &SplitKvFields::splits},
      {"result_bytes", "kPartialBytes", &SplitKvFields::result_bytes},
      {"overlaps", "kOverlaps", &SplitKvFields::overlaps, true},
  }};

  int64_t scratch_bytes() const { return splits * heads * result_bytes; }
};

// What kernels of that kind share. Each says where its keys lie, and writes code.
class SplitKvKernel : public Kernel {
 public:
  using Kernel::Kernel;

  std::optional<std::string> refuses_node(const Node& node, const Target&) const override;
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override;
  void prove(const CutProof& proof) const override;
  bool takes_companions() const override { return true; }

 private:
  virtual AttentionSizes sizes_of(const Node& node) const = 0;
  // The operands that keys and values lie in.
  virtual std::array<const Operand*, 2> caches_of(const Node& node) const = 0;
  // Of operands that one of the kernels has.
  virtual std::optional<std::string> refuses_own(const Node& node) const = 0;
  // Whether workers have several splits each, which overlap if shared memory has room for two.
  virtual bool has_several(const AttentionSizes& sizes, int64_t workers) const = 0;
};

}  // namespace mpk
