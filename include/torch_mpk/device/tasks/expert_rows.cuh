// Products of few rows with the weights of their chosen experts, see csrc/kernels/experts/expert_linear.cpp.
//
// Every warp finds the chosen experts by itself. A tile is 16 rows of one expert's weights. Tiles are numbered expert
// by expert, and a worker has consecutive ones. With an activation behind the products, a tile is eight rows of the
// gate and the matching eight rows of the other half. A warp multiplies a tile with all pairs that chose its expert,
// eight at a time, so weights are read once. The order of a pair's sums depends on sizes alone.
#pragma once

#include "torch_mpk/device/fragment.cuh"
#include "torch_mpk/device/row.cuh"

namespace mpk::experts {

inline constexpr int kTileRows = 16, kStepColumns = 32, kColumnsOfGroup = 8;
inline constexpr int kStepsAhead = 8;  // weights that a warp has in flight, where it reads all of them itself

template <class V>
inline constexpr int kMaskWords = (V::kExperts + 31) / 32;
// Groups of pairs whose sums are in registers at once: all pairs of an expert, if no row chose it twice.
template <class V>
inline constexpr int kGroups = (V::kPairs / V::kChoices + kColumnsOfGroup - 1) / kColumnsOfGroup;
template <class V>
inline constexpr uint32_t kTilesOfExpert = (V::kRows + kTileRows - 1) / kTileRows;
template <class V>
inline constexpr int kListBytes = (V::kPairs * 2 + 15) / 16 * 16;  // of a warp's list

// Whether an activation combines two results of each pair and point, from weight rows at kFirstHalf and kSecondHalf.
template <class V>
concept Gated = requires { V::kFirstHalf; };

// Whether products are summed over a row's choices, in shared memory, see expert_sums.cuh.
template <class V>
concept Summed = requires { V::kInner; };

// The first of the eight weight rows of the lanes' upper, or lower, rows. `row`: 16 times the tile's number within its
// expert.
template <class V>
MPK_DEVICE uint32_t first_weight_row(uint32_t row, bool is_lower) {
  if constexpr (Gated<V>)
    return row / 2 + uint32_t(is_lower ? V::kSecondHalf : V::kFirstHalf);
  else
    return row + (is_lower ? 8 : 0);
}

// The expert of a pair, or -1 if its id names none.
template <class V>
MPK_DEVICE int expert_of(const int64_t* ids, int pair) {
  const int64_t id = ids[pair / V::kChoices * V::kIdsRow + pair % V::kChoices * V::kIdsChoice];
  return id >= 0 && id < V::kExperts ? int(id) : -1;
}

// The chosen experts in ascending order. A warp holds them as bits, 32 in each lane.
template <class V>
struct Chosen {
  uint32_t mine = 0, before;  // this lane's experts; how many the lanes before have
  uint32_t count;

  MPK_DEVICE Chosen(const int64_t* ids, int lane) {
    for (int first = 0; first < V::kPairs; first += 32) {
      const int expert = first + lane < V::kPairs ? expert_of<V>(ids, first + lane) : -1;
#pragma unroll 1
      for (int word = 0; word < kMaskWords<V>; word++) {
        const uint32_t found = __reduce_or_sync(~0u, expert >= 0 && expert / 32 == word ? 1u << expert % 32 : 0);
        if (lane == word) mine |= found;
      }
    }
    before = __popc(mine);
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, before, distance);
      if (lane >= distance) before += other;
    }
    count = __shfl_sync(~0u, before, 31);
    before -= __popc(mine);
  }

  // The expert with this rank, which may differ by lane.
  MPK_DEVICE int operator[](uint32_t rank) const {
    int found = 0;
#pragma unroll 1
    for (int word = 0; word < kMaskWords<V>; word++) {
      uint32_t bits = __shfl_sync(~0u, mine, word);
      uint32_t skipped = __shfl_sync(~0u, before, word);
      if (rank < skipped || rank - skipped >= uint32_t(__popc(bits))) continue;
      for (; skipped < rank; skipped++) bits &= bits - 1;
      found = word * 32 + __ffs(bits) - 1;
    }
    return found;
  }
};

