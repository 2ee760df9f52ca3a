// Device code of elsewhere.cpp.
#pragma once

#include "torch_mpk/device/tasks/linear_shape.cuh"

namespace mpk::linear_elsewhere {

// Each warp takes V::kRowsAtOnce tiles, a row of weights each, one behind the other.
template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  using S = linear::Shape<V>;
  using T = typename V::T;
  T* x = reinterpret_cast<T*>(c.staged() + S::kScratchBytes);
  if (!linear::stage<V>(c, job, x)) return;
  constexpr uint32_t kWarps = kConsumerWarps * C::Config::kNumWorkers, kRows = V::kRowsAtOnce;
  const uint32_t warp = c.worker(job) * kConsumerWarps + c.warp;
  for (uint32_t first = warp * kRows; first < V::kNumTiles; first += kWarps * kRows)
    for (uint32_t tile = first; tile < min(first + kRows, V::kNumTiles); tile++) {
      const int segment = linear::segment_of<V>(tile);
      const uint32_t n = tile - V::first_tile(segment);
      float results[V::kParts];
      for (int p = 0; p < V::kParts; p++) {
        const int which = V::kParts > 1 ? p : segment;
        const T* row = V::weight(job, which) + n * V::pitch(which);
        float sum = 0;
        for (int k = c.lane; k < V::kSize; k += 32) sum = fmaf(to_float(row[k]), to_float(x[k]), sum);
        results[p] = warp_sum(sum);
      }
      if (c.lane == 0) V::finish(c, job, segment, 0, n, results, V::preload(job, segment, 0, n));
    }
}

}  // namespace mpk::linear_elsewhere
