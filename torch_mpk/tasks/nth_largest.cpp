// A row's value at a rank, by partitions of a copy.
#pragma once

#include <algorithm>
#include <vector>

#include "torch_mpk/cpu/tile.h"

namespace mpk::tasks::nth_largest {

template <class V>
inline constexpr int kSharedBytes = 0;

template <class V, class Threads, class T>
void compute(Threads&, const typename V::Tile&, uint8_t*, const T* x, const int64_t* n, const typename V::Peaks::T*,
             T* y) {
  std::vector<float> values(V::kN);
  for (int64_t i = 0; i < V::kN; i++) values[i] = to_float(x[i]);
  const auto found = values.begin() + std::clamp<int64_t>(n[0], 0, V::kN - 1);
  std::nth_element(values.begin(), found, values.end(),
                   [](float a, float b) { return a > b || (a != a && b == b); });  // NaN first
  y[0] = cast<T>(*found);
}

}  // namespace mpk::tasks::nth_largest
