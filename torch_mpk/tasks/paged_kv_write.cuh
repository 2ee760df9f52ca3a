#pragma once

#include "torch_mpk/device/tile.cuh"

namespace mpk::tasks::paged_kv_write {

template <class V>
inline constexpr int kSharedBytes = 0;

// A thread has an element of every token, so that the last of several tokens with one slot counts.
template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile&, uint8_t*, T* cache, const T* fresh,
                        const int64_t* slot) {
  for (int t = 0; t < V::kN; t++) {
    if (slot[t] < 0 || slot[t] >= int64_t(V::kP) * V::kS) continue;
    T* row = cache + slot[t] / V::kS * V::Cache::stride(0) + slot[t] % V::kS * V::Cache::stride(1);
    for (int d = threads.rank; d < V::kD; d += Threads::kSize) row[d] = fresh[t * V::New::stride(0) + d];
  }
}

}  // namespace mpk::tasks::paged_kv_write
