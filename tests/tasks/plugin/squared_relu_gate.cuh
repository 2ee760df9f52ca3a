#pragma once

#include "torch_mpk/device/tile.cuh"

namespace mpk::tasks::squared_relu_gate {

template <class V>
inline constexpr int kSharedBytes = 0;

template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile& tile, uint8_t*, const T* gate, const T* up, T* y) {
  using Wide = Compute<T>;
  for (int i = threads.rank; i < tile.N.size; i += Threads::kSize) {
    const Wide x = cast<Wide>(gate[i]), positive = x < Wide(0) ? Wide(0) : x;  // NaN stays
    const T squared = cast<T>(positive * positive);
    y[i] = cast<T>(cast<Wide>(squared) * cast<Wide>(up[i]));
  }
}

}  // namespace mpk::tasks::squared_relu_gate
