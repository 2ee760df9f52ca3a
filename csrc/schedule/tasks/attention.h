// How attention is cut into pieces, whatever its keys and values lie in.
#pragma once

#include <algorithm>
#include <bit>

#include "torch_mpk/schedule/schedule.h"

namespace mpk {

struct AttentionSizes {
  int64_t batch, heads, groups, size;
  DType dtype;
  int64_t row_positions;  // of the longest row
  int64_t of_page;        // positions; 0: all lie side by side
  bool overlap = false;   // of a worker's pieces

  bool are_possible() const { return batch >= 1 && groups >= 1 && heads >= groups && heads % groups == 0; }
  int64_t together() const;                             // heads that a piece works on
  int64_t units() const { return heads / together(); }  // of a row: each has pieces of its own
  int64_t tile() const;                                 // its positions
  int64_t row_tiles() const { return std::max<int64_t>((row_positions + tile() - 1) / tile(), 1); }
  // With several rows: pieces that each has as far as it is long enough, and tiles of a piece at most, see
  // kv_own_count.
  int64_t few_pieces(int64_t workers) const;
  int64_t most_piece_tiles(int64_t workers) const;
  // Of a head of a piece: up to 256 elements, as the 32 lanes of a warp share them, the maximum and the sum.
  int64_t result_bytes() const { return 8 * std::max<int64_t>(std::bit_ceil(static_cast<uint64_t>(size)), 64) + 32; }
};

// A job that does not fit shared memory stays as it is. `several`: workers have several pieces each, which then overlap
// if shared memory has room for two.
void cut_attention(const Schedule& schedule, Job& job, AttentionSizes sizes, bool several);

}  // namespace mpk