// A worker's tiles among all tiles of the chosen experts.
template <class V>
MPK_DEVICE Span tiles_of(const Chosen<V>& chosen, uint32_t worker, uint32_t num_workers) {
  return static_span(chosen.count * kTilesOfExpert<V>, worker, num_workers);
}

// Lists the pairs that chose an expert, in ascending order. Returns their number.
template <class V>
MPK_DEVICE int list_pairs(const int64_t* ids, int expert, int lane, uint16_t* list) {
  int count = 0;
  __syncwarp();  // other lanes have read the list
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

// The pairs of one expert, as a warp multiplies them.
template <class V>
struct Pairs {
  using T = typename V::T;
  uint16_t* list;
  T* products = nullptr;  // 16 weight rows by all pairs, where products are summed
  int expert = -1, count = 0;

  MPK_DEVICE void find(const Job& job, int chosen, int lane) {
    if (chosen == expert) return;
    expert = chosen;
    count = list_pairs<V>(V::ids(job), expert, lane, list);
  }
  MPK_DEVICE int num_groups() const { return (count + kColumnsOfGroup - 1) / kColumnsOfGroup; }

  // The lane's row of x in a group. A lane without a row reads another lane's, and its products are dropped.
  MPK_DEVICE const T* row_of_x(const Job& job, int group, int lane) const {
    const int index = group * kColumnsOfGroup + lane / 4, mine = list[index < count ? index : 0];
    return V::x(job) + mine / V::kChoices * V::kXRow + mine % V::kChoices * V::kXChoice;
  }
  MPK_DEVICE const T* x(const Job& job, int group, int lane) const { return row_of_x(job, group, lane) + lane % 4 * 8; }

  // Computes the results of a group's sums. The lane has those of two pairs.
  MPK_DEVICE void store(const Job& job, int group, uint32_t row, int lane, const SumFragment& sums) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int index = group * kColumnsOfGroup + lane % 4 * 2 + i;
      if (index < count) store(job, list[index], row, lane / 4, cast<T>(sums[i]), cast<T>(sums[i + 2]));
    }
  }
  MPK_DEVICE void store(const Job& job, int pair, uint32_t row, int of_eight, T upper, T lower) const {
    if constexpr (Summed<V>) {
      products[pair * kTileRows + of_eight] = upper;
      products[pair * kTileRows + of_eight + 8] = lower;
    } else if constexpr (Gated<V>) {
      V::combine(job, pair * V::kColumns + int(row) / 2 + of_eight, upper, lower);
    } else {
      typename V::T* y = V::y(job) + pair / V::kChoices * V::kYRow + pair % V::kChoices * V::kYChoice;
      const uint32_t mine = row + of_eight;
      if (mine < V::kRows) y[mine] = upper;
      if (mine + 8 < V::kRows) y[mine + 8] = lower;
    }
  }
};

// The addresses of a lane's rows of a tile of weights.
template <class V>
struct WeightRows {
  using T = typename V::T;
  const T *upper, *lower;

  MPK_DEVICE WeightRows(const Job& job, int expert, uint32_t row, int lane) {
    const T* weight = V::weight(job) + expert * V::kExpertPitch + lane % 4 * 8;
    const uint32_t last = V::kRows - 1, of_eight = lane / 4;
    upper = weight + min(first_weight_row<V>(row, false) + of_eight, last) * V::kRowPitch;
    lower = weight + min(first_weight_row<V>(row, true) + of_eight, last) * V::kRowPitch;
  }

  MPK_DEVICE RowFragment operator[](int step) const {
    const int column = step * kStepColumns;
    return {ptx::load_once(reinterpret_cast<const uint4*>(upper + column)),
            ptx::load_once(reinterpret_cast<const uint4*>(lower + column))};
  }
};

