// A norm between two linears, without a phase of its own: y = W (g x r), where g is a factor of each column and r of
// each row. The linear that makes x stores g x and sums of x's squares. The linear behind it multiplies its sums by r,
// which follows from all squares of a row (rms_norm.cuh).
//
// sum_place gives the place of sum `i` of row `r`: four sums of a row side by side, so that a warp's accesses are
// neighbours when each lane reads a row.
#pragma once

#include "torch_mpk/device/tasks/linear_rows_shape.cuh"

namespace mpk::linear {

template <class V>
MPK_DEVICE uint32_t sum_place(uint32_t i, uint32_t r) {
  return (i / 4 * V::kBatch + r) * 4 + i % 4;
}

// Strips of 32 results of a row of so many tiles. Where sums are left: of the most tiles.
template <class V>
MPK_DEVICE uint32_t strips_of(uint32_t tiles) {
  return ((V::kEndsWithNorm ? V::kMainloopTiles : tiles) * V::kBoxRows + 31) / 32;
}

// What a worker leaves: a sum for every strip of each pass, for each row. Made where it is needed, since keeping it
// would take the products' registers.
template <RowsSizes V>
class RowSums {
 public:
  // For pass `pass`.
  template <class C>
  MPK_DEVICE RowSums(const C& c, const Job& job, uint32_t pass) {
    if constexpr (V::kEndsWithNorm) {
      constexpr uint32_t kGroups = C::Config::kNumWorkers / V::kSplit, kTiles = (V::kNumTiles + kGroups - 1) / kGroups;
      constexpr uint32_t kSums = (kTiles + V::kMainloopTiles - 1) / V::kMainloopTiles * kStrips;
      static_assert(V::kRowSums == kGroups * kSums, "the schedule has other sums of rows");
      const uint32_t group = c.worker(job) / V::kSplit;  // or, of those left over, none
      sums_ = V::row_sums(job);
      first_ = group * kSums + pass * kStrips;
      end_ = group < kGroups ? (group + 1) * kSums : first_;
    }
  }
  MPK_DEVICE void leave(uint32_t strip, uint32_t r, float sum) const { sums_[sum_place<V>(first_ + strip, r)] = sum; }
  // Zeros the sums of this pass and those behind it, which other workers have and this one has not.
  template <class C>
  MPK_DEVICE void leave_none(const C& c) const {
    if constexpr (V::kEndsWithNorm)
      for (uint32_t i = c.rank; i < (end_ - first_) * V::kBatch; i += kConsumerThreads)
        leave(i / V::kBatch, i % V::kBatch, 0);
  }
  // Factors of columns come from memory, which takes longer than the rest of a pass's end.
  template <class C>
  MPK_DEVICE static void fetch_factors(const C& c, const Job& job, Span tiles) {
    if constexpr (V::kEndsWithNorm) {
      constexpr uint32_t kColumns = 16;  // of 32 bytes
      const uint32_t n = tiles.begin * V::kBoxRows + c.rank * kColumns;
      if (n < min(tiles.end * V::kBoxRows, V::num_rows(0))) V::fetch_factor(job, n);
    }
  }

 private:
  static constexpr uint32_t kStrips = (V::kMainloopTiles * V::kBoxRows + 31) / 32;
  float* sums_ = nullptr;
  uint32_t first_ = 0, end_ = 0;
};

// Finds the factors of x's rows with `warps` warps; this is number `warp`. A lane adds every kLanes'th four sums of a
// row, and neighbouring lanes add their totals.
template <class V, int warps>
MPK_DEVICE void find_factors(const Job& job, int warp, int lane, float* factors) {
  constexpr int kRows = (V::kBatch + warps - 1) / warps, kLanes = 32 / next_power_of_two(kRows);
  constexpr int kFours = (V::kSumsOfX + 3) / 4, kSteps = (kFours + kLanes - 1) / kLanes, kAtOnce = 8;
  static_assert(kRows <= 32);
  const int row = warp * kRows + lane / kLanes, first = lane % kLanes;
  const bool is_there = lane / kLanes < kRows && row < V::kBatch;
  const float4* sums = reinterpret_cast<const float4*>(V::sums_of_x(job)) + row;
  float total = 0;
#pragma unroll 1
  for (int step = 0; step < kSteps; step += kAtOnce) {
    float4 four[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int number = (step + i) * kLanes + first;
      four[i] = is_there && number < kFours ? sums[number * V::kBatch] : float4{};
      if (V::kSumsOfX % 4 != 0 && number == kFours - 1) {  // nothing stands behind the last one
        if (V::kSumsOfX % 4 < 2) four[i].y = 0;
        if (V::kSumsOfX % 4 < 3) four[i].z = 0;
        four[i].w = 0;
      }
    }
#pragma unroll
    for (const float4& each : four) total += (each.x + each.y) + (each.z + each.w);
  }
  total = warp_sum<kLanes>(total);
  if (is_there && first == 0) factors[row] = rsqrtf(total * (1.0f / V::kSize) + V::kEps);
}

}  // namespace mpk::linear
