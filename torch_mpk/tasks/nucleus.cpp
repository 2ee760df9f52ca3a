// Finds where a row's probabilities, summed from the least on, exceed the limit. Only candidates are sorted.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "torch_mpk/cpu/tile.h"

namespace mpk::tasks::nucleus {

template <class V>
inline constexpr int kSharedBytes = 0;

template <class V, class Threads, class T>
void compute(Threads&, const typename V::Tile&, uint8_t*, const T* x, const float* rest,
             const typename V::Peaks::T* peaks, const typename V::Sums::T* sums, T* least, int64_t* first) {
  static_assert(V::Peaks::kPresent == V::Sums::kPresent, "nucleus takes peaks and sums together");
  // Parts are single elements if the operands have no peaks of larger ones.
  int64_t parts = V::kN, size = 1;
  if constexpr (V::Peaks::kPresent) {
    parts = V::kC;
    size = V::kN / V::kC;
  }
  const auto peak_of = [&](int64_t part) {
    if constexpr (V::Peaks::kPresent) return to_float(peaks[part]);
    return to_float(x[part]);
  };
  float most = -infinity();
  bool is_number = true;
  for (int64_t part = 0; part < parts; part++) {
    const float peak = peak_of(part);
    is_number &= peak == peak && peak != infinity();
    most = std::max(most, peak);
  }
  if (!is_number || most == -infinity()) {  // probabilities are NaN: nothing is dropped
    least[0] = cast<T>(-infinity());
    first[0] = 0;
    return;
  }
  std::vector<float> weights(parts);  // of parts
  float total = 0;
  for (int64_t part = 0; part < parts; part++) {
    weights[part] = std::exp(peak_of(part) - most);
    if constexpr (V::Sums::kPresent) weights[part] *= sums[part];
    total += weights[part];
  }
  const float limit = rest[0] * total;
  // Drops what has less than an N-th of the limit: all of it together does not exceed the limit, but for rounding.
  const float enough = limit > 0 ? std::min(0.99f * limit / float(V::kN), 0.5f) : -1.0f;
  struct Candidate {
    float value;
    int64_t index;
    float weight;
  };
  std::vector<Candidate> left;
  float gone = 0;
  for (int64_t part = 0; part < parts; part++) {
    if (weights[part] <= enough) {  // so does each of its values
      gone += weights[part];
      continue;
    }
    for (int64_t i = part * size; i < (part + 1) * size; i++) {
      const float value = to_float(x[i]), weight = size == 1 ? weights[part] : std::exp(value - most);
      if (weight > enough) {
        left.push_back({value, i, weight});
      } else {
        gone += weight;
      }
    }
  }
  std::sort(left.begin(), left.end(), [](const Candidate& a, const Candidate& b) {
    return a.value < b.value || (a.value == b.value && a.index < b.index);
  });
  size_t next = 0;
  while (next + 1 < left.size()) {
    gone += left[next].weight;
    if (!(gone <= limit)) break;
    next++;
  }
  least[0] = cast<T>(left[next].value);
  first[0] = left[next].index;
}

}  // namespace mpk::tasks::nucleus
