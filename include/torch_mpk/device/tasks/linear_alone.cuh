// A linear with a tile loop of its own.
#pragma once

#include "torch_mpk/device/tasks/linear_shape.cuh"

namespace mpk::linear {

// A warp's sums of the products of its weight rows with the rows of x. Lane l takes accesses l, l + 32, ... of 16
// bytes. value(i, lane) is a lane's share of sum i, which is weight row i / kBatch with row i % kBatch of x. Both
// classes add in an order that depends on the access alone.

// By fused multiply-adds. With one row of x, even and odd elements are summed separately, as in compute_shared.
template <class V>
struct FmaSums {
  using T = typename V::T;
  using S = Shape<V>;
  static constexpr int kApart = V::kBatch == 1 ? 2 : 1;
  float sums[S::kSums][kApart] = {};

  template <class X>
  MPK_DEVICE void add(const uint4 (&weights)[S::kRows], X x) {
#pragma unroll
    for (int r = 0; r < V::kBatch; r++) {
      float v[S::kVec];
      unpack<T>(x(r), v);
#pragma unroll
      for (int row = 0; row < S::kRows; row++) {
        float w[S::kVec];
        unpack<T>(weights[row], w);
#pragma unroll
        for (int e = 0; e < S::kVec; e++) {
          float& sum = sums[row * V::kBatch + r][e % kApart];
          sum = fmaf(w[e], v[e], sum);
        }
      }
    }
  }
  MPK_DEVICE float value(int i, int) const { return kApart == 1 ? sums[i][0] : sums[i][0] + sums[i][1]; }
};

// Whether a variant's products are worth tensor cores: using them at all slows the whole chip by 8 %.
template <class V>
inline constexpr bool kOnTensorCores = kHasFragments<typename V::T> && V::kBatch > 2;

// By tensor cores, which need no unpacking: 8 weights of a lane take one instruction instead of 16. They multiply 16
// rows by 8 columns, but x has one row at a time. So lanes 4 g to 4 g + 3 put two weight rows into rows g and g + 8 of
// the first factor, and their elements of x into column g of the second. The two diagonals of the products are the
// results.
template <class V>
struct TensorCoreSums {
  using S = Shape<V>;
  static constexpr int kPairs = (S::kRows + 1) / 2;
  SumFragment products[kPairs][V::kBatch] = {};

