// A token and a cache head: online softmax, a chunk of positions at a time.
#pragma once

#include "torch_mpk/device/tile.cuh"

namespace mpk::tasks::paged_decode {

inline constexpr int kChunk = 64;

// The chunk's scores, then its weights; for each query head the factor of the chunks before.
struct Softmax {
  float *weights, *most, *total, *rescale;
};

template <class V>
inline constexpr int kSharedBytes = V::kR * (kChunk + 3) * sizeof(float);

template <class V>
MPK_DEVICE int64_t page_of(const int32_t* pages, int64_t first, int64_t position) {
  const int64_t entry = first + position / V::kS;
  if (entry < 0 || entry >= V::kM) return -1;
  const int64_t page = pages[entry];
  return page < V::kP ? page : -1;
}

template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile&, uint8_t* shared, const T* q, const T* k_cache,
                        const T* v_cache, const int32_t* pages, const int64_t* first, const int64_t* limit, T* y) {
  constexpr int kElements = V::kR * V::kD, kPerThread = (kElements + Threads::kSize - 1) / Threads::kSize;
  float* memory = reinterpret_cast<float*>(shared);
  const Softmax s{memory, memory + V::kR * kChunk, memory + V::kR * (kChunk + 1), memory + V::kR * (kChunk + 2)};
  const int64_t most_positions = (V::kM - first[0]) * V::kS;
  const int64_t end = limit[0] < most_positions ? limit[0] : most_positions;
  for (int r = threads.rank; r < V::kR; r += Threads::kSize) {
    s.most[r] = -infinity();
    s.total[r] = 0;
  }
  float sums[kPerThread] = {};
  for (int64_t begin = 0; begin < end; begin += kChunk) {
    const int count = end - begin < kChunk ? int(end - begin) : kChunk;
    threads.sync();
    for (int i = threads.rank; i < V::kR * count; i += Threads::kSize) {
      const int r = i / count, j = i % count;
      const int64_t page = page_of<V>(pages, first[0], begin + j);
      float score = -infinity();
      if (page >= 0) {
        const T* k = k_cache + page * V::KCache::stride(0) + (begin + j) % V::kS * V::KCache::stride(1);
        const T* head = q + r * V::Q::stride(2);
        score = 0;
        for (int d = 0; d < V::kD; d++) score += to_float(head[d]) * to_float(k[d]);
        score *= float(V::kScale);
      }
      s.weights[r * kChunk + j] = score;
    }
    threads.sync();
    for (int r = threads.rank; r < V::kR; r += Threads::kSize) {
      float* weights = s.weights + r * kChunk;
      float most = s.most[r], total = 0;
      for (int j = 0; j < count; j++) most = weights[j] > most ? weights[j] : most;
      for (int j = 0; j < count; j++) total += weights[j] = weights[j] == -infinity() ? 0 : expf(weights[j] - most);
      s.rescale[r] = s.most[r] == -infinity() ? 0 : expf(s.most[r] - most);
      s.total[r] = s.total[r] * s.rescale[r] + total;
      s.most[r] = most;
    }
    threads.sync();
    for (int i = 0; i < kPerThread; i++) {
      const int e = threads.rank + i * Threads::kSize;
      if (e >= kElements) break;
      const int r = e / V::kD, d = e % V::kD;
      float sum = sums[i] * s.rescale[r];
      for (int j = 0; j < count; j++) {
        const int64_t page = page_of<V>(pages, first[0], begin + j);
        if (page < 0) continue;
        const T* v = v_cache + page * V::VCache::stride(0) + (begin + j) % V::kS * V::VCache::stride(1);
        sum += s.weights[r * kChunk + j] * to_float(v[d]);
      }
      sums[i] = sum;
    }
  }
  threads.sync();
  for (int i = 0; i < kPerThread; i++) {
    const int e = threads.rank + i * Threads::kSize;
    if (e >= kElements) break;
    const int r = e / V::kD;
    y[r * V::Y::stride(2) + e % V::kD] = cast<T>(s.total[r] > 0 ? sums[i] / s.total[r] : 0.0f);
  }
}

}  // namespace mpk::tasks::paged_decode
