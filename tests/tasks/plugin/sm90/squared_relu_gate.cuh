// Stands in for code with instructions that only Hopper has.
#pragma once

#include "torch_mpk/device/tile.cuh"

#if __CUDA_ARCH__ < 900
#error "for sm_90 alone"
#endif

namespace mpk::tasks::squared_relu_gate {

template <class V>
inline constexpr int kSharedBytes = 0;

template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile& tile, uint8_t*, const T* gate, const T* up, T* y) {
  for (int i = threads.rank; i < tile.N.size; i += Threads::kSize) {
    const Compute<T> x = cast<Compute<T>>(gate[i]) > Compute<T>(0) ? cast<Compute<T>>(gate[i]) : Compute<T>(0);
    y[i] = cast<T>(cast<Compute<T>>(cast<T>(x * x)) * cast<Compute<T>>(up[i]));
  }
}

}  // namespace mpk::tasks::squared_relu_gate
