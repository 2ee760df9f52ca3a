// What a linear knows of a job before it runs, and how x comes to shared memory.
#pragma once

#include "torch_mpk/abi/partition.h"
#include "torch_mpk/device/fragment.cuh"
#include "torch_mpk/device/polled.cuh"

namespace mpk::linear {

// What a variant says of one job.
template <class V>
concept Sizes = requires {
  // The element type of x, weights and results.
  typename V::T;
  // Rows of x; K.
  requires Constants<int, V::kBatch, V::kSize>;
  // Linears one after the other in row space, or linears whose row n is computed side by side.
  requires Constants<int, V::kSegments, V::kParts>;
  // Rows a tile has of each part; parts and k that share a chunk.
  requires Constants<int, V::kTileRows, V::kChunkParts, V::kChunkSize>;
  requires Constants<uint32_t, V::kNumTiles>;
  // x stands in shared memory, after row tasks; otherwise it is read where it is, kPitchX elements from row to row.
  requires Constants<bool, V::kStaged, V::kRowTasks> && Constants<int, V::kPitchX>;
  // One row of staged x, whose tiles have up to four sums: see compute_shared.
  requires Constants<bool, V::kSharesLoop>;
  // Workers draw tiles at run time; otherwise they are dealt out beforehand.
  requires Constants<bool, V::kClaimed>;
  // What chains and extras fetch first is known before the phase's events.
  requires Constants<bool, V::kEarly>;
};

// And what it does with a value: bias, epilogue, stores. C: the consumer.
template <class V, class C>
concept Results = Constants<bool, V::kHasExtra> &&  // there is something to preload
                  requires(C& c, const Job& job, int segment, int r, uint32_t n, const float (&sums)[V::kParts],
                           const typename V::Extra& extra) {
                    { V::preload(job, segment, r, n) } -> Same<typename V::Extra>;
                    V::finish(c, job, segment, r, n, sums, extra);
                  };

// Where the sums of workers that share tiles meet, kPartialBytes of each.
template <class V>
concept Meets = Constants<int, V::kPartialBytes> && requires(const Job& job) {
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
    RowChain<typename V::template Chain<CtaThreads<C>>, CtaThreads<C>, typename V::T, uint32_t>;  // bring a row of x

// One whose weights are read without the ring.
template <class V, class C>
concept DirectVariant = Variant<V, C> && Constants<int, V::kWeightRows, V::kXRows> && Constants<bool, V::kAligned> &&
                        requires(const Job& job, int i) {
                          { V::weight(job, i) } -> Same<const uint8_t*>;  // of segment or part i
                          { V::weight_pitch(i) } -> Same<int64_t>;        // in bytes
                        };

// The elements of 16 bytes.
template <class T>
MPK_DEVICE void unpack(const uint4& v, float (&f)[kVecSize<T>]) {
  to_floats(reinterpret_cast<const Vec<T, kVecSize<T>>&>(v), f);
}

// Sums each of N values (a power of two up to 32) over the warp; lane l returns the sum of value l / (32 / N). Every
// value goes through the same tree of lanes, whatever N is.
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

// Which of the linears that follow each other in row space a tile is of.
template <class V>
MPK_DEVICE int segment_of(uint32_t tile) {
  int s = 0;
#pragma unroll
  for (int i = 1; i < V::kSegments; i++) s += tile >= V::first_tile(i);
  return s;
}

// What follows from a variant.
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

// Rows first, first + step, ... of x into shared memory, by one group of threads.
template <class V, class C, class Group>
MPK_DEVICE bool stage_rows(C& c, const Job& job, Group group, int first, int step, typename V::T* x) {
  using Chain = typename V::template Chain<Group>;
  constexpr int kPitch = Shape<V>::kPitch / int(sizeof(typename V::T));
  if (!V::kEarly && !c.await()) return false;
  if (first >= V::kBatch) return c.await();
  Chain chain(group, job, first);
  if (V::kEarly && !c.await()) return false;
  for (int r = first;;) {
    chain.bring(group, job, r, x + r * kPitch);
    if ((r += step) >= V::kBatch) return true;
    chain = Chain(group, job, r);
  }
}

// Brings x into shared memory, through the row tasks in front of the linear. False when the launch was given up.
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
