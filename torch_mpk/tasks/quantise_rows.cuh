// quantise_rows: each block of x is divided by its scale and rounded to e4m3.
#pragma once

#include "torch_mpk/device/quantized.cuh"
#include "torch_mpk/device/row_blocks.cuh"

namespace mpk::tasks::quantise_rows {

template <class V>
inline constexpr int kSharedBytes = 0;

template <class V>
using Block = row_blocks::Block<V, typename V::Numbers>;

template <class V>
MPK_DEVICE float scale_of(const Block<V>& block) {
  return e4m3_scale(block.fold([](float most, float v) { return fmaxf(most, fabsf(v)); }));
}

template <class V>
MPK_DEVICE void store(const Block<V>& block, float scale, E4M3* numbers) {
  using S = typename Block<V>::S;
  const float inverse = 1 / scale;
  block.for_accesses([&](int i, const typename S::Access& access) {
    if (i >= S::kAccesses) return;
    if constexpr (S::kIsWide) {
      uint16_t pairs[4];
#pragma unroll
      for (int e = 0; e < 4; e++)
        pairs[e] = e4m3_pair(divide_rounded<true>(to_float(access.v[2 * e]), scale, inverse),
                             divide_rounded<true>(to_float(access.v[2 * e + 1]), scale, inverse));
      reinterpret_cast<uint2*>(numbers)[i] = {pairs[0] | uint32_t(pairs[1]) << 16, pairs[2] | uint32_t(pairs[3]) << 16};
    } else {
      numbers[i].bits = static_cast<uint8_t>(e4m3_pair(divide_rounded<true>(to_float(access.v[0]), scale, inverse), 0));
    }
  });
}

template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile& tile, uint8_t*, const T* x,
                        const typename V::Scale::T* given, E4M3* numbers, float* scales) {
  row_blocks::for_blocks<V, typename V::Numbers>(threads, tile, x, [&](const Block<V>& block, auto place, bool is_own) {
    const float scale = V::Scale::kPresent ? to_float(*given) : scale_of<V>(block);
    if (!is_own) return;
    store<V>(block, scale, numbers + place(typename V::Numbers{}));
    if (block.lane == 0) scales[place(typename V::Scales{})] = scale;
  });
}

}  // namespace mpk::tasks::quantise_rows
