// Products of few rows with the weights of their chosen experts, see csrc/kernels/experts/expert_linear.cpp.
//
// Every warp finds the chosen experts by itself. A tile is 16 rows of one expert's weights. Tiles are numbered expert
// by expert, and a worker has consecutive ones. With an activation of halves behind the products, a tile is eight rows
// of the gate and the matching eight rows of the other half. A warp multiplies a tile with the pairs that chose its
// expert, in groups of eight, so weights are read once for as many as it has sums for. If there are more pairs, it
// reads them again, from L2. The order of a pair's sums depends on sizes alone.
#pragma once

#include "torch_mpk/device/fragment.cuh"
#include "torch_mpk/device/row.cuh"

namespace mpk::experts {

inline constexpr int kTileRows = 16, kStepColumns = 32;

// Whether weights are stored as [E, K, N], see expert_columns.cuh.
template <class V>
concept Transposed = requires { V::kDepthPitch; };

template <class V>
inline constexpr int kTileSize = Transposed<V> ? kBoxColumns : kTileRows;  // results of a pair that a tile has
template <class V>
inline constexpr int kMaskWords = (V::kExperts + 31) / 32;
template <class V>
inline constexpr int kListed = listed_pairs(V::kPairs / V::kChoices, Transposed<V>);
template <class V>
inline constexpr int kGroups = kListed<V> / kPairsOfGroup;
template <class V>
inline constexpr int kListBytes = kListed<V> * 4;
template <class V>
inline constexpr uint32_t kTilesOfExpert = (V::kRows + kTileSize<V> - 1) / kTileSize<V>;

// Whether an activation combines two results of each pair and point: from weight rows at kFirstHalf and kSecondHalf, or
// from neighbouring ones.
template <class V>
concept Halved = requires { V::kFirstHalf; };
template <class V>
concept Interleaved = requires { V::kInterleaved; };

// Whether products are summed over a row's choices: in shared memory, see expert_sums.cuh, or where weights are stored
// as [E, K, N] by way of the workspace, see expert_column_sums.cuh.
template <class V>
concept Summed = requires { V::kInner; };
template <class V>
concept SummedColumns = Summed<V> && Transposed<V>;

// The first of the eight weight rows of the lanes' upper, or lower, rows. `row`: the first row of the tile, as if a
// tile of halves had 16 rows side by side.
template <class V>
MPK_DEVICE uint32_t first_weight_row(uint32_t row, bool is_lower) {
  if constexpr (Halved<V>)
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
#pragma unroll 4
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

// The two factors of a point, and its number among the eight of a tile of 16 rows.
template <class T>
struct Factors {
  T first, second;
  int of_eight;
};

// Lanes with neighbouring rows, four lanes apart, have both factors of a point of the upper half and of one of the
// lower. The even lane gets the former, the odd one the latter.
template <class T>
MPK_DEVICE Factors<T> exchange(float upper, float lower, int lane) {
  const int row = lane / 4;
  const bool is_odd = row % 2 == 1;
  const float other = __shfl_xor_sync(~0u, is_odd ? upper : lower, 4);
  return {cast<T>(is_odd ? other : upper), cast<T>(is_odd ? lower : other), row / 2 + (is_odd ? 4 : 0)};
}

// The pairs of one expert, as a warp multiplies them: as many as it has sums for at a time, in ascending order.
template <class V>
struct Pairs {
  using T = typename V::T;
  uint32_t* list;
  T* products = nullptr;                           // 16 weight rows by all pairs, where products are summed
  uint32_t tag = 0;                                // of their words, where these are in the workspace
  int expert = -1, count = 0, begin = 0, end = 0;  // those listed are among the pairs from begin to end

  // Lists the first pairs that chose an expert.
  MPK_DEVICE void find(const Job& job, int chosen, int lane) {
    if (chosen == expert && begin == 0) return;
    expert = chosen;
    end = 0;
    find_next(job, lane);
  }
  // Lists the next pairs of the same expert. False if there are none.
  MPK_DEVICE bool find_next(const Job& job, int lane) {
    const int64_t* ids = V::ids(job);
    begin = end, count = 0;
    __syncwarp();  // other lanes have read the list
    while (end < V::kPairs && count < kListed<V>) {
      const int pair = end + lane;
      const bool is_mine = pair < V::kPairs && expert_of<V>(ids, pair) == expert;
      const uint32_t mine = __ballot_sync(~0u, is_mine);
      const int place = count + __popc(mine & ((1u << lane) - 1));
      const bool fits = is_mine && place < kListed<V>;
      if (fits) list[place] = pair;
      const uint32_t listed = __ballot_sync(~0u, fits);
      count += __popc(listed);
      end += listed == mine ? 32 : 32 - __clz(listed);
    }
    __syncwarp();
    return count > 0;
  }
  MPK_DEVICE int num_groups() const { return (count + kPairsOfGroup - 1) / kPairsOfGroup; }

  // Where the lane's row of a group is in x. A lane without a row reads another lane's, and its products are dropped.
  MPK_DEVICE int row_of_x(int group, int lane) const {
    const int index = group * kPairsOfGroup + lane / 4, mine = list[index < count ? index : 0];
    return mine / V::kChoices * V::kXRow + mine % V::kChoices * V::kXChoice;
  }

  // Computes the results of a group's sums. The lane has those of two pairs.
  MPK_DEVICE void store(const Job& job, int group, uint32_t row, int lane, const SumFragment& sums) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int index = group * kPairsOfGroup + lane % 4 * 2 + i;
      if constexpr (Interleaved<V>) {
        const Factors<T> factors = exchange<T>(sums[i], sums[i + 2], lane);
        if (index < count) store(job, list[index], row, factors.of_eight, factors.first, factors.second);
      } else {
        if (index < count) store(job, list[index], row, lane / 4, cast<T>(sums[i]), cast<T>(sums[i + 2]));
      }
    }
  }
  // Stores two products, or computes the result that they are the factors of.
  MPK_DEVICE void store(const Job& job, int pair, uint32_t row, int of_eight, T upper, T lower) const {
    if constexpr (Summed<V>) {
      products[pair * kTileRows + of_eight] = upper;
      products[pair * kTileRows + of_eight + 8] = lower;
    } else if constexpr (Halved<V> || Interleaved<V>) {
      V::combine(job, pair * V::kColumns + int(row) / 2 + of_eight, upper, lower);
    } else {
      store_result(job, pair, row + of_eight, upper);
      store_result(job, pair, row + of_eight + 8, lower);
    }
  }
  MPK_DEVICE void store_result(const Job& job, int pair, uint32_t row, T value) const {
    if (row < V::kRows) V::y(job)[pair / V::kChoices * V::kYRow + pair % V::kChoices * V::kYChoice + row] = value;
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
    return {load(upper + column), load(lower + column)};
  }

