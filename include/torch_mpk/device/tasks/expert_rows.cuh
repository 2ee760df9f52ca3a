// Products of few rows with the weights of experts that they chose, see csrc/kernels/expert_linear.cpp.
//
// Every worker finds the chosen experts by itself. A tile is 16 rows of the weights of one; tiles are numbered expert
// by expert, and a worker has some that follow each other. A warp multiplies a tile with all pairs that chose its
// expert, eight at a time, so weights are read once. The order in which a pair's products are added depends on the
// sizes alone.
#pragma once

#include "torch_mpk/device/fragment.cuh"
#include "torch_mpk/device/row.cuh"

namespace mpk::experts {

inline constexpr int kTileRows = 16, kStepColumns = 32, kColumnsOfGroup = 8;
inline constexpr int kStepsAhead = 4;  // whose weights a warp has under way

template <class V>
inline constexpr int kMaskWords = (V::kExperts + 31) / 32;
template <class V>
inline constexpr int kGroups = (V::kPairs + kColumnsOfGroup - 1) / kColumnsOfGroup;
// Groups of pairs whose sums are in registers together.
template <class V>
inline constexpr int kGroupsAtOnce = kGroups<V> < 4 ? kGroups<V> : 4;
template <class V>
inline constexpr uint32_t kTilesOfExpert = (V::kRows + kTileRows - 1) / kTileRows;

// The places of shared memory.
template <class V>
struct Staged {
  static constexpr int kListsOffset = (kMaskWords<V> * 4 + 15) / 16 * 16;
  static constexpr int kSumsOffset = kListsOffset + (kConsumerWarps * V::kPairs * 2 + 15) / 16 * 16;
  uint8_t* begin;

  MPK_DEVICE uint32_t* chosen() const { return reinterpret_cast<uint32_t*>(begin); }
  MPK_DEVICE uint16_t* list(int warp) const {
    return reinterpret_cast<uint16_t*>(begin + kListsOffset) + warp * V::kPairs;
  }
  MPK_DEVICE float4* sums(int warp) const { return reinterpret_cast<float4*>(begin + kSumsOffset) + warp * 32; }
};

// The expert of a pair; -1: its id names none.
template <class V>
MPK_DEVICE int expert_of(const int64_t* ids, int pair) {
  const int64_t id = ids[pair / V::kChoices * V::kIdsRow + pair % V::kChoices * V::kIdsChoice];
  return id >= 0 && id < V::kExperts ? int(id) : -1;
}

// The chosen experts, in ascending order, as a warp holds them: 32 in a lane.
struct Chosen {
  uint32_t mine, before;  // of them, in this lane, and in those before it
  uint32_t count;

  MPK_DEVICE Chosen(const uint32_t* mask, int words, int lane) : mine(lane < words ? mask[lane] : 0) {
    before = __popc(mine);
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, before, distance);
      if (lane >= distance) before += other;
    }
    count = __shfl_sync(~0u, before, 31);
    before -= __popc(mine);
  }

  // The number of the one that so many stand before.
  MPK_DEVICE int operator[](uint32_t rank) const {
    const uint32_t there = __ballot_sync(~0u, before <= rank && rank < before + __popc(mine));
    const int lane = __ffs(there) - 1;
    uint32_t bits = __shfl_sync(~0u, mine, lane);
    for (uint32_t skipped = __shfl_sync(~0u, before, lane); skipped < rank; skipped++) bits &= bits - 1;
    return lane * 32 + __ffs(bits) - 1;
  }
};

// Lists the pairs that chose an expert, in ascending order; how many.
template <class V>
MPK_DEVICE int list_pairs(const int64_t* ids, int expert, int lane, uint16_t* list) {
  int count = 0;
  __syncwarp();  // others read the list before
  for (int first = 0; first < V::kPairs; first += 32) {
    const int pair = first + lane;
    const bool is_mine = pair < V::kPairs && expert_of<V>(ids, pair) == expert;
    const uint32_t mine = __ballot_sync(~0u, is_mine);
    if (is_mine) list[count + __popc(mine & ((1u << lane) - 1))] = static_cast<uint16_t>(pair);
    count += __popc(mine);
  }
  __syncwarp();
  return count;
}

