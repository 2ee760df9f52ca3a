// How attention's tiles are cut into splits, and which worker has which; see KvSplit in partition.h. V: attention's
// Sizes and Places (attention_shape.cuh).
#pragma once

#include "torch_mpk/abi/partition.h"
#include "torch_mpk/device/row.cuh"

namespace mpk::attention {

template <class V>
MPK_DEVICE uint32_t visible(const Job& job, uint32_t row) {
  const int64_t limit = V::limit(job, row);
  return limit < 0 ? 0 : limit > V::kLength ? V::kLength : static_cast<uint32_t>(limit);
}

// Positions of a tile.
template <class V>
inline constexpr int kTile = V::kTilePositions;

template <class V>
MPK_DEVICE constexpr uint32_t tiles_of(uint32_t visible) {
  const uint32_t tiles = (visible + kTile<V> - 1) / kTile<V>;
  return tiles == 0 ? 1 : tiles;  // a row without keys still has a result
}

template <class V>
inline constexpr uint32_t kUnits = V::kGroups * V::kPasses;  // of a batch row

// The limit of each batch row, and the tiles of a group of it. A lane has rows lane, lane + 32, ... All lanes of a warp
// call all functions, and get the same results.
template <class V>
struct RowTiles {
  static constexpr int kEach = (V::kBatch + 31) / 32;
  uint32_t limits[kEach];

  MPK_DEVICE explicit RowTiles(const Job& job) {
#pragma unroll
    for (int i = 0; i < kEach; i++) limits[i] = row_of(i) < V::kBatch ? visible<V>(job, row_of(i)) : 0;
  }

  MPK_DEVICE static uint32_t row_of(int i) { return 32 * i + ptx::thread_index() % 32; }
  MPK_DEVICE uint32_t tiles(int i) const { return row_of(i) < V::kBatch ? tiles_of<V>(limits[i]) : 0; }

  MPK_DEVICE uint32_t limit(uint32_t row) const {
    uint32_t limit = 0;
#pragma unroll
    for (uint32_t i = 0; i < kEach; i++)
      if (const uint32_t of_lane = __shfl_sync(~0u, limits[i], row % 32); row / 32 == i) limit = of_lane;
    return limit;
  }

  // Adds to each of the lane's rows the weights of all rows with larger keys. No two rows have equal keys. weight(i,
  // lane): the weight of that lane's i-th row.
  template <class Weight>
  MPK_DEVICE static uint32_t rank(const uint32_t (&keys)[kEach], Weight weight, uint32_t (&before)[kEach]) {
    uint32_t all = 0;
#pragma unroll 1
    for (int lane = 0; lane < (V::kBatch < 32 ? V::kBatch : 32); lane++)
#pragma unroll
      for (int e = 0; e < kEach; e++) {
        const uint32_t key = __shfl_sync(~0u, keys[e], lane), more = weight(e, lane);
        all += more;
#pragma unroll
        for (int i = 0; i < kEach; i++) before[i] += key > keys[i] ? more : 0;
      }
    return all;
  }
};

// How the work is cut. All lanes of a warp call all functions. With one row the limit is read once.
template <class V>
struct Cut {
  uint32_t first;
  uint32_t length;  // of a split

  MPK_DEVICE explicit Cut(const Job& job)
      : first(visible<V>(job, 0)), length(kv_row_length(tiles_of<V>(first), kUnits<V>, kKvSplitTiles, V::kWorkers)) {}
  MPK_DEVICE uint32_t limit(uint32_t) const { return first; }
  // The worker's split number `turn`.
  MPK_DEVICE KvSplit split(uint32_t turn, uint32_t worker) const {
    return kv_row_split(0, tiles_of<V>(first), kUnits<V>, length, 0, turn * V::kWorkers + worker);
  }
};

// For workers that have one split each, if lengths allow. A row's splits are about equally long (kv_own_length). The
// longest come first, and workers with two splits are dealt them to and fro, so no worker has two long ones.
template <class V>
struct OwnSplits {
  static constexpr int kEach = RowTiles<V>::kEach;
  RowTiles<V> rows;
  uint32_t lengths[kEach], firsts[kEach];  // of the lane's rows: tiles of a split, number of the first split
  uint32_t count;                          // of all rows' splits

  MPK_DEVICE uint32_t splits(int i) const { return kv_count(rows.tiles(i), lengths[i]) * kUnits<V>; }

  MPK_DEVICE explicit OwnSplits(const Job& job) : rows(job) {
    uint32_t keys[kEach], counts[kEach];  // keys: unique, and larger for rows with longer splits
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const uint32_t tiles = rows.tiles(i);
      lengths[i] = tiles == 0 ? 1 : kv_own_length(tiles, V::kFewSplits, V::kSplitTiles);
      keys[i] = tiles == 0 ? 0 : lengths[i] * V::kBatch + (V::kBatch - 1 - rows.row_of(i));
      counts[i] = splits(i);
      firsts[i] = 0;
    }
    count = rows.rank(keys, [&](int i, int lane) { return __shfl_sync(~0u, counts[i], lane); }, firsts);
  }

