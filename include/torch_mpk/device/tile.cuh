// Tile tasks: what a task's device code is given, and the job that runs it.
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
// Code that keeps to that, and to the C library's functions, can serve the CPU too: there the group is one thread.
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

template <class C>
struct CtaTile : CtaThreads<C> {
  using CtaThreads<C>::CtaThreads;

  MPK_DEVICE float max(float v) {
    float* partials = this->c.shared.partials[this->flip];
    this->flip ^= 1;
    v = warp_max(v);
    if (this->c.lane == 0) partials[this->c.warp] = v;
    this->sync();
    float most = partials[0];
#pragma unroll
    for (int w = 1; w < kConsumerWarps; w++) most = fmaxf(most, partials[w]);
    return most;
  }
};

inline constexpr int kMaxTileBytes = 96 << 10;  // of shared memory: the ring needs the rest

template <class V>
inline constexpr int kTilePitch = (V::template shared_bytes<V>() + 127) / 128 * 128;
template <class V>
inline constexpr bool kTilesByWarp =
    rows_by_warp(V::kTileBytes, V::kTiles) && kConsumerWarps * kTilePitch<V> <= kMaxTileBytes / 2;
template <class V>  // of shared memory
inline constexpr int kTileStagedBytes = kTilePitch<V> * (kTilesByWarp<V> ? kConsumerWarps : 1);

template <class V, class C>
MPK_DEVICE void run_tiles(C& c, const Job& job) {
  static_assert(kTileStagedBytes<V> <= kMaxTileBytes,
                "kSharedBytes of a task is above kMaxTileBytes: cut smaller tiles");
  constexpr uint32_t kWorkers = C::Config::kNumWorkers;
  if (!c.await()) return;
  if constexpr (kTilesByWarp<V>) {
    WarpTile threads{c.lane};
    uint8_t* shared = c.staged() + c.warp * kTilePitch<V>;
    for (uint32_t number = c.worker(job) + c.warp * kWorkers; number < V::kTiles; number += kConsumerWarps * kWorkers) {
      V::template compute<V>(threads, job, number, shared);
      threads.sync();
    }
  } else {
    CtaTile<C> threads(c);
    for (uint32_t number = c.worker(job); number < V::kTiles; number += kWorkers) {
      V::template compute<V>(threads, job, number, c.staged());
      if (!c.sync()) return;
    }
  }
}

}  // namespace mpk

#else  // for the CPU
#include "torch_mpk/cpu/tile.h"
#endif