  template <class X>
  MPK_DEVICE void add(const uint4 (&weights)[S::kRows], X x) {
#pragma unroll
    for (int r = 0; r < V::kBatch; r++) {
      const uint4 column = x(r);
#pragma unroll
      for (int p = 0; p < kPairs; p++) {
        const uint4 a = weights[2 * p], b = 2 * p + 1 < S::kRows ? weights[(2 * p + 1) % S::kRows] : uint4{};
        multiply_fragments<typename V::T>(products[p][r], products[p][r], {a, b}, {column});
      }
    }
  }
  MPK_DEVICE float value(int i, int lane) const {
    const int row = i / V::kBatch, half = row % 2 * 2, g = lane / 4;
    const SumFragment& sums = products[row / 2][i % V::kBatch];
    return lane % 4 == g / 2 ? (g % 2 == 0 ? sums[half] : sums[half + 1]) : 0.0f;
  }
};

// A class of sums.
template <class S, class V>
concept Sums = requires(S sums, const S& summed, const uint4 (&weights)[Shape<V>::kRows], uint4 (*x)(int), int i) {
  sums.add(weights, x);  // x(r): the lane's access of row r
  { summed.value(i, i) } -> Same<float>;
};

// Adds the products of one chunk.
template <class V, Sums<V> Sums>
MPK_DEVICE void multiply(const uint8_t* slot, int chunk_size, const uint4* x, int x_pitch, int lane, Sums& sums) {
  using S = Shape<V>;
  const uint4* weights = reinterpret_cast<const uint4*>(slot);
  constexpr bool kEqual = V::kSize % V::kChunkSize == 0 && V::kChunkSize % (32 * S::kVec) == 0;
  const int accesses = (kEqual ? V::kChunkSize : chunk_size) / S::kVec;
  constexpr int kUnroll = S::kSums <= 2 ? 4 : S::kSums <= 4 ? 2 : 1;
#pragma unroll kUnroll
  for (int i = 0; i < (kEqual ? accesses / 32 : (accesses + 31) / 32); i++) {
    const int j = 32 * i + lane;
    const bool in = kEqual || j < accesses;
    uint4 w[S::kRows];
#pragma unroll
    for (int row = 0; row < S::kRows; row++) w[row] = in ? weights[row * accesses + j] : uint4{};
    sums.add(w, [&](int r) { return in ? x[r * x_pitch + j] : uint4{}; });
  }
}

// The operands of a tile's first round of results.
template <class V>
MPK_DEVICE typename V::Extra preload(const Job& job, uint32_t tile, int lane) {
  const int segment = segment_of<V>(tile);
  const uint32_t row = (tile - V::first_tile(segment)) * V::kTileRows + lane % V::kTileRows;
  if (lane >= V::kTileRows * V::kBatch || row >= V::num_rows(segment)) return {};
  return V::preload(job, segment, lane / V::kTileRows, row);
}

// Computes one tile, from its first ring entry to its stores. False when the launch was aborted.
template <class V, class C>
MPK_DEVICE bool compute_tile(C& c, const Job& job, uint32_t tile, uint32_t entry, const uint4* x, int x_pitch,
                             float* scratch, typename V::Extra extra) {
  using S = Shape<V>;
  using T = typename V::T;
  constexpr int kOutputs = V::kTileRows * V::kBatch;
  const int segment = segment_of<V>(tile);
  const uint32_t first_row = (tile - V::first_tile(segment)) * V::kTileRows;
  const uint32_t end_row = V::num_rows(segment);
  auto row_of = [&](int i) { return first_row + i % V::kTileRows; };

#pragma unroll 1
  for (int part = 0; part < V::kParts; part += V::kChunkParts) {
    float* results = scratch + part * V::kTileRows * V::kBatch;
    typename Choose<kOnTensorCores<V>, TensorCoreSums<V>, FmaSums<V>>::Type sums;
    for (int k = 0; k < S::kChunksAlongK; k++, entry++) {
      if (!c.ring.wait(entry, c.phase)) return false;
      multiply<V>(c.ring.slot(entry), S::chunk_size(k), x + k * (V::kChunkSize / S::kVec), x_pitch, c.lane, sums);
      c.ring.release(entry);
    }
    constexpr int kRound = S::kRound;
#pragma unroll
    for (int base = 0; base < S::kSums; base += kRound) {
      float values[kRound];
#pragma unroll
      for (int i = 0; i < kRound; i++) values[i] = base + i < S::kSums ? sums.value(base + i, c.lane) : 0.0f;
      const float sum = sum_values<kRound>(values, c.lane);
      const int i = base + c.lane / (32 / kRound);
      if (c.lane % (32 / kRound) == 0 && i < S::kSums) results[i] = sum;
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int i = c.lane; i < kOutputs; i += 32) {
    const int r = i / V::kTileRows;
    const uint32_t n = row_of(i);
    if (n < end_row) {
      if (i != c.lane) extra = V::preload(job, segment, r, n);
      float results[V::kParts];
#pragma unroll
      for (int p = 0; p < V::kParts; p++) results[p] = scratch[(p * V::kTileRows + i % V::kTileRows) * V::kBatch + r];
      V::finish(c, job, segment, r, n, results, extra);
    }
  }
  __syncwarp();
  return true;
}

// A linear with a tile loop of its own.
template <class V, class C>
MPK_DEVICE void compute_alone(C& c, const Job& job) {
  using S = Shape<V>;
  using T = typename V::T;
  static_assert(S::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  float* scratch = reinterpret_cast<float*>(c.staged()) + c.warp * S::kScratchFloats;
  T* staged = reinterpret_cast<T*>(c.staged() + S::kScratchBytes);
  const uint32_t worker = c.worker(job);
  const Span tiles = V::kClaimed ? Span{} : static_span(V::kNumTiles, worker, C::Config::kNumWorkers);
  const uint32_t count = tiles.end - tiles.begin;
  typename V::Extra extra{};  // of this warp's first tile
  auto preload_first = [&] {
    if (!V::kClaimed && c.warp < count) extra = preload<V>(job, tiles.begin + c.warp, c.lane);
  };
  if constexpr (V::kEarly) preload_first();
  const uint4* x = reinterpret_cast<const uint4*>(V::kStaged ? staged : V::x(job));
  constexpr int kPitchX = (V::kStaged ? S::kPitch : V::kPitchX * int(sizeof(T))) / 16;
  if constexpr (V::kStaged) {
    if (!stage<V>(c, job, staged)) return;
    c.stamp_first(&PhaseStamps::staged);
  } else if (!c.await()) {
    return;
  }
  if constexpr (!V::kEarly) preload_first();
#pragma unroll 1
  for (uint32_t i = c.warp;; i += kConsumerWarps) {
    const uint32_t entry = c.entry + i * S::kChunks;
    uint32_t tile = tiles.begin + i;
    if constexpr (V::kClaimed) {
      tile = c.ring.next_tile(entry, c.phase);
      if (tile == kNoTile) {
        c.entry = c.ring.phase_end(c.phase);
        return;
      }
      if (tile == kAborted) {
        c.failed = true;
        return;
      }
      extra = preload<V>(job, tile, c.lane);
    } else {
      if (i >= count) break;
      if (i >= kConsumerWarps) extra = preload<V>(job, tile, c.lane);
    }
    if (!compute_tile<V>(c, job, tile, entry, x, kPitchX, scratch, extra)) {
      c.failed = true;
      return;
    }
  }
  c.entry += count * S::kChunks;
}

}  // namespace mpk::linear
