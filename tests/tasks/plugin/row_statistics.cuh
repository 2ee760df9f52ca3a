#pragma once

#include "torch_mpk/device/tile.cuh"

namespace mpk::tasks {

template <int64_t kSize, class Threads, class T>
MPK_DEVICE float row_mean(Threads& threads, const T* x) {
  float sum = 0;
  for (int i = threads.rank; i < kSize; i += Threads::kSize) sum += to_float(x[i]);
  return threads.sum(sum) / kSize;
}

template <int64_t kSize, class Threads, class T>
MPK_DEVICE float row_variance(Threads& threads, const T* x, float mean) {
  float sum = 0;
  for (int i = threads.rank; i < kSize; i += Threads::kSize) {
    const float d = to_float(x[i]) - mean;
    sum += d * d;
  }
  return threads.sum(sum) / kSize;
}

}  // namespace mpk::tasks
