#pragma once

#include "row_statistics.cuh"
#include "torch_mpk/device/tile.cuh"

namespace mpk::tasks::layer_norm {

template <class V>
inline constexpr int kSharedBytes = 0;

template <class V, class Threads, class T, class W, class B>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile&, uint8_t*, const T* x, const W* weight, const B* bias,
                        T* y) {
  const float mean = is(V::kStyle, "mean") ? row_mean<V::kH>(threads, x) : 0.0f;
  const float scale = 1.0f / sqrtf(row_variance<V::kH>(threads, x, mean) + float(V::kEps));
  for (int i = threads.rank; i < V::kH; i += Threads::kSize) {
    float value = (to_float(x[i]) - mean) * scale;
    if constexpr (V::Weight::kPresent) value *= to_float(weight[i]);
    if constexpr (V::Bias::kPresent) value += to_float(bias[i]);
    y[i] = cast<T>(value);
  }
}

}  // namespace mpk::tasks::layer_norm
