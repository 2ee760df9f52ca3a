#pragma once

#include "torch_mpk/device/tile.cuh"

namespace mpk::tasks::scaled_linear {

template <class V>
inline constexpr int kSharedBytes = 0;

template <class V, class Threads, class T, class Stream>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile& tile, uint8_t*, const T* x, Stream& weight,
                        const T* scale, T* y) {
  constexpr int kB = V::kB;
  float sums[kB] = {};
  weight.for_each([&](const T* chunk, int64_t row, int64_t begin, int64_t count) {
    for (int64_t k = threads.rank; k < count; k += Threads::kSize) {
      const float w = to_float(chunk[k]);
      for (int b = 0; b < kB; b++) sums[b] += w * to_float(x[b * V::X::stride(0) + begin + k]);
    }
    if (begin + count < V::kK) return;  // the row goes on
    for (int b = 0; b < kB; b++) {
      const float sum = threads.sum(sums[b]) * to_float(scale[row]);
      if (threads.rank == 0) y[b * V::Y::stride(0) + row] = cast<T>(sum);
      sums[b] = 0;
    }
  });
}

}  // namespace mpk::tasks::scaled_linear
