// linear: y[r, n] = sum over k of x[r, k] * weight[n, k], with the weights streamed through the ring, as the table
// says.
//
// A tile is a few complete output rows (rows of the weight). Its bytes are consecutive ring entries ("chunks") of at
// most one slot. It belongs to one warp. With one row of x, warps share the runs of its entries, and their sums are
// added in order. The k of a lane, and the order of its sums, depend on k alone, so a value has the same bits in any
// tile.
#pragma once

#include "torch_mpk/device/tasks/linear_alone.cuh"
#include "torch_mpk/device/tasks/linear_shared.cuh"

namespace mpk::linear {

template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  static_assert(Variant<V, C>);
  if constexpr (V::kSharesLoop) {
    compute_shared<Only<V>>(c, job);
  } else {
    compute_alone<V>(c, job);
  }
}

// Without the ring: each warp reads a few rows of weights in place, for some rows of x, which are staged or read in
// place, too. The order of a sum depends on k alone.
template <class V>
inline constexpr int kDirectStagedBytes = V::kStaged ? V::kBatch * Shape<V>::kPitch : 0;

// Multiplies weight rows `tile`, `tile` + 1, ... with rows `first` and on of x.
template <class V, class C>
MPK_DEVICE void multiply_direct(C& c, const Job& job, uint32_t tile, int first, const typename V::T* x, int64_t pitch) {
  using T = typename V::T;
  constexpr int kParts = V::kParts, kTiles = V::kWeightRows, kX = V::kXRows;
  constexpr int kWidth = V::kAligned ? kVecSize<T> : 1, kSums = next_power_of_two(kParts * kTiles * kX);
  using Access = Vec<T, kWidth>;
  const T* rows[kParts * kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; t++) {
    const uint32_t each = min(tile + t, V::kNumTiles - 1);
    const int segment = segment_of<V>(each);
#pragma unroll
    for (int p = 0; p < kParts; p++) {
      const int which = kParts > 1 ? p : segment;
      rows[p * kTiles + t] =
          reinterpret_cast<const T*>(V::weight(job, which) + (each - V::first_tile(segment)) * V::weight_pitch(which));
    }
  }
  float sums[kSums] = {};
#pragma unroll 1
  for (int k = c.lane * kWidth; k < V::kSize; k += 32 * kWidth) {
    float weights[kParts * kTiles][kWidth];
#pragma unroll
    for (int i = 0; i < kParts * kTiles; i++) to_floats(*reinterpret_cast<const Access*>(rows[i] + k), weights[i]);
#pragma unroll
    for (int r = 0; r < kX; r++) {
      float values[kWidth];
      to_floats(*reinterpret_cast<const Access*>(x + min(first + r, V::kBatch - 1) * pitch + k), values);
#pragma unroll
      for (int i = 0; i < kParts * kTiles; i++)
#pragma unroll
        for (int j = 0; j < kWidth; j++) sums[i * kX + r] = fmaf(weights[i][j], values[j], sums[i * kX + r]);
    }
  }
  const float total = sum_values(sums, c.lane);
  const int t = c.lane / kX, r = first + c.lane % kX;  // of the lane's result
  float results[kParts];
#pragma unroll
  for (int p = 0; p < kParts; p++) results[p] = __shfl_sync(~0u, total, (p * kTiles * kX + c.lane) * (32 / kSums) % 32);
  if (t >= kTiles || tile + t >= V::kNumTiles || r >= V::kBatch) return;
  const int segment = segment_of<V>(tile + t);
  const uint32_t n = tile + t - V::first_tile(segment);
  V::finish(c, job, segment, r, n, results, V::preload(job, segment, r, n));
}

template <class V, class C>
MPK_DEVICE void compute_direct(C& c, const Job& job) {
  static_assert(DirectVariant<V, C>);
  using T = typename V::T;
  const T* x = V::x(job);
  int64_t pitch = V::kPitchX;
  if constexpr (V::kStaged) {
    T* staged = reinterpret_cast<T*>(c.staged());
    if (!stage<V>(c, job, staged)) return;
    x = staged, pitch = Shape<V>::kPitch / int(sizeof(T));
  } else {
    if (!c.await()) return;
  }
  constexpr uint32_t kBlocks = (V::kBatch + V::kXRows - 1) / V::kXRows;
  constexpr uint32_t kItems = (V::kNumTiles + V::kWeightRows - 1) / V::kWeightRows * kBlocks;
  const uint32_t first = c.worker(job) + c.warp * C::Config::kNumWorkers,
                 step = kConsumerWarps * C::Config::kNumWorkers;
  for (uint32_t i = first; i < kItems; i += step)
    multiply_direct<V>(c, job, i / kBlocks * V::kWeightRows, int(i % kBlocks) * V::kXRows, x, pitch);
}

}  // namespace mpk::linear
