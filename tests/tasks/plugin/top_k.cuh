#pragma once

#include "torch_mpk/device/tile.cuh"

namespace mpk::tasks::top_k {

template <class V>
inline constexpr int kSharedBytes = V::kN * sizeof(float);

// k times the largest of what is left; every thread looks for the first place of it, and the smallest place wins.
template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile&, uint8_t* shared, const T* x, T* values,
                        int64_t* indices) {
  float* left = reinterpret_cast<float*>(shared);
  for (int i = threads.rank; i < V::kN; i += Threads::kSize) left[i] = to_float(x[i]);
  for (int k = 0; k < V::kK; k++) {
    threads.sync();
    float most = -infinity();
    for (int i = threads.rank; i < V::kN; i += Threads::kSize) most = left[i] > most ? left[i] : most;
    most = threads.max(most);
    int place = V::kN;
    for (int i = threads.rank; i < V::kN && place == V::kN; i += Threads::kSize)
      if (left[i] == most) place = i;
    const int first = -int(threads.max(-float(place)));  // positions below 2^24 are exact
    threads.sync();
    if (threads.rank == 0) {
      values[k] = cast<T>(most);
      indices[k] = first;
      left[first] = -infinity();
    }
  }
}

}  // namespace mpk::tasks::top_k
