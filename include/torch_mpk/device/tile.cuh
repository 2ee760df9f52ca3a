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
// The group is a warp or more: threads.rank of Threads::kSize, threads.sync(), and sums and maxima over it. Its size
// decides the order of sums, and depends on the node alone. Nothing is to be read from threadIdx or blockIdx.
#pragma once

#include "torch_mpk/device/row.cuh"

namespace mpk {

// What a tile has of a dimension: `size` from `begin` on; the tile is number `index` along it.
struct Range {
  int64_t index, begin, size;
};

MPK_DEVICE Range range(uint32_t index, int64_t step, int64_t size) {
  const int64_t begin = index * step;
  return {index, begin, size - begin < step ? size - begin : step};
}

// Whether a string attribute has this value: if constexpr (is(V::kStyle, "torch")).
constexpr bool is(const char* value, const char* name) {
  while (*value != 0 && *value == *name) value++, name++;
  return *value == *name;
}

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
    WarpThreads threads{c.lane};
    uint8_t* shared = c.staged() + c.warp * kTilePitch<V>;
    for (uint32_t number = c.worker(job) + c.warp * kWorkers; number < V::kTiles; number += kConsumerWarps * kWorkers) {
      V::template compute<V>(threads, job, number, shared);
      threads.sync();
    }
  } else {
    CtaThreads<C> threads(c);
    for (uint32_t number = c.worker(job); number < V::kTiles; number += kWorkers) {
      V::template compute<V>(threads, job, number, c.staged());
      if (!c.sync()) return;
    }
  }
}

}  // namespace mpk
