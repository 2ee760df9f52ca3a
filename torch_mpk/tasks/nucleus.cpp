// Where a row's probabilities, from the least on, exceed what may go: only those that may be the ones are sorted.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "torch_mpk/cpu/tile.h"

namespace mpk::tasks::nucleus {

template <class V>
inline constexpr int kSharedBytes = 0;

template <class V, class Threads, class T>
void compute(Threads&, const typename V::Tile&, uint8_t*, const T* x, const float* rest, const typename V::Peaks::T*,
             const typename V::Sums::T*, T* least, int64_t* first) {
  float most = -infinity();
  bool is_number = true;
  for (int64_t i = 0; i < V::kN; i++) {
    const float value = to_float(x[i]);
    is_number &= value == value && value != infinity();
    most = std::max(most, value);
  }
  if (!is_number || most == -infinity()) {  // probabilities are NaN, and nothing goes
    least[0] = cast<T>(-infinity());
    first[0] = 0;
    return;
  }
  std::vector<float> weights(V::kN);
  float total = 0;
  for (int64_t i = 0; i < V::kN; i++) total += weights[i] = std::exp(to_float(x[i]) - most);
  const float limit = rest[0] * total;
  // What has less than an N-th of the limit goes: all of that together does not exceed it, but for rounding.
  const float enough = limit > 0 ? std::min(0.99f * limit / float(V::kN), 0.5f) : -1.0f;
  std::vector<std::pair<float, int64_t>> left;
  float gone = 0;
  for (int64_t i = 0; i < V::kN; i++) {
    if (weights[i] > enough) {
      left.emplace_back(to_float(x[i]), i);
    } else {
      gone += weights[i];
    }
  }
  std::sort(left.begin(), left.end());
  size_t next = 0;
  while (next + 1 < left.size()) {
    gone += weights[left[next].second];
    if (!(gone <= limit)) break;
    next++;
  }
  least[0] = cast<T>(left[next].first);
  first[0] = left[next].second;
}

}  // namespace mpk::tasks::nucleus
