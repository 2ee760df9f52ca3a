// attention: one query position per row of the batch against a key-value cache, softmax in fp32. The same of caches in
// pages is paged_attention.cuh, which says where positions lie (Positions) and which of a tile count (Live).
//
// The visible positions of every (batch row, group) are cut into pieces, see attention_pieces.cuh: with few of them
// so that a warp has one tile, and with many so that rows of any lengths are shared out evenly. The loader streams a
// piece tile by tile, keys and values of a few positions, each tile for one warp. The worker of a group's last piece
// puts the results of its pieces together: the others' come as tagged words, which it polls. Within a piece warps
// combine in tile order, and pieces combine in the order of their positions: nothing is added in order of arrival.
//
// A batch may have so many groups that a worker has several pieces one after the other (V::kOverlaps). Then some warps
// stage the rows of the next piece, and put the results of the one before together, while the others are at its tiles,
// of which they take turns through all pieces.
//
// A worker comes here once a layer and fetches all it executes anew, so the code is short: scores on tensor cores,
// where there are any for the dtype, one score of a head for each lane, and sums of values on tensor cores where there
// are several rows, see attention_values.cuh.
#pragma once

#include "torch_mpk/device/tasks/attention_softmax.cuh"

namespace mpk::attention {

// ---- the loader's part

// Keys or values of a tile, where they differ in size: fill_ring has rows of one.
template <class Writer>
struct CacheEntry {
  const Writer& ring;
  const uint8_t* from;
  uint32_t pitch, rows, bytes, tile;

