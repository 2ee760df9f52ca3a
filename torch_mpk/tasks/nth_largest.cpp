// A row's value at a rank, found by partitioning the candidates.
#pragma once

#include <algorithm>
#include <vector>

#include "torch_mpk/cpu/tile.h"

namespace mpk::tasks::nth_largest {

template <class V>
inline constexpr int kSharedBytes = 0;

inline bool is_before(float a, float b) { return a > b || (a != a && b == b); }  // NaN first

template <class V, class Threads, class T>
void compute(Threads&, const typename V::Tile&, uint8_t*, const T* x, const int64_t* n,
             const typename V::Peaks::T* peaks, T* y) {
  const int64_t rank = std::clamp<int64_t>(n[0], 0, V::kN - 1);
  std::vector<float> values;
  values.reserve(V::kN);
  const auto take = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) values.push_back(to_float(x[i]));
  };
  if constexpr (V::Peaks::kPresent) {
    std::vector<float> ordered(V::kC);
    for (int64_t part = 0; part < V::kC; part++) ordered[part] = to_float(peaks[part]);
    // So many peaks are at least this one, and so are so many values of the row.
    const auto least = ordered.begin() + std::min<int64_t>(rank, V::kC - 1);
    std::nth_element(ordered.begin(), least, ordered.end(), is_before);
    for (int64_t part = 0; part < V::kC; part++)
      if (rank >= V::kC || !is_before(*least, to_float(peaks[part])))
        take(part * (V::kN / V::kC), (part + 1) * (V::kN / V::kC));
  } else {
    take(0, V::kN);
  }
  const auto found = values.begin() + rank;
  std::nth_element(values.begin(), found, values.end(), is_before);
  y[0] = cast<T>(*found);
}

}  // namespace mpk::tasks::nth_largest
