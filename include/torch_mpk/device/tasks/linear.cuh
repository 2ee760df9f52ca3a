// linear: y[r, n] = sum over k of x[r, k] * weight[n, k], with the weights streamed through the ring, as the table
// says.
//
// A tile is a few complete output rows (rows of the weight); its bytes come as consecutive ring entries ("chunks") of
// at most one slot. It belongs to one warp; with one row of x, runs of its entries are dealt out among the warps, whose
// sums are added in order. Which k a lane takes and in which order it adds depends on k alone, so a value has the same
// bits whatever tile it is part of.
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

// Weights whose rows are not multiples of 16 bytes: no ring, each warp reads rows where they are.
template <class V, class C>
MPK_DEVICE void compute_direct(C& c, const Job& job) {
  static_assert(DirectVariant<V, C>);
  using S = Shape<V>;
  using T = typename V::T;
  T* x = reinterpret_cast<T*>(c.staged() + S::kScratchBytes);
  if (!stage<V>(c, job, x)) return;
  const uint32_t worker = c.worker(job);
  for (uint32_t tile = worker + c.warp * C::Config::kNumWorkers; tile < V::kNumTiles;
       tile += kConsumerWarps * C::Config::kNumWorkers) {
    const int segment = segment_of<V>(tile);
    const uint32_t n = tile - V::first_tile(segment);
    for (int r = 0; r < V::kBatch; r++) {
      float results[V::kParts];
#pragma unroll
      for (int p = 0; p < V::kParts; p++) {
        const int which = V::kParts > 1 ? p : segment;
        const T* row = reinterpret_cast<const T*>(V::weight(job, which) + n * V::weight_pitch(which));
        float sum = 0;
        for (int k = c.lane; k < V::kSize; k += 32)
          sum = fmaf(to_float(row[k]), to_float(x[r * (S::kPitch / int(sizeof(T))) + k]), sum);
        results[p] = warp_sum(sum);
      }
      if (c.lane == 0) V::finish(c, job, segment, r, n, results, V::preload(job, segment, r, n));
    }
  }
}

}  // namespace mpk::linear
