// A head of a row: online softmax, a chunk of positions at a time. It serves what csrc/kernels/attention/latent.cpp
// leaves.
#pragma once

#include "torch_mpk/device/tile.cuh"

namespace mpk::tasks::latent_attention {

inline constexpr int kChunk = 64;

template <class V>
inline constexpr int kSharedBytes = kChunk * int(sizeof(float));

template <class T, class K>
MPK_DEVICE float product(const T* a, const K* b, int size) {
  float sum = 0;
  for (int i = 0; i < size; i++) sum += to_float(a[i]) * to_float(b[i]);
  return sum;
}

template <class Mask>
MPK_DEVICE float added(Mask mask) {
  return to_float(mask);
}
MPK_DEVICE float added(bool mask) { return mask ? 0.0f : -infinity(); }

template <class V, class Threads, class T, class Mask, class Limit>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile&, uint8_t* shared, const T* q, const T* q_rope,
                        const T* latent, const T* rope, const Mask* mask, const Limit* limit, T* y) {
  constexpr int kEach = (V::kC + Threads::kSize - 1) / Threads::kSize;
  float* weights = reinterpret_cast<float*>(shared);
  int64_t end = V::kL;
  if constexpr (V::Limit::kPresent) end = limit[0] < end ? limit[0] : end;
  float sums[kEach] = {}, most = -infinity(), total = 0;
  for (int64_t first = 0; first < end; first += kChunk) {
    const int count = end - first < kChunk ? int(end - first) : kChunk;
    float largest = -infinity();
    threads.sync();
    for (int i = threads.rank; i < count; i += Threads::kSize) {
      const int64_t position = first + i;
      float score = product(q, latent + position * V::Latent::stride(2), V::kC) +
                    product(q_rope, rope + position * V::Rope::stride(2), V::kR);
      score *= float(V::kScale);
      if constexpr (V::Mask::kPresent) score += added(mask[position * V::Mask::stride(2)]);
      weights[i] = score;
      largest = score > largest ? score : largest;
    }
    largest = threads.max(largest);
    threads.sync();
    if (largest == -infinity()) continue;
    const float top = largest > most ? largest : most, kept = most == -infinity() ? 0.0f : expf(most - top);
    total *= kept;
    for (int e = 0; e < kEach; e++) sums[e] *= kept;
    for (int i = 0; i < count; i++) {
      const float weight = weights[i] == -infinity() ? 0.0f : expf(weights[i] - top);
      total += weight;
      for (int e = 0; e < kEach; e++)
        if (const int c = threads.rank + e * Threads::kSize; c < V::kC)
          sums[e] += weight * to_float(latent[(first + i) * V::Latent::stride(2) + c]);
    }
    most = top;
  }
  for (int e = 0; e < kEach; e++)
    if (const int c = threads.rank + e * Threads::kSize; c < V::kC) y[c] = cast<T>(total > 0 ? sums[e] / total : 0.0f);
}

}  // namespace mpk::tasks::latent_attention