 private:
  MPK_DEVICE static uint4 load(const T* from) {
    const auto* access = reinterpret_cast<const uint4*>(from);
    return V::kMadeWeights ? ptx::load_made_once(access) : ptx::load_once(access);
  }
};

template <class T>
MPK_DEVICE ColumnFragment fragment_of(const T* x, int step) {
  return {*reinterpret_cast<const uint4*>(x + step * kStepColumns)};
}

// The lane's rows of x and sums, of a tile and the listed pairs.
template <class V>
struct TileSums {
  using T = typename V::T;
  static constexpr int kChains = kGroups<V> == 1 ? 2 : 1;  // of products that wait for each other
  const T* x;
  int rows[kGroups<V>], num_groups;
  SumFragment sums[kGroups<V>][kChains] = {};

  MPK_DEVICE TileSums(const Job& job, const Pairs<V>& pairs, int lane)
      : x(V::x(job) + lane % 4 * 8), num_groups(pairs.num_groups()) {
#pragma unroll
    for (int g = 0; g < kGroups<V>; g++) rows[g] = pairs.row_of_x(g, lane);
  }
  MPK_DEVICE void add(const RowFragment& weights, int step) {
#pragma unroll
    for (int g = 0; g < kGroups<V>; g++)
      if (g == 0 || g < num_groups)
        multiply_fragments<T>(sums[g][0], sums[g][kChains - 1], weights, fragment_of(x + rows[g], step));
  }
  MPK_DEVICE void store(const Job& job, const Pairs<V>& pairs, uint32_t row, int lane) {
#pragma unroll
    for (int g = 0; g < kGroups<V>; g++) {
      if constexpr (kChains > 1)
        for (int i = 0; i < 4; i++) sums[g][0][i] += sums[g][1][i];
      pairs.store(job, g, row, lane, sums[g][0]);
    }
  }
};

