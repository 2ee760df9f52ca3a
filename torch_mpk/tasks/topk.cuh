// The largest elements of a row. An element's place is the number of elements before it, so no thread waits for
// another.
#pragma once

#include "torch_mpk/device/tile.cuh"

namespace mpk::tasks::topk {

template <class V>
inline constexpr int kSharedBytes = V::kN * int(sizeof(float));

// Whether element i, a, comes before element j, b: NaN first, then by value, then by index.
MPK_DEVICE bool is_before(float a, int i, float b, int j) {
  const bool is_nan = a != a, other_is_nan = b != b;
  if (is_nan || other_is_nan) return is_nan && (!other_is_nan || i < j);
  return a > b || (a == b && i < j);
}

template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile&, uint8_t* shared, const T* x, T* values,
                        int64_t* ids) {
  float* row = reinterpret_cast<float*>(shared);
  for (int i = threads.rank; i < V::kN; i += Threads::kSize) row[i] = to_float(x[i]);
  threads.sync();
  for (int i = threads.rank; i < V::kN; i += Threads::kSize) {
    const float value = row[i];
    int place = 0;
    for (int j = 0; j < V::kN; j++) place += is_before(row[j], j, value, i);
    if (place < V::kNum) {
      values[place] = x[i];
      ids[place] = i;
    }
  }
}

}  // namespace mpk::tasks::topk