// A warp's tile: rows of the weights of one expert, and the pairs that chose it.
template <class V>
struct Tile {
  using T = typename V::T;
  const T *upper, *lower;  // the lane's rows
  uint32_t row;            // the first
  const uint16_t* pairs;
  int num_pairs;

  MPK_DEVICE Tile(const Job& job, int expert, uint32_t row, int lane, const uint16_t* pairs, int num_pairs)
      : row(row), pairs(pairs), num_pairs(num_pairs) {
    const T* weight = V::weight(job) + expert * V::kExpertPitch + lane % 4 * 8;
    const uint32_t last = V::kRows - 1, mine = row + lane / 4;
    upper = weight + (mine < last ? mine : last) * V::kRowPitch;
    lower = weight + (mine + 8 < last ? mine + 8 : last) * V::kRowPitch;
  }

  MPK_DEVICE RowPieces weights(int step) const {
    const int column = step * kStepColumns;
    return {ptx::load_once(reinterpret_cast<const uint4*>(upper + column)),
            ptx::load_once(reinterpret_cast<const uint4*>(lower + column))};
  }

  // The lane's pair of a group; one that is there where the group has fewer, for its products are not kept.
  MPK_DEVICE int pair(int index) const { return pairs[index < num_pairs ? index : 0]; }
  MPK_DEVICE const T* x(const Job& job, int group, int lane) const {
    const int mine = pair(group * kColumnsOfGroup + lane / 4);
    return V::x(job) + mine / V::kChoices * V::kXRow + mine % V::kChoices * V::kXChoice + lane % 4 * 8;
  }

  MPK_DEVICE void store(const Job& job, int group, int lane, const SumFragment& sums) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int index = group * kColumnsOfGroup + lane % 4 * 2 + i % 2;
      const uint32_t mine = row + lane / 4 + i / 2 * 8;
      if (index >= num_pairs || mine >= V::kRows) continue;
      const int pair = pairs[index];
      V::y(job)[pair / V::kChoices * V::kYRow + pair % V::kChoices * V::kYChoice + mine] = cast<T>(sums[i]);
    }
  }
};

// Adds the products of some groups of pairs with the tile's columns of steps [begin, end).
template <class V, int groups>
MPK_DEVICE void multiply(const Job& job, const Tile<V>& tile, int first_group, int lane, int begin, int end,
                         SumFragment (&sums)[groups]) {
  using T = typename V::T;
  const T* x[groups];
#pragma unroll
  for (int g = 0; g < groups; g++) x[g] = tile.x(job, first_group + g, lane);
  RowPieces next[kStepsAhead];
#pragma unroll
  for (int u = 0; u < kStepsAhead; u++) next[u] = begin + u < end ? tile.weights(begin + u) : RowPieces{};
#pragma unroll 1
  for (int step = begin; step < end; step += kStepsAhead) {
#pragma unroll
    for (int u = 0; u < kStepsAhead; u++) {
      const RowPieces weights = next[u];
      if (step + u + kStepsAhead < end) next[u] = tile.weights(step + u + kStepsAhead);
      if (step + u >= end) continue;
#pragma unroll
      for (int g = 0; g < groups; g++) {
        const auto* piece = reinterpret_cast<const uint4*>(x[g] + (step + u) * kStepColumns);
        multiply_pieces<T>(sums[g], sums[g], weights, ColumnPiece{*piece});
      }
    }
  }
}

// Rows whose id names no expert are zeros.
template <class V, class C>
MPK_DEVICE void clear_others(C& c, const Job& job) {
  for (int pair = c.worker(job); pair < V::kPairs; pair += C::Config::kNumWorkers) {
    if (expert_of<V>(V::ids(job), pair) >= 0) continue;
    typename V::T* y = V::y(job) + pair / V::kChoices * V::kYRow + pair % V::kChoices * V::kYChoice;
    for (int i = c.rank; i < V::kRows; i += kConsumerThreads) y[i] = cast<typename V::T>(0.0f);
  }
}

