// Tile tasks: the interface of a task's device code, and the job that runs it.
//
// A task `name` of role tile is two names of namespace mpk::tasks::name, in a header of its own:
//
//   template <class V>
//   inline constexpr int kSharedBytes = ...;     // of shared memory for each tile in the making
//
//   template <class V, class Threads, class T>
//   MPK_DEVICE void compute(Threads& threads, const typename V::Tile& tile, uint8_t* shared, const T* x, T* y);
//
// `compute` is called by all threads of a group, for one tile. It gets a pointer to the tile's slice of each operand,
// in the signature's order (null where an optional one is absent), and knows of V, from the signature
// "x[R, H], weight[H]? -> y[R, H]" and the attribute `eps`:
//
//   V::kR, V::kH                      // sizes of the dimensions
//   V::kEps                           // attributes: int64_t, double or const char* (see `is`)
//   V::X::T                           // element types
//   V::X::stride(d)                   // in elements, of dimension d of the signature, not counting "..."
//   V::X::kAlignment                  // bytes that the slice's address is a multiple of
//   V::Weight::kPresent
//   V::Tile                           // of `tile`: tile.R.begin, tile.R.size, tile.R.index; "..." is tile.Leading
//
// The group is a warp or more: threads.rank of Threads::kSize, threads.sync(), and over what all threads give,
// threads.sum(float) and threads.max(float), which passes over NaN. Its size decides the order of sums, and depends on
// the node alone. Nothing is to be read from threadIdx or blockIdx. Conversions are to_float(v) and cast<To>(v);
// Compute<T> is the type to compute in.
//
// The operand named by @task(stream=...) is passed as a `Stream&` in place of its pointer. The loader copies its slice
// to shared memory ahead of time, in chunks: stream.for_each([&](const T* chunk, int64_t row, int64_t begin, int64_t
// count) {...}) is called for all chunks in order, and `chunk` holds `count` elements of that row from `begin` on. The
// group is a warp then.
//
// Code that keeps to that, and to the C library's functions, can serve the CPU, too: there the group is one thread.
#pragma once

#if defined(__CUDACC__) || defined(__CUDA_ARCH__)

#include "torch_mpk/device/row.cuh"
#include "torch_mpk/tile.h"

namespace mpk {

struct WarpTile {
  static constexpr int kSize = 32;
  int rank;

  MPK_DEVICE float sum(float v) { return warp_sum(v); }
  MPK_DEVICE float max(float v) { return warp_max(v); }
  MPK_DEVICE void sync() { __syncwarp(); }
};

// What a group of all consumer threads needs of a consumer.
struct TileConsumer {
  Shared& shared;
  int rank, warp, lane;
  bool alive = true;

  MPK_DEVICE bool sync() {
    if (alive) alive = !ptx::barrier_or<kConsumerThreads>(false);
    return alive;
  }
};

struct CtaTile : CtaThreads<TileConsumer> {
  using CtaThreads<TileConsumer>::CtaThreads;

  MPK_DEVICE float max(float v) {
    float* of_warps = this->partials();
    v = warp_max(v);
    if (this->c.lane == 0) of_warps[this->c.warp] = v;
    this->sync();
    float most = of_warps[0];
#pragma unroll
    for (int w = 1; w < kConsumerWarps; w++) most = fmaxf(most, of_warps[w]);
    return most;
  }
};

template <class V>
inline constexpr int kTilePitch = (V::template shared_bytes<V>() + 127) / 128 * 128;
template <class V>
inline constexpr bool kTilesByWarp =
    rows_by_warp(V::kTileBytes, V::kTiles) && kConsumerWarps * kTilePitch<V> <= kMaxTileBytes / 2;
template <class V>  // of shared memory
inline constexpr int kTileStagedBytes = kTilePitch<V> * (kTilesByWarp<V> ? kConsumerWarps : 1);

// Computes every `step`th tile from `first` on. False when the launch was aborted.
template <class V>
MPK_DEVICE bool compute_every(TileConsumer& consumer, const Job& job, uint32_t first, uint32_t end, uint32_t step,
                              uint8_t* staged) {
  if constexpr (kTilesByWarp<V>) {
    WarpTile threads{consumer.lane};
    for (uint32_t number = first + consumer.warp * step; number < end; number += kConsumerWarps * step) {
      V::template compute<V>(threads, job, number, staged + consumer.warp * kTilePitch<V>);
      threads.sync();
    }
  } else {
    CtaTile threads(consumer);
    for (uint32_t number = first; number < end; number += step) {
      V::template compute<V>(threads, job, number, staged);
      if (!consumer.sync()) return false;
    }
  }
  return true;
}

// Computes a worker's tiles. False when the launch was aborted. Out of line, and without the consumer: the registers of
// a task's code, and what it passes to its own functions by reference, which lives in memory, must not affect other
// jobs.
template <class V>
MPK_OUT_OF_LINE bool compute_tiles(Shared& shared, Job job, uint32_t worker, uint32_t workers, uint8_t* staged) {
  __builtin_assume(__isShared(staged));
  const int rank = ptx::thread_index();
  TileConsumer consumer{shared, rank, rank / 32, rank % 32};
  return compute_every<V>(consumer, job, worker, V::kTiles, workers, staged);
}

template <class V, class C>
MPK_DEVICE void run_tiles(C& c, const Job& job) {
  if (!c.await()) return;
  c.call([&] { return compute_tiles<V>(c.shared, job, c.worker(job), C::Config::kNumWorkers, c.staged()); });
}

// ---- with an operand that is streamed. V: StreamT, kStreamRows (of a tile), kStreamSize (elements of a row, a
// multiple of 16 bytes), kStreamPitch; stream_data(job, tile), stream_rows(tile).

// A ring entry holds several rows, or a part of one. All tiles have equally many entries; the last may be empty.
template <class V>
struct StreamShape {
  using T = typename V::StreamT;
  static constexpr int64_t kSlot = kMinSlotBytes / int64_t(sizeof(T));  // elements
  static constexpr int64_t kParts = (V::kStreamSize + kSlot - 1) / kSlot;
  static constexpr int64_t kRows = kParts > 1 ? 1 : kSlot / V::kStreamSize;
  static constexpr uint32_t kEntries = (V::kStreamRows + kRows - 1) / kRows * kParts;
};

// The part of a slice of `rows` rows that an entry holds.
template <class V>
struct StreamChunk {
  using S = StreamShape<V>;
  int64_t row, rows, begin, count;