  MPK_DEVICE KvSplit split(uint32_t number) const {
    KvSplit found{};
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const uint32_t here = __ballot_sync(~0u, number - firsts[i] < splits(i));
      if (here == 0) continue;
      const int from = __ffs(here) - 1;
      const uint32_t first = __shfl_sync(~0u, firsts[i], from);
      found = kv_row_split(32 * i + from, __shfl_sync(~0u, rows.tiles(i), from), kUnits<V>,
                           __shfl_sync(~0u, lengths[i], from), first, number - first);
    }
    return found;
  }
};
// Out of line: with several rows it is long.
template <class V>
__device__ __noinline__ KvSplit find_split(OwnSplits<V> splits, uint32_t number) {
  return splits.split(number);
}

template <class V>
  requires(V::kBatch > 1 && !V::kOverlaps)
struct Cut<V> {
  OwnSplits<V> splits;

  MPK_DEVICE explicit Cut(const Job& job) : splits(job) {}
  MPK_DEVICE uint32_t limit(uint32_t row) const { return splits.rows.limit(row); }
  MPK_DEVICE KvSplit split(uint32_t turn, uint32_t worker) const {
    const uint32_t number = dealt(turn, worker, V::kWorkers);
    return number < splits.count ? find_split<V>(splits, number) : KvSplit{};
  }
};

// For workers that have several splits each: all splits have one length. The rows' last splits come behind all others,
// the longest first. Dealt out to and fro, they give workers about equally many tiles. Finding the order takes a
// microsecond.
template <class V>
struct EqualSplits {
  static constexpr int kEach = RowTiles<V>::kEach;
  static constexpr uint32_t kLength = V::kSplitTiles;
  RowTiles<V> rows;
  uint32_t places[kEach];  // places of the lane's rows, by the length of their last splits

  MPK_DEVICE uint32_t others(int i) const {  // of a group
    const uint32_t tiles = rows.tiles(i);
    return tiles == 0 ? 0 : (tiles - 1) / kLength;
  }

  MPK_DEVICE explicit EqualSplits(const Job& job) : rows(job) {
    uint32_t keys[kEach];  // unique, and larger for rows with longer last splits
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const uint32_t row = rows.row_of(i);
      keys[i] = row < V::kBatch ? (rows.tiles(i) - others(i) * kLength) * V::kBatch + (V::kBatch - 1 - row) : 0;
      places[i] = 0;
    }
    rows.rank(keys, [](int, int) { return 1; }, places);
  }

  MPK_DEVICE KvSplit split(uint32_t number) const {
    uint32_t firsts[kEach], num_others = 0;  // the row's first split; the number of splits that are not last
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const uint32_t mine = others(i) * kUnits<V>, end = warp_sum_so_far(mine, ptx::thread_index() % 32);
      firsts[i] = num_others + end - mine;
      num_others += __shfl_sync(~0u, end, 31);
    }
    const bool is_last = number >= num_others;
    const uint32_t place = (number - num_others) / kUnits<V>;
    KvSplit found{};
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const bool is_here =
          rows.row_of(i) < V::kBatch && (is_last ? places[i] == place : number - firsts[i] < others(i) * kUnits<V>);
      const uint32_t here = __ballot_sync(~0u, is_here);
      if (here == 0) continue;
      const int from = __ffs(here) - 1;
      const uint32_t begin = __shfl_sync(~0u, firsts[i], from), last = __shfl_sync(~0u, others(i), from);
      const uint32_t of_row = number - (is_last ? num_others : begin), group = of_row % kUnits<V>;
      const uint32_t index = is_last ? last : of_row / kUnits<V>, first = index * kLength;
      const uint32_t tiles = __shfl_sync(~0u, rows.tiles(i), from);
      found = {32 * i + uint32_t(from), group, first, is_last ? tiles - first : kLength, index, begin + group, is_last};
    }
    return found;
  }
};
template <class V>
__device__ __noinline__ KvSplit find_split(EqualSplits<V> splits, uint32_t number) {
  return splits.split(number);
}

template <class V>
  requires(V::kBatch > 1 && V::kOverlaps)
struct Cut<V> {
  EqualSplits<V> splits;

  MPK_DEVICE explicit Cut(const Job& job) : splits(job) {}
  MPK_DEVICE uint32_t limit(uint32_t row) const { return splits.rows.limit(row); }
  MPK_DEVICE KvSplit split(uint32_t turn, uint32_t worker) const {
    return find_split<V>(splits, dealt(turn, worker, V::kWorkers));
  }
};

// The variant that takes kFewHeads heads at a time. It has more splits, each of which is done sooner, but it streams
// keys and values more often. It serves positions few enough that each split gets a worker and the least length.
template <class V>
struct Spread : V {
  static constexpr int kPasses = V::kPasses * (V::kHeads / V::kFewHeads), kHeads = V::kFewHeads;
};
template <class V>
inline constexpr bool kMaySpread = V::kBatch == 1 && V::kFewHeads < V::kHeads;
template <class V>
MPK_DEVICE bool spreads(const Job& job) {
  return kv_count(tiles_of<V>(visible<V>(job, 0)), kKvSplitTiles) * kUnits<Spread<V>> <= V::kWorkers;
}

// Whether a group may have more than one split.
template <class V>
MPK_DEVICE constexpr bool may_cut() {
  if (V::kBatch > 1) return kv_own_count(tiles_of<V>(V::kLength), V::kFewSplits, V::kSplitTiles) > 1;
  return kv_max_splits(kUnits<V>, V::kWorkers) / kUnits<V> > 1 && V::kLength > kTile<V> * kKvSplitTiles;
}
template <class V>
inline constexpr bool kMayCut = may_cut<V>();

}  // namespace mpk::attention
