// What a linear's variant declares, and how x is staged.
#pragma once

#include "torch_mpk/abi/partition.h"
#include "torch_mpk/device/fragment.cuh"
#include "torch_mpk/device/polled.cuh"

namespace mpk::linear {

// What a variant declares of one job.
template <class V>
concept Sizes = requires {
  // The element type of x, weights and results.
  typename V::T;
  // Rows of x; K.
  requires Constants<int, V::kBatch, V::kSize>;
  // Segments: linears one after the other in row space. Parts: linears whose row n is computed side by side.
  requires Constants<int, V::kSegments, V::kParts>;
  // A tile's rows of each part; the parts, and the columns, of a chunk.
  requires Constants<int, V::kTileRows, V::kChunkParts, V::kChunkSize>;
  requires Constants<uint32_t, V::kNumTiles>;
  // Whether x is staged, through row tasks if there are any; otherwise it is read in place, rows kPitchX elements
  // apart.
  requires Constants<bool, V::kStaged, V::kRowTasks> && Constants<int, V::kPitchX>;
  // One row of staged x, and tiles of up to four sums: see compute_shared.
  requires Constants<bool, V::kSharesLoop>;
  // Workers draw tiles at run time; otherwise tiles are assigned statically.
  requires Constants<bool, V::kClaimed>;
  // Chains and extras may fetch their first operands before the phase's events.
  requires Constants<bool, V::kEarly>;
};

// What it does with a result: bias, epilogue, stores. C: the consumer.
template <class V, class C>
concept Results = Constants<bool, V::kHasExtra> &&  // results need operands of their own
                  requires(C& c, const Job& job, int segment, int r, uint32_t n, const float (&sums)[V::kParts],
                           const typename V::Extra& extra) {
                    { V::preload(job, segment, r, n) } -> Same<typename V::Extra>;
                    V::finish(c, job, segment, r, n, sums, extra);
                  };

// Scratch for the split-K exchange, kPartialBytes for each worker.
template <class V>
concept SplitsK = Constants<int, V::kPartialBytes> && requires(const Job& job) {
  { V::partials(job) } -> Same<uint8_t*>;
};

template <class V, class C>
concept Variant =
    Sizes<V> && Results<V, C> &&
    requires(const Job& job, int i) {
      { V::first_tile(i) } -> Same<uint32_t>;  // of segment i
      { V::num_rows(i) } -> Same<uint32_t>;
      { V::x(job) } -> Same<const typename V::T*>;
    } && RowChain<typename V::template Chain<WarpThreads<C>>, WarpThreads<C>, typename V::T, uint32_t> &&
    RowChain<typename V::template Chain<CtaThreads<C>>, CtaThreads<C>, typename V::T, uint32_t>;  // to stage a row of x

// The bytes of an element of x, and of the weights: two, unless the variant says otherwise.
template <class V>
constexpr int element_bytes() {
  if constexpr (requires { V::kElementBytes; }) {
    return V::kElementBytes;
  } else {
    return 2;
  }
}

// A variant whose weights bypass the ring.
template <class V, class C>
concept DirectVariant = Variant<V, C> && Constants<int, V::kWeightRows, V::kXRows> && Constants<bool, V::kAligned> &&
                        requires(const Job& job, int i) {
                          { V::weight(job, i) } -> Same<const uint8_t*>;  // i: segment or part
                          { V::weight_pitch(i) } -> Same<int64_t>;        // in bytes
                        };

// The elements of 16 bytes.
template <class T>
MPK_DEVICE void unpack(const uint4& v, float (&f)[kVecSize<T>]) {
  to_floats(reinterpret_cast<const Vec<T, kVecSize<T>>&>(v), f);
}

// Sums each of N values (a power of two up to 32) over the warp. Lane l returns the sum of value l / (32 / N). Each
// value goes through the same tree of lanes for every N.
template <int N>
MPK_DEVICE float sum_values(float (&v)[N], int lane) {
#pragma unroll
  for (int m = N, o = 16; o > 0; m /= 2, o /= 2) {
    if (m > 1) {
      const bool upper = lane & o;
#pragma unroll
      for (int i = 0; i < N / 2; i++)
        if (i < m / 2) {
          const float send = upper ? v[i] : v[i + m / 2];
          const float keep = upper ? v[i + m / 2] : v[i];
          v[i] = keep + __shfl_xor_sync(~0u, send, o);
        }
    } else {
      v[0] += __shfl_xor_sync(~0u, v[0], o);
    }
  }
  return v[0];
}

constexpr int next_power_of_two(int n) { return n <= 1 ? 1 : 2 * next_power_of_two((n + 1) / 2); }

// The segment of a tile.
template <class V>
MPK_DEVICE int segment_of(uint32_t tile) {
  int s = 0;
#pragma unroll
  for (int i = 1; i < V::kSegments; i++) s += tile >= V::first_tile(i);
  return s;
}

// Constants derived from a variant.
template <Sizes V>
struct Shape {
  using T = typename V::T;
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kRows = V::kChunkParts * V::kTileRows;  // weight rows in a chunk
  static constexpr int kChunksAlongK = (V::kSize + V::kChunkSize - 1) / V::kChunkSize;
  static constexpr int kChunks = V::kParts / V::kChunkParts * kChunksAlongK;          // ring entries of a tile
  static constexpr int kSums = kRows * V::kBatch;                                     // that a warp holds
  static constexpr int kRound = kSums <= 32 ? next_power_of_two(kSums) : 32;          // summed over the warp at a time
  static constexpr int kResults = V::kParts * V::kTileRows * V::kBatch;               // of a tile
  static constexpr int kScratchFloats = V::kSharesLoop ? 0 : (kResults + 3) / 4 * 4;  // per warp, before the staged x
  static constexpr int kScratchBytes = kConsumerWarps * kScratchFloats * 4;
  static constexpr int kPitch = (V::kSize * int(sizeof(T)) + 15) / 16 * 16;  // of staged x
  static constexpr int kStagedBytes = kScratchBytes + (V::kStaged ? V::kBatch * kPitch : 0);

  static MPK_DEVICE int chunk_size(int along_k) { return min(V::kChunkSize, V::kSize - along_k * V::kChunkSize); }
};

// Stages rows first, first + step, ... of x, by one group of threads.
template <class V, class C, class Group>
MPK_DEVICE bool stage_rows(C& c, const Job& job, Group group, int first, int step, typename V::T* x) {
  using Chain = typename V::template Chain<Group>;
  constexpr int kPitch = Shape<V>::kPitch / int(sizeof(typename V::T));
  if (!V::kEarly && !c.await()) return false;
  if (first >= V::kBatch) return c.await();
  Chain chain(group, job, first);
  if (V::kEarly && !c.await()) return false;
  for (int r = first;;) {
    chain.stage(group, job, r, x + r * kPitch);
    if ((r += step) >= V::kBatch) return true;
    chain = Chain(group, job, r);
  }
}

// Stages x in shared memory, through the row tasks in front of the linear. False when the launch was aborted.
template <class V, class C>
MPK_DEVICE bool stage(C& c, const Job& job, typename V::T* x) {
  bool ok;
  if constexpr (V::kRowTasks && rows_by_warp(Shape<V>::kPitch, V::kBatch)) {
    ok = stage_rows<V>(c, job, WarpThreads<C>(c), c.warp, kConsumerWarps, x);
  } else {
    ok = stage_rows<V>(c, job, CtaThreads<C>(c), 0, 1, x);
  }
  return ok && c.sync();
}

}  // namespace mpk::linear