  MPK_DEVICE StreamChunk(uint32_t index, int64_t slice_rows)
      : row(index / S::kParts * S::kRows),
        rows(slice_rows - row < 0          ? 0
             : slice_rows - row < S::kRows ? slice_rows - row
                                           : S::kRows),
        begin(index % S::kParts * S::kSlot),
        count(V::kStreamSize - begin < S::kSlot ? V::kStreamSize - begin : S::kSlot) {}
};

template <class V, class L>
MPK_DEVICE void load_tiles(L& l, const Job& job) {
  using T = typename V::StreamT;
  using S = StreamShape<V>;
  constexpr uint32_t kRowBytes = V::kStreamSize * sizeof(T),
                     kChunkBytes = kRowBytes < kMinSlotBytes ? kRowBytes : kMinSlotBytes;
  constexpr uint32_t kParts = S::kParts, kInverse = inverse(kParts),
                     kInFlight = entries_in_flight(S::kRows * kChunkBytes);
  constexpr Stream kStream{S::kRows, 1, 1, kRowBytes, kChunkBytes, kParts, kParts, kInverse, kInverse, kInFlight};
  constexpr uint32_t kEnd = S::kEntries / S::kParts;
  for (uint32_t number = l.worker(job); number < V::kTiles; number += L::Config::kNumWorkers) {
    const typename V::Tile tile = V::at(number);
    if (l.lane == 0) {
      l.shared.data[0] = reinterpret_cast<uint64_t>(V::stream_data(job, tile));
      l.shared.matrices[0] = {V::kStreamPitch * sizeof(T), static_cast<uint32_t>(V::stream_rows(tile)), 0, kEnd};
    }
    __syncwarp();
    if (!l.fill(kStream, l.shared.data, l.shared.matrices, {0, kEnd})) return;
  }
}

template <class V, class C>
struct RingStream {
  C& c;
  uint32_t entry;  // the first of the tile
  int64_t rows;
  uint32_t next = 0;

  template <class F>
  MPK_DEVICE void for_each(F f) {
    for (; next < StreamShape<V>::kEntries; next++) {
      if (c.failed || !c.ring.wait(entry + next, c.phase)) {
        c.failed = true;
        return;
      }
      const StreamChunk<V> chunk(next, rows);
      const auto* data = reinterpret_cast<const typename V::StreamT*>(c.ring.slot(entry + next));
      for (int64_t r = 0; r < chunk.rows; r++) f(data + r * chunk.count, chunk.row + r, chunk.begin, chunk.count);
      c.ring.release(entry + next);
    }
  }
};

template <class V>
inline constexpr int kStreamStagedBytes = kTilePitch<V> * kConsumerWarps;

// A warp takes every kConsumerWarps'th of the worker's tiles, in the loader's order.
template <class V, class C>
MPK_DEVICE void run_stream_tiles(C& c, const Job& job) {
  static_assert(kStreamStagedBytes<V> <= kMaxTileBytes,
                "kSharedBytes of a task, for each warp, is above kMaxTileBytes");
  constexpr uint32_t kWorkers = C::Config::kNumWorkers;
  if (!c.await()) return;
  const uint32_t worker = c.worker(job), count = worker < V::kTiles ? (V::kTiles - worker - 1) / kWorkers + 1 : 0;
  WarpTile threads{c.lane};
  for (uint32_t i = c.warp; i < count && !c.failed; i += kConsumerWarps) {
    const uint32_t number = worker + i * kWorkers;
    RingStream<V, C> stream{c, c.entry + i * StreamShape<V>::kEntries, V::stream_rows(V::at(number))};
    V::template compute<V>(threads, job, number, c.staged() + c.warp * kTilePitch<V>, stream);
    stream.for_each([](const auto*, int64_t, int64_t, int64_t) {});  // releases what was not read
    threads.sync();
  }
  c.entry += count * StreamShape<V>::kEntries;
}

}  // namespace mpk

#else  // for the CPU
#include "torch_mpk/cpu/tile.h"
#endif