// What the launch chose, to shared memory. False when the launch was given up.
template <class V, class C>
MPK_DEVICE bool find_chosen(C& c, const Job& job, uint32_t* mask) {
  for (int i = c.rank; i < kMaskWords<V>; i += kConsumerThreads) mask[i] = 0;
  if (!c.sync()) return false;
  for (int pair = c.rank; pair < V::kPairs; pair += kConsumerThreads)
    if (const int expert = expert_of<V>(V::ids(job), pair); expert >= 0)
      atomicOr(&mask[expert / 32], 1u << expert % 32);
  return c.sync();
}

// All pairs of a tile, some groups at a time.
template <class V>
MPK_DEVICE void run_tile(const Job& job, const Tile<V>& tile, int lane) {
  constexpr int kSteps = V::kSize / kStepColumns;
  int group = 0;
  const int num_groups = (tile.num_pairs + kColumnsOfGroup - 1) / kColumnsOfGroup;
  while (group < num_groups) {
    const int left = num_groups - group;
    if (left >= 2 && kGroupsAtOnce<V> > 1) {
      SumFragment sums[kGroupsAtOnce<V>] = {};
      multiply<V>(job, tile, group, lane, 0, kSteps, sums);
#pragma unroll
      for (int g = 0; g < kGroupsAtOnce<V>; g++) tile.store(job, group + g, lane, sums[g]);
      group += kGroupsAtOnce<V>;
    } else {
      SumFragment sums[1] = {};
      multiply<V>(job, tile, group, lane, 0, kSteps, sums);
      tile.store(job, group, lane, sums[0]);
      group++;
    }
  }
}

// V: T; kPairs, of kChoices each row; kExperts, whose weights have kRows rows of kSize, at kExpertPitch and kRowPitch;
// kXRow, kXChoice, kIdsRow, kIdsChoice, kYRow, kYChoice, pitches; kSplits; x(job), ids(job), weight(job), y(job).
template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  if (!c.await()) return;
  const Staged<V> staged{c.staged()};
  if (!find_chosen<V>(c, job, staged.chosen())) return;
  clear_others<V>(c, job);
  const Chosen chosen(staged.chosen(), kMaskWords<V>, c.lane);
  constexpr uint32_t kWorkers = C::Config::kNumWorkers, kAtOnce = kConsumerWarps / V::kSplits;
  const uint32_t num_tiles = chosen.count * kTilesOfExpert<V>, worker = c.worker(job);
  const auto share = [&](uint32_t w) { return static_cast<uint32_t>(uint64_t(w) * num_tiles / kWorkers); };
  const uint32_t end = share(worker + 1);
  uint16_t* list = staged.list(c.warp);
  int expert = -1, num_pairs = 0;
  for (uint32_t first = share(worker); first < end; first += kAtOnce) {
    const uint32_t number = first + c.warp / V::kSplits;
    if (number < end) {
      const int chosen_one = chosen[number / kTilesOfExpert<V>];
      if (chosen_one != expert) {
        expert = chosen_one;
        num_pairs = list_pairs<V>(V::ids(job), expert, c.lane, list);
      }
    }
    const Tile<V> tile(job, expert < 0 ? 0 : expert, number % kTilesOfExpert<V> * kTileRows, c.lane, list, num_pairs);
    if constexpr (V::kSplits == 1) {
      if (number < end) run_tile(job, tile, c.lane);
    } else {
      constexpr int kSteps = V::kSize / kStepColumns;
      const int split = c.warp % V::kSplits;
      SumFragment sums[1] = {};
      if (number < end)
        multiply<V>(job, tile, 0, c.lane, split * kSteps / V::kSplits, (split + 1) * kSteps / V::kSplits, sums);
      staged.sums(c.warp)[c.lane] = {sums[0][0], sums[0][1], sums[0][2], sums[0][3]};
      if (!c.sync()) return;
      if (number < end && split == 0) {
#pragma unroll
        for (int other = 1; other < V::kSplits; other++) {
          const float4 added = staged.sums(c.warp + other)[c.lane];
          sums[0][0] += added.x, sums[0][1] += added.y, sums[0][2] += added.z, sums[0][3] += added.w;
        }
        tile.store(job, 0, c.lane, sums[0]);
      }
      if (!c.sync()) return;
    }
  }
}

}  // namespace mpk::experts
