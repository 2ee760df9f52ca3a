#pragma once

#include "torch_mpk/device/tile.cuh"

namespace mpk::tasks::causal_conv {

template <class V>
inline constexpr int kSharedBytes = 0;

template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile& tile, uint8_t*, const T* x, T* state, const T* weight,
                        T* y) {
  for (int c = threads.rank; c < tile.C.size; c += Threads::kSize) {
    T* last = state + c * V::State::stride(1);
    const T* w = weight + c * V::Weight::stride(0);
    float sum = 0;
#pragma unroll
    for (int k = 0; k < V::kK; k++) {
      const T value = k + 1 < V::kK ? last[k + 1] : x[c];
      last[k] = value;
      sum += to_float(value) * to_float(w[k]);
    }
    y[c] = cast<T>(sum);
  }
}

}  // namespace mpk::tasks::causal_conv