template <class T>
MPK_DEVICE ColumnFragment fragment_of(const T* x, int step) {
  return {*reinterpret_cast<const uint4*>(x + step * kStepColumns)};
}

// Multiplies a tile with a group of pairs.
template <int ahead, class V>
MPK_DEVICE void multiply_group(const Job& job, const Pairs<V>& pairs, int group, uint32_t row, int lane) {
  using T = typename V::T;
  constexpr int kSteps = V::kSize / kStepColumns;
  const WeightRows<V> weights(job, pairs.expert, row, lane);
  const T* x = pairs.x(job, group, lane);
  SumFragment sums = {};
  RowFragment next[ahead];
#pragma unroll
  for (int u = 0; u < ahead; u++) next[u] = u < kSteps ? weights[u] : RowFragment{};
#pragma unroll 1
  for (int first = 0; first < kSteps; first += ahead)
#pragma unroll
    for (int u = 0; u < ahead; u++) {
      const int step = first + u;
      const RowFragment now = next[u];
      if (step + ahead < kSteps) next[u] = weights[step + ahead];
      if (step < kSteps) multiply_fragments<T>(sums, sums, now, fragment_of(x, step));
    }
  pairs.store(job, group, row, lane, sums);
}

// Rows whose id names no expert are zeros.
template <class V, class C>
MPK_DEVICE void clear_others(C& c, const Job& job) {
  using T = typename V::T;
  const Pairs<V> pairs{};
  for (int pair = c.worker(job); pair < V::kPairs; pair += C::Config::kNumWorkers) {
    if (expert_of<V>(V::ids(job), pair) >= 0) continue;
    for (int i = c.rank; i < int(kTilesOfExpert<V>) * kTileRows / 2; i += kConsumerThreads)
      pairs.store(job, pair, i / 8 * kTileRows, i % 8, cast<T>(0.0f), cast<T>(0.0f));
  }
}

// Calls f(pairs, row, number, num_tiles) for each of the warp's tiles until f returns false: the pairs of its expert,
// its first weight row, its number among the worker's tiles, and their count. Call it after await().
template <class V, class C, class F>
MPK_DEVICE uint32_t for_each_tile(C& c, const Job& job, F f) {
  clear_others<V>(c, job);
  const Chosen<V> chosen(V::ids(job), c.lane);
  const Span mine = tiles_of<V>(chosen, c.worker(job), C::Config::kNumWorkers);
  Pairs<V> pairs{reinterpret_cast<uint16_t*>(c.staged() + c.warp * kListBytes<V>)};
#pragma unroll 1
  for (uint32_t tile = mine.begin + c.warp; tile < mine.end; tile += kConsumerWarps) {
    pairs.find(job, chosen[tile / kTilesOfExpert<V>], c.lane);
    if (!f(pairs, tile % kTilesOfExpert<V> * kTileRows, tile - mine.begin, mine.end - mine.begin)) break;
  }
  return mine.end - mine.begin;
}

// V: T; kPairs, kChoices for each row; kExperts, whose weights have kRows rows of kSize, which are kRowBytes, at
// kExpertPitch and kRowPitch; pitches kXRow, kXChoice, kIdsRow, kIdsChoice; x(job), ids(job), weight(job). Results:
// kYRow, kYChoice and y(job), or kColumns, kFirstHalf, kSecondHalf and combine(job, point, first, second).
template <class V, class C>
MPK_DEVICE void compute_rows(C& c, const Job& job) {
  if (!c.await()) return;
  for_each_tile<V>(c, job, [&](const Pairs<V>& pairs, uint32_t row, uint32_t, uint32_t) {
    for (int group = 0; group < pairs.num_groups(); group++)
      multiply_group<kStepsAhead>(job, pairs, group, row, c.lane);
    return true;
  });
}

}  // namespace mpk::experts
