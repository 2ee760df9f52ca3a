// What attention of many positions shares in how it is cut into tiles of queries and of keys.
#pragma once

#include <algorithm>

#include "torch_mpk/schedule/schedule.h"

namespace mpk {

inline constexpr int64_t kLargestHead = 128;  // a warp keeps queries and results in registers

// Whether each of the groups, of which there are some, has equally many heads.
inline bool are_equal_groups(int64_t heads, int64_t groups) {
  return groups > 0 && heads >= groups && heads % groups == 0;
}

// Of so many heads that share keys, which are of `head_bytes` each, as are values.
inline QueryTiles query_tiles(const WarpLayout& warps, int64_t heads, int64_t head_bytes) {
  // A tile of keys and values: larger ones of causal prompts are seen in part.
  constexpr int64_t kEntryBytes = 32 << 10;
  QueryTiles tiles;
  tiles.heads = heads;
  tiles.rows = kWarpRows * warps.consumers;
  tiles.positions = std::min(kEntryBytes, warps.slot_bytes) / (2 * head_bytes);
  return tiles;
}

// Of shared memory, where warps share the keys of their rows.
inline int64_t united_bytes(const WarpLayout& warps) { return warps.consumers * kUnitedBytes; }

}  // namespace mpk
