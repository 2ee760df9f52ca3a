// Products with the weights of experts, the plain way: a tile's (row, choice) pairs are sorted by expert, and blocks of
// a chosen expert's columns are multiplied with blocks of its pairs. The order of a sum depends on K alone.
#pragma once

#include "torch_mpk/device/tile.cuh"

namespace mpk::tasks::expert_linear {

inline constexpr int kMaxPairs = 2048;  // sorted at a time
inline constexpr int kPairsAtOnce = 4, kColumnsAtOnce = 4;

template <class V>
inline constexpr int kPairs = 64 * V::kC < kMaxPairs ? 64 * V::kC : kMaxPairs;
template <class V>
inline constexpr int kSharedBytes = V::kE * int(sizeof(uint32_t)) + kPairs<V> * int(sizeof(uint16_t));

// Sorts `count` pairs from `first` on: those of expert e end at ends[e]. Pairs without an expert are left out.
template <class V, class Threads>
MPK_DEVICE void sort_pairs(Threads& threads, const int64_t* ids, int first, int count, uint32_t* ends,
                           uint16_t* order) {
  const auto expert_of = [&](int i) {
    const int pair = first + i;
    const int64_t id = ids[pair / V::kC * V::Ids::stride(0) + pair % V::kC * V::Ids::stride(1)];
    return id >= 0 && id < V::kE ? int(id) : -1;
  };
  for (int e = threads.rank; e < V::kE; e += Threads::kSize) ends[e] = 0;
  threads.sync();
  for (int i = threads.rank; i < count; i += Threads::kSize)
    if (const int e = expert_of(i); e >= 0) atomicAdd(&ends[e], 1);
  threads.sync();
  if (threads.rank == 0) {
    uint32_t begin = 0;
    for (int e = 0; e < V::kE; e++) {
      const uint32_t size = ends[e];
      ends[e] = begin;
      begin += size;
    }
  }
  threads.sync();
  for (int i = threads.rank; i < count; i += Threads::kSize)
    if (const int e = expert_of(i); e >= 0) order[atomicAdd(&ends[e], 1)] = static_cast<uint16_t>(i);
  threads.sync();
}

// Computes columns from n on for pairs of one expert, whose matrix has the given strides.
template <class V, class Threads, class T>
MPK_DEVICE void multiply(Threads& threads, const T* x, const T* matrix, int64_t column_stride, int64_t depth_stride,
                         const int* pairs, int num_pairs, int n, int num_columns, T* y) {
  float sums[kPairsAtOnce][kColumnsAtOnce] = {};
  for (int k = threads.rank; k < V::kK; k += Threads::kSize) {
    float weights[kColumnsAtOnce];
    for (int j = 0; j < kColumnsAtOnce; j++)
      weights[j] = j < num_columns ? to_float(matrix[(n + j) * column_stride + k * depth_stride]) : 0.0f;
    for (int i = 0; i < kPairsAtOnce; i++) {
      if (i >= num_pairs) break;
      const int row = pairs[i] / V::kC, choice = pairs[i] % V::kC;
      const float value = to_float(x[row * V::X::stride(0) + choice * V::X::stride(1) + k]);
      for (int j = 0; j < kColumnsAtOnce; j++) sums[i][j] += value * weights[j];
    }
  }
  for (int i = 0; i < num_pairs; i++) {
    const int row = pairs[i] / V::kC, choice = pairs[i] % V::kC;
    for (int j = 0; j < num_columns; j++) {
      const float sum = threads.sum(sums[i][j]);
      if (threads.rank == 0) y[row * V::Y::stride(0) + choice * V::Y::stride(1) + n + j] = cast<T>(sum);
    }
  }
}

// Rows whose id names no expert are zeros.
template <class V, class Threads, class T>
MPK_DEVICE void clear_others(Threads& threads, const typename V::Tile& tile, const int64_t* ids, T* y) {
  const int size = int(tile.N.size), count = int(tile.R.size) * V::kC * size;
  for (int i = threads.rank; i < count; i += Threads::kSize) {
    const int row = i / size / V::kC, choice = i / size % V::kC;
    const int64_t id = ids[row * V::Ids::stride(0) + choice * V::Ids::stride(1)];
    if (id < 0 || id >= V::kE) y[row * V::Y::stride(0) + choice * V::Y::stride(1) + i % size] = cast<T>(0.0f);
  }
}

template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile& tile, uint8_t* shared, const T* x, const int64_t* ids,
                        const T* weight, const T* transposed, T* y) {
  static_assert(V::Weight::kPresent != V::Transposed::kPresent, "expert_linear takes weight or transposed");
  uint32_t* ends = reinterpret_cast<uint32_t*>(shared);
  uint16_t* order = reinterpret_cast<uint16_t*>(ends + V::kE);
  const T* weights = V::Weight::kPresent ? weight : transposed;
  const int64_t expert_stride = V::Weight::kPresent ? V::Weight::stride(0) : V::Transposed::stride(0);
  const int64_t column_stride = V::Weight::kPresent ? V::Weight::stride(1) : 1;
  const int64_t depth_stride = V::Weight::kPresent ? 1 : V::Transposed::stride(1);
  const int total = int(tile.R.size) * V::kC, columns = int(tile.N.size);
  clear_others<V>(threads, tile, ids, y);
  for (int first = 0; first < total; first += kPairs<V>) {
    const int left = total - first;
    sort_pairs<V>(threads, ids, first, left < kPairs<V> ? left : kPairs<V>, ends, order);
    for (int e = 0; e < V::kE; e++) {
      const int end = int(ends[e]);
      for (int i = e == 0 ? 0 : int(ends[e - 1]); i < end; i += kPairsAtOnce) {
        const int num_pairs = end - i < kPairsAtOnce ? end - i : kPairsAtOnce;
        int pairs[kPairsAtOnce];
        for (int j = 0; j < num_pairs; j++) pairs[j] = first + order[i + j];
        for (int n = 0; n < columns; n += kColumnsAtOnce)
          multiply<V>(threads, x, weights + e * expert_stride, column_stride, depth_stride, pairs, num_pairs, n,
                      columns - n < kColumnsAtOnce ? columns - n : kColumnsAtOnce, y);
      }
    }
    threads.sync();
  }
}

}  // namespace mpk::tasks::expert_linear
