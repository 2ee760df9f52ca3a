// order_columns: columns of x in the order in which products have words of 4-bit weights, and the sum of each block.
#pragma once

#include "torch_mpk/device/quantized.cuh"
#include "torch_mpk/device/row_blocks.cuh"

namespace mpk::tasks::order_columns {

template <class V>
inline constexpr int kSharedBytes = 0;

template <class V>
using Block = row_blocks::Block<V, typename V::Ordered>;

template <class V, class T>
MPK_DEVICE void store(const Block<V>& block, T* ordered) {
  using S = typename Block<V>::S;
  block.for_accesses([&](int i, const typename S::Access& access) {
    if (i >= S::kAccesses) return;
    if constexpr (S::kIsWide) {
      const uint4 words = in_order_of_words(reinterpret_cast<const uint4&>(access));
      uint32_t* to = reinterpret_cast<uint32_t*>(ordered + i / 4 * kOrderedColumns) + i % 4;
      to[0] = words.x, to[4] = words.y, to[8] = words.z, to[12] = words.w;
    } else {
      const int own = i % kOrderedColumns;
      ordered[i - own + own % 4 * 8 + own / 4] = access.v[0];
    }
  });
}

template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile& tile, uint8_t*, const T* x, T* ordered, float* sums) {
  static_assert(V::kC % kOrderedColumns == 0);
  row_blocks::for_blocks<V, typename V::Ordered>(threads, tile, x, [&](const Block<V>& block, auto place, bool is_own) {
    const float sum = block.fold([](float a, float b) { return a + b; });
    if (!is_own) return;
    store<V>(block, ordered + place(typename V::Ordered{}));
    if (block.lane == 0) sums[place(typename V::Sums{})] = sum;
  });
}

}  // namespace mpk::tasks::order_columns
