// quantized_linear for weights that cannot be copied as boxes: each warp reads rows of them in place. x is staged as
// the numbers that it is quantised to, with a factor for each run of columns.
#pragma once

#include "torch_mpk/device/tasks/weights_in_place.cuh"

namespace mpk::linear {

template <class V, class C>
concept QuantizedVariant =
    Variant<V, C> && QuantizedSizes<V> && HasScales<V> && HasWeightsInPlace<V> && Constants<int, V::kRun>;

template <class V>
struct DirectShape {
  static constexpr int kPitch = Shape<V>::kPitch;
  static constexpr int kRuns = (V::kSize + V::kRun - 1) / V::kRun;
  static constexpr int kFactorsOffset = V::kBatch * kPitch;
  static constexpr int kStagedBytes = kFactorsOffset + V::kBatch * kRuns * 4;
};

// Quantises rows of x to e4m3, one warp for each.
template <class V, class C>
MPK_DEVICE void quantize_rows(C& c, const Job& job, uint8_t* staged) {
  using T = typename V::T;
  using S = DirectShape<V>;
  float* factors = reinterpret_cast<float*>(staged + S::kFactorsOffset);
  for (int r = c.warp; r < V::kBatch; r += kConsumerWarps) {
    T* row = reinterpret_cast<T*>(staged + r * S::kPitch);
    constexpr int kBlock = V::kXScaleColumns > 0 ? V::kXScaleColumns : V::kSize;
    for (int first = 0; first < V::kSize; first += kBlock) {
      const int end = min(first + kBlock, V::kSize);
      float scale = 1;
      if constexpr (V::kXScaleColumns > 0) {
        float most = 0;
        for (int k = first + c.lane; k < end; k += 32) most = fmaxf(most, fabsf(to_float(row[k])));
        scale = V::kGivenXScale ? V::x_scale(job) : e4m3_scale(warp_max(most));
        for (int k = first + c.lane; k < end; k += 32) row[k] = cast<T>(round_e4m3(to_float(row[k]) / scale));
      }
      for (int run = first / V::kRun + c.lane; run < (end + V::kRun - 1) / V::kRun; run += 32)
        factors[r * S::kRuns + run] = scale;
    }
  }
}

template <class V, class C>
MPK_DEVICE void compute_quantized_direct(C& c, const Job& job) {
  static_assert(QuantizedVariant<V, C>);
  using S = DirectShape<V>;
  using T = typename V::T;
  uint8_t* staged = c.staged();
  if (!stage<V>(c, job, reinterpret_cast<T*>(staged))) return;
  quantize_rows<V>(c, job, staged);
  if (!c.sync()) return;
  const float* factors = reinterpret_cast<const float*>(staged + S::kFactorsOffset);
  const uint32_t worker = c.worker(job);
  for (uint32_t tile = worker + c.warp * C::Config::kNumWorkers; tile < V::kNumTiles;
       tile += kConsumerWarps * C::Config::kNumWorkers) {
    const int segment = segment_of<V>(tile);
    const uint32_t n = tile - V::first_tile(segment);
    for (int r = 0; r < V::kBatch; r++) {
      const T* x = reinterpret_cast<const T*>(staged + r * S::kPitch);
      float results[V::kParts];
#pragma unroll
      for (int p = 0; p < V::kParts; p++) {
        const int which = V::kParts > 1 ? p : segment;
        const RowInPlace<V> row(job, which, n);
        float total = 0;
        for (int run = 0; run < S::kRuns; run++) {
          const int first = run * V::kRun, end = min(first + V::kRun, V::kSize);
          total = fmaf(row.sum(x, first, end, c.lane), factors[r * S::kRuns + run], total);
        }
        results[p] = warp_sum(total);
      }
      if (c.lane == 0) V::finish(c, job, segment, r, n, results, V::preload(job, segment, r, n));
    }
  }
}

}  // namespace mpk::linear
