// Device code of pair.cpp.
#pragma once

#include "torch_mpk/device/megakernel.cuh"
#include "torch_mpk/device/row.cuh"

namespace mpk::linear_pair {

// A warp's product of a row of weights with a vector, in all lanes.
template <class T>
MPK_DEVICE float dot(const T* row, const T* x, int size, int lane) {
  float sum = 0;
  for (int k = lane; k < size; k += 32) sum = fmaf(to_float(row[k]), to_float(x[k]), sum);
  return warp_sum(sum);
}

template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  using T = typename V::T;
  if (!c.await()) return;
  T* hidden = reinterpret_cast<T*>(c.staged());
  for (int n = c.warp; n < V::kHidden; n += kConsumerWarps) {
    const float made = dot(V::first(job) + int64_t(n) * V::kSize, V::x(job), V::kSize, c.lane);
    if (c.lane == 0) hidden[n] = cast<T>(made);
  }
  if (!c.sync()) return;
  for (int n = c.worker(job) * kConsumerWarps + c.warp; n < V::kRows; n += C::Config::kNumWorkers * kConsumerWarps) {
    const float made = dot(V::second(job) + int64_t(n) * V::kHidden, hidden, V::kHidden, c.lane);
    if (c.lane == 0) V::y(job)[n] = cast<T>(made);
  }
}

}  // namespace mpk::linear_pair