// Steps of weights that a warp has in flight where it reads all of them itself: as many as registers hold beside sums.
template <class V>
constexpr int steps_ahead() {
  if (Transposed<V>) return kGroups<V> == 1 ? 2 : 1;
  return kGroups<V> == 1 ? 8 : kGroups<V> == 2 ? 4 : kGroups<V> <= 4 ? 2 : 1;
}

// Multiplies a tile with the listed pairs. The warp reads the weights, `ahead` steps before they are multiplied.
template <int ahead, class V>
MPK_DEVICE void multiply_listed(const Job& job, const Pairs<V>& pairs, uint32_t row, int lane) {
  constexpr int kSteps = V::kSize / kStepColumns;
  const WeightRows<V> weights(job, pairs.expert, row, lane);
  TileSums<V> sums(job, pairs, lane);
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
      if (step < kSteps) sums.add(now, step);
    }
  sums.store(job, pairs, row, lane);
}

// Rows whose id names no expert are zeros.
template <class V, class C>
MPK_DEVICE void clear_others(C& c, const Job& job) {
  using T = typename V::T;
  const Pairs<V> pairs{};
  for (int pair = c.worker(job); pair < V::kPairs; pair += C::Config::kNumWorkers) {
    if (expert_of<V>(V::ids(job), pair) >= 0) continue;
    for (int i = c.rank; i < int(kTilesOfExpert<V>) * kTileSize<V> / 2; i += kConsumerThreads)
      pairs.store(job, pair, i / 8 * kTileRows, i % 8, cast<T>(0.0f), cast<T>(0.0f));
  }
}

// Calls f(pairs, row, number, num_tiles) for each of the warp's tiles until f returns false: the pairs of its expert,
// its first weight row, its number among the worker's tiles, and their count. Call it after await().
template <class V, class C, class F>
MPK_DEVICE uint32_t for_each_tile(C& c, const Job& job, F f) {
  if constexpr (!SummedColumns<V>) clear_others<V>(c, job);
  const Chosen<V> chosen(V::ids(job), c.lane);
  const Span mine = tiles_of<V>(chosen, c.worker(job), C::Config::kNumWorkers);
  Pairs<V> pairs{reinterpret_cast<uint32_t*>(c.staged() + c.warp * kListBytes<V>)};
  if constexpr (SummedColumns<V>) pairs.tag = tag_of(c);
#pragma unroll 1
  for (uint32_t tile = mine.begin + c.warp; tile < mine.end; tile += kConsumerWarps) {
    pairs.find(job, chosen[tile / kTilesOfExpert<V>], c.lane);
    if (!f(pairs, tile % kTilesOfExpert<V> * kTileSize<V>, tile - mine.begin, mine.end - mine.begin)) break;
  }
  return mine.end - mine.begin;
}

// V: T; kPairs, kChoices for each row; kExperts, whose weights have kRows rows of kSize, which are kRowBytes, at
// kExpertPitch and kRowPitch, or kSize rows of kRows at kDepthPitch; pitches kXRow, kXChoice, kIdsRow, kIdsChoice;
// x(job), ids(job), weight(job), which the launch has written if kMadeWeights. Results: kYRow, kYChoice and y(job), or
// kColumns, combine(job, point, first, second), and kInterleaved or kFirstHalf and kSecondHalf.
template <class V, class C>
MPK_DEVICE void compute_rows(C& c, const Job& job) {
  if (!c.await()) return;
  for_each_tile<V>(c, job, [&](Pairs<V>& pairs, uint32_t row, uint32_t, uint32_t) {
    do multiply_listed<steps_ahead<V>()>(job, pairs, row, c.lane);
    while (pairs.find_next(job, c.lane));
    return true;
  });
}

}  // namespace mpk::experts