  MPK_DEVICE void start(uint8_t* to, uint64_t* full) const {
    if constexpr (arch::kHasBulkCopies) ptx::mbar_arrive_expect(full, rows * bytes);
    ring.copy(to, from, pitch, rows, bytes, full);
    if constexpr (!arch::kHasBulkCopies) ptx::copy_async_arrive(full);
  }
};

template <class V, class Writer>
MPK_OUT_OF_LINE uint32_t fill_unlike(Writer ring, Job job, KvPiece piece, uint32_t limit, uint32_t phase) {
  using S = Shape<V>;
  const uint32_t group = piece.group / V::kPasses;
  return fill_entries(ring, 2 * piece.num_tiles, S::kInFlight, phase, [&](uint32_t number) {
    const uint32_t tile = piece.first_tile + number / 2, first = tile * S::kTile;
    const bool is_value = number % 2 != 0;
    const uint32_t pitch = is_value ? V::kPitchV : V::kPitchK;
    const auto* data = reinterpret_cast<const uint8_t*>(is_value ? V::v_cache(job, piece.row, group)
                                                                 : V::k_cache(job, piece.row, group));
    return CacheEntry<Writer>{ring,
                              data + uint64_t(first) * pitch,
                              pitch,
                              first < limit ? min(uint32_t(S::kTile), limit - first) : 0,
                              uint32_t(is_value ? S::kValueBytes : S::kRowBytes),
                              tile};
  });
}

template <class V>
template <class L>
MPK_DEVICE bool Positions<V>::load(L& l, const Job& job, const KvPiece& piece, uint32_t limit) {
  using S = Shape<V>;
  if constexpr (!S::kAlike) {
    const uint32_t first = piece.first_tile * S::kTile;
    const uint32_t positions = first < limit ? min(piece.num_tiles * S::kTile, limit - first) : 0;
    return l.fill_by(2 * piece.num_tiles, positions * (S::kRowBytes + S::kValueBytes),
                     [&] { return fill_unlike<V>(l.ring, job, piece, limit, l.phase); });
  } else {
    constexpr uint32_t kParts = S::kParts, kBytes = S::kRowBytes, kEntries = S::kEntries;
    constexpr Stream kStream{S::kTile,          2,           kParts, kBytes, kBytes, 1, kEntries, inverse(1),
                             inverse(kEntries), S::kInFlight};
    const uint32_t group = piece.group / V::kPasses, end = piece.first_tile + piece.num_tiles;
    if (l.lane < 2) {
      l.shared.data[l.lane] = reinterpret_cast<uint64_t>(l.lane == 0 ? V::k_cache(job, piece.row, group)
                                                                     : V::v_cache(job, piece.row, group));
      l.shared.matrices[l.lane] = {l.lane == 0 ? V::kPitchK : V::kPitchV, limit, 0, end};
    }
    __syncwarp();
    return l.fill(kStream, l.shared.data, l.shared.matrices, {piece.first_tile, end});
  }
}

template <class V, class L>
MPK_DEVICE void load_pieces(L& l, const Job& job) {
  const Cut<V> cut(job);
#pragma unroll 1
  for (uint32_t turn = 0;; turn++) {
    const KvPiece piece = cut.piece(turn, l.worker(job));
    if (piece.num_tiles == 0 || !Positions<V>::load(l, job, piece, cut.limit(piece.row))) return;
  }
}

template <class V, class L>
MPK_DEVICE void load(L& l, const Job& job) {
  static_assert(Sizes<V> && Places<V>);
  static_assert(
      V::kBatch == 1 ||
          kv_own_count(tiles_of<V>(V::kLength), V::kFewPieces, V::kPieceTiles) * V::kBatch * kUnits<V> <= V::kPieces,
      "the schedule has less room for results of pieces");
  Positions<V>::foresee(job, l.lane);
  if constexpr (kMaySpread<V>)
    if (spreads<V>(job)) return load_pieces<Spread<V>>(l, job);
  load_pieces<V>(l, job);
}

// ---- the consumers' part

template <class Rows, class V, class C>
MPK_DEVICE void stage_row(C& c, const Job& job, uint32_t row, uint32_t batch_row, typename V::T* data) {
  WarpThreads<C> threads(c);
  typename Rows::template Chain<WarpThreads<C>> chain(threads, job, row, batch_row);
  chain.fetch(threads, job, row, data);
  chain.apply(threads, job, row, data);
}

// Tiles of a piece that are there when it is staged: each warp's first, if the ring holds them at once, beside as many
// entries as the loader fills only together.
template <class V, class C>
inline constexpr uint32_t kHeldTiles =
    (C::Config::kSlots - (kLeastFilled<C::Config::kSlotBytes> - 1)) / Shape<V>::kEntries;
template <class V, class C>
inline constexpr uint32_t kStagedTiles = kHeldTiles<V, C> < kConsumerWarps ? kHeldTiles<V, C> : kConsumerWarps;

// A key, or a value, by the lanes of a warp.
template <class S, class T>
MPK_DEVICE void copy_chunks(T* to, const T* from, bool is_value, int lane) {
  const int chunks = S::kAlike || !is_value ? S::kChunks : S::kValueChunks;
#pragma unroll
  for (int i = 0; i < (S::kChunks > S::kValueChunks ? S::kChunks : S::kValueChunks); i += 32)
    if (i + lane < chunks) reinterpret_cast<uint4*>(to)[i + lane] = reinterpret_cast<const uint4*>(from)[i + lane];
}

// Row `place` of those that a piece needs, brought to `staged` by a warp: first the rows of q, then, with a new
// position, its key and value, which the worker with the first tile of a group also writes to the caches. begins() is
// asked behind what is known of the rows beforehand; false when it says so.
template <class V, class C, class Begins>
MPK_DEVICE bool bring_row(C& c, const Job& job, const KvPiece& piece, Slot<V> slot, int place, uint8_t* staged,
                          Begins begins) {
  using S = Shape<V>;
  using T = typename V::T;
  const uint32_t group = piece.group / V::kPasses;
  const bool is_query = place < V::kHeads, is_value = place == V::kHeads + 1;
  const bool is_new = V::kHasNew && !is_query && place < V::kHeads + 2;
  const uint32_t row = is_query ? piece.row * (V::kGroups * V::kPasses * V::kHeads) + piece.group * V::kHeads + place
                                : piece.row * V::kGroups + group;
  T* data = reinterpret_cast<T*>(staged) + (is_query ? place : place - V::kHeads + S::kNewRow) * S::kPitch;
  if constexpr (V::kOneChain) {
    WarpThreads<C> threads(c);
    const Job chained = job.from(is_query ? V::kRefsQ : V::kRefsK);
    typename V::RowsQ::template Chain<WarpThreads<C>> chain(threads, chained, row, piece.row);
    if (!begins()) return false;
    if (is_query || is_new) {
      chain.fetch(threads, is_value ? job.from(V::kRefsV) : chained, row, data);
      if (!is_value) chain.apply(threads, chained, row, data);
    }
  } else {
    if (!begins()) return false;
    if (is_query) stage_row<typename V::RowsQ, V>(c, job.from(V::kRefsQ), row, piece.row, data);
    if constexpr (V::kHasNew) {
      if (is_new && !is_value) stage_row<typename V::RowsK, V>(c, job.from(V::kRefsK), row, piece.row, data);
      if (is_value) stage_row<typename V::RowsV, V>(c, job.from(V::kRefsV), row, piece.row, data);
    }
  }
  __syncwarp();
  if constexpr (!S::kTensorCores) {
    float* queries = reinterpret_cast<float*>(staged + S::kFloatsOffset) + place * S::kSize;
    if (is_query)
      for (int d = c.lane; d < S::kSize; d += 32) queries[query_place<V>(d)] = to_float(data[d]);
  }
  T* to;
  if (is_new && piece.first_tile == 0 && piece.group % V::kPasses == 0 && slot >= 0 && slot < V::kLength &&
      Positions<V>::find(job, piece.row, group, slot, is_value, to)) {
    copy_chunks<S>(to, data, is_value, c.lane);
  }
  return true;
}

// What a piece needs in shared memory, each row by one warp. False when there is no such piece, or the launch was given
// up. What is known of the rows beforehand is fetched before it is known whether there is a piece, which takes a limit
// from memory.
template <class V, class C>
MPK_DEVICE bool stage(C& c, const Job& job, const KvPiece& piece, Slot<V> slot) {
  static_assert(V::kHeads + 2 <= kConsumerWarps);
  const auto begins = [&] { return (!V::kEarly || c.await()) && piece.num_tiles != 0; };
  if (!bring_row<V>(c, job, piece, slot, c.warp, c.staged(), begins)) return false;
  // The warp's first tile, so that code that is not in the instruction cache is fetched while the rows are awaited.
  if (c.warp < min(piece.num_tiles, kStagedTiles<V, C>) && !c.ring.wait(c.entry + c.warp * Shape<V>::kEntries, c.phase))
    c.failed = true;
  return c.sync();
}

// One tile of keys and values; false when the launch was given up. The first `present` tiles are known to be there.
template <class V, class C>
MPK_DEVICE bool add_tile(C& c, const Job& job, const KvPiece& piece, uint32_t index, uint32_t limit, Slot<V> slot,
                         uint8_t* staged, uint32_t present, Softmax<V>& softmax) {
  using S = Shape<V>;
  using T = typename S::T;
  const T* new_rows = reinterpret_cast<const T*>(staged) + S::kNewRow * S::kPitch;
  const uint32_t entry = c.entry + index * S::kEntries;
  const uint32_t first = (piece.first_tile + index) * S::kTile;
  Live<V> live(first, limit);
  // The cache may still hold what was there before this launch, and the slot what was there before this tile.
  bool has_new, mended;
  const auto compare = [&] {
    has_new = V::kHasNew && live.has(slot, first);
    mended = has_new || !live.has_all();
  };
  if (Live<V>::kAreKnown) compare();
  auto data_of = [&](uint32_t e) { return reinterpret_cast<T*>(c.ring.slot(e)); };
  auto mend_keys = [&](T* keys) {
    if (has_new) copy_chunks<S>(keys + (uint32_t(slot) - first) * S::kSize, new_rows, false, c.lane);
    if (!S::kTogether) __syncwarp();
  };
  auto mend_values = [&](T* values) {
    if (!mended) return;
    if (has_new) copy_chunks<S>(values + (uint32_t(slot) - first) * S::kValueSize, new_rows + S::kPitch, true, c.lane);
#pragma unroll 1
    for (uint32_t i = live.num_first() * S::kValueChunks + c.lane; i < S::kTile * S::kValueChunks; i += 32)
      if (Live<V>::kAreKnown || !live.has(i / S::kValueChunks)) reinterpret_cast<uint4*>(values)[i] = uint4{};
    __syncwarp();
  };
  auto wait = [&](uint32_t e) { return S::kTensorCoreSums ? c.ring.wait_here(e, c.phase) : c.ring.wait(e, c.phase); };
  auto release = [&](uint32_t e) {
    if (mended) ptx::fence_proxy_async_shared();
    c.ring.release(e);
  };
  softmax.fetch_mask(job, piece, first, live, c.lane);
  if (index >= present && !wait(entry)) return false;
  if constexpr (!Live<V>::kAreKnown) {
    live = Live<V>(c.ring.said_of(entry));
    compare();
  }
  T* keys = data_of(entry);
  T* values = S::kTogether ? keys + S::kTile * S::kSize : data_of(entry + 1);
  mend_keys(keys);
  if (S::kTogether) mend_values(values);
  auto await_values = [&] {
    if (S::kTogether) return true;
    release(entry);
    if (!wait(entry + 1)) return false;
    mend_values(values);
    return true;
  };
  return softmax.add({keys, values, live}, staged, c.warp, c.lane, await_values,
                     [&] { release(entry + S::kEntries - 1); });
}

// A head's result of a piece from those of the warps, the first of which is at `results`; the result of all pieces by
// the worker of the group's last one, once it has added those of the others, which are partial. False when the launch
// was given up.
template <class V, class C>
MPK_DEVICE bool combine_head(C& c, const Job& job, const KvPiece& piece, int head, const float* results) {
  Combined<V> all(results, Shape<V>::kStored * kPartial<V>, c.lane);
  if constexpr (kMayCut<V>) {
    const uint32_t tag = tag_of(c);
    uint8_t* partials = V::partials(job) + piece.first * kPieceBytes<V> + head * V::kPartialBytes;
    if (!piece.is_last) {
      all.store_partial(partials + piece.index * kUnits<V> * kPieceBytes<V>, tag, c.lane);
      return true;
    }
    if (!all.add(c, partials, piece.index, tag)) return false;
  }
  all.store(job, piece.row, piece.group * V::kHeads + head, c.lane);
  return true;
}

// The warps' results of a piece, put together by a warp for each head and written. False when the launch was given up.
template <class V, class C>
MPK_DEVICE bool combine_warps(C& c, const Job& job, const KvPiece& piece, Softmax<V>& softmax) {
  using S = Shape<V>;
  float* stored = reinterpret_cast<float*>(c.staged() + S::kCombineOffset);
#pragma unroll 1
  for (int first = 0; first < V::kHeads; first += S::kStored) {
    if (first > 0 && !c.sync()) return false;
    softmax.store(first, stored + c.warp * S::kStored * kPartial<V>, c.lane);
    if (!c.sync()) return false;
    const int head = first + c.warp;
    if (c.warp >= S::kStored || head >= V::kHeads) continue;
    if (!combine_head<V>(c, job, piece, head, stored + c.warp * kPartial<V>)) c.failed = true;
  }
  return true;
}

template <class V, class C>
MPK_DEVICE void compute_pieces(C& c, const Job& job) {
  using S = Shape<V>;
  static_assert(S::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  const Cut<V> cut(job);
  const Positions<V> positions(job);
  const uint32_t worker = c.worker(job);
  // Then no worker has two pieces.
  constexpr bool kOnce = V::kBatch == 1 && kUnits<V> <= V::kWorkers;
#pragma unroll 1
  for (uint32_t turn = 0;; turn++) {
    const KvPiece piece = cut.piece(turn, worker);
    if (!kOnce && piece.num_tiles == 0) return;
    if (!kOnce && turn > 0 && !c.sync()) return;  // the shared memory of the piece before is no longer read
    const uint32_t limit = cut.limit(piece.row);
    const Slot<V> slot = positions.written(job, piece.row);
    Softmax<V> softmax;
    if (!stage<V>(c, job, piece, slot)) return;
    c.stamp_first(&PhaseStamps::staged);
#pragma unroll 1
    for (uint32_t t = c.warp; t < piece.num_tiles && !c.failed; t += kConsumerWarps)
      c.failed = !add_tile<V>(c, job, piece, t, limit, slot, c.staged(), kStagedTiles<V, C>, softmax);
    if (!combine_warps<V>(c, job, piece, softmax)) return;
    c.entry += S::kEntries * piece.num_tiles;
    if (kOnce) return;
  }
}

// ---- the same with pieces that overlap
//
// Windows are full when a piece's rows are staged, and empty when its tiles' results are stored; two pieces have room.

template <class V, class C>
MPK_DEVICE uint8_t* window_of(C& c, uint32_t number) {
  return c.staged() + number % 2 * Shape<V>::kBufferBytes;
}

// The pieces' tiles. False when the launch was given up.
template <class V, class C>
MPK_DEVICE bool work_on_tiles(C& c, const Job& job, const Cut<V>& cut, const Positions<V>& positions) {
  using S = Shape<V>;
  uint32_t place = c.warp;  // the warp's among those that take the piece's first tiles
#pragma unroll 1
  for (uint32_t turn = 0;; turn++) {
    const KvPiece piece = cut.piece(turn, c.worker(job));
    if (piece.num_tiles == 0) return true;
    const uint32_t limit = cut.limit(piece.row);
    const Slot<V> slot = positions.written(job, piece.row);
    uint8_t* staged = window_of<V>(c, c.window);
    Softmax<V> softmax;
    if (!await_window(c, c.windows().full, c.window, Waiting::kFullSlot)) return false;
    c.stamp_first(&PhaseStamps::staged);
#pragma unroll 1
    for (uint32_t t = place; t < piece.num_tiles; t += kTileWarps<V>)
      if (!add_tile<V>(c, job, piece, t, limit, slot, staged, 0, softmax)) return false;
    softmax.store(0, reinterpret_cast<float*>(staged + S::kCombineOffset) + place * S::kStored * kPartial<V>, c.lane);
    place = (place + kTileWarps<V> - piece.num_tiles % kTileWarps<V>) % kTileWarps<V>;
    c.windows().release(c.window % kWindows, c.lane);
    c.window++;
    c.entry += S::kEntries * piece.num_tiles;
  }
}

// All else. A piece's results are put together when the next one's rows are staged; so a warp that waits for pieces of
// others has staged all pieces before its own.
template <class V, class C>
MPK_DEVICE bool serve_tiles(C& c, const Job& job, const Cut<V>& cut, const Positions<V>& positions) {
  using S = Shape<V>;
  const int helper = c.warp - kTileWarps<V>;
  const auto combine = [&](const KvPiece& piece, uint32_t window) {
    const float* stored = reinterpret_cast<const float*>(window_of<V>(c, window) + S::kCombineOffset);
    if (!await_window(c, c.windows().empty, window, Waiting::kFreeSlot)) return false;
#pragma unroll 1
    for (int head = helper; head < V::kHeads; head += kBringingWarps)
      if (!combine_head<V>(c, job, piece, head, stored + head * kPartial<V>)) return false;
    __syncwarp();
    return true;
  };
  KvPiece before{};
  bool has_before = false;
#pragma unroll 1
  for (uint32_t turn = 0;; turn++) {
    const KvPiece piece = cut.piece(turn, c.worker(job));
    if (piece.num_tiles != 0) {
      const Slot<V> slot = positions.written(job, piece.row);
#pragma unroll 1
      for (int place = helper; place < V::kHeads + (V::kHasNew ? 2 : 0); place += kBringingWarps)
        bring_row<V>(c, job, piece, slot, place, window_of<V>(c, c.window), [] { return true; });
      ptx::mbar_arrive(&c.windows().full[c.window % kWindows]);
    }
    if (has_before && !combine(before, c.window - 1)) return false;
    if (piece.num_tiles == 0) return true;
    c.window++;
    c.entry += S::kEntries * piece.num_tiles;
    before = piece;
    has_before = true;
  }
}

template <class V, class C>
MPK_DEVICE void compute_overlapped(C& c, const Job& job) {
  static_assert(Shape<V>::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  const Cut<V> cut(job);
  const Positions<V> positions(job);
  if (!c.await()) return;
  if (!(c.warp < kTileWarps<V> ? work_on_tiles<V>(c, job, cut, positions) : serve_tiles<V>(c, job, cut, positions)))
    c.failed = true;
}

template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  static_assert(Variant<V, C>);
  if (!V::kEarly && !c.await()) return;
  if constexpr (kMaySpread<V>)
    if (spreads<V>(job)) return compute_pieces<Spread<V>>(c, job);
  if constexpr (V::kOverlaps)
    compute_overlapped<V>(c, job);
  else
    compute_pieces<V>(c, job);
}

}  // namespace mpk::attention
