// attention: one query position for each row of the batch against a key-value cache, softmax in fp32.
// paged_attention.cuh is the same with pages; it defines where positions lie (Positions) and which of a tile count
// (Live).
//
// The visible positions of every (batch row, group) are cut into splits, see attention_splits.cuh. With few positions a
// warp has one tile; with many, rows of any lengths are shared out evenly. The loader streams a split tile by tile, the
// keys and values of a few positions, each tile for one warp. The worker of a group's last split merges the results. It
// polls those of the other splits as tagged words. Warps of a split merge in tile order, and splits in the order of
// their positions: no sum depends on the order of arrival.
//
// With a large batch, a worker has several splits one after the other (V::kOverlaps). Then producer warps stage the
// rows of the next split and merge the split before, while the other warps compute the tiles of the current one, in
// turn through all splits.
//
// Each layer runs this code once, and fetches all its instructions anew, so it is short. Scores take tensor cores if
// the dtype has them, with one score of a head in each lane. Sums of values take tensor cores if there are several
// rows, see attention_values.cuh.
#pragma once

#include "torch_mpk/device/tasks/attention_softmax.cuh"

namespace mpk::attention {

// ---- the loader's part

// The keys or values of a tile, where their sizes differ: fill_ring has rows of one size.
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
MPK_OUT_OF_LINE uint32_t fill_unlike(Writer ring, Job job, KvSplit split, uint32_t limit, uint32_t phase) {
  using S = Shape<V>;
  const uint32_t group = split.group / V::kPasses;
  return fill_entries(ring, 2 * split.num_tiles, S::kInFlight, phase, [&](uint32_t number) {
    const uint32_t tile = split.first_tile + number / 2, first = tile * S::kTile;
    const bool is_value = number % 2 != 0;
    const uint32_t pitch = is_value ? V::kPitchV : V::kPitchK;
    const auto* data = reinterpret_cast<const uint8_t*>(is_value ? V::v_cache(job, split.row, group)
                                                                 : V::k_cache(job, split.row, group));
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
MPK_DEVICE bool Positions<V>::load(L& l, const Job& job, const KvSplit& split, uint32_t limit) {
  using S = Shape<V>;
  if constexpr (!S::kAlike) {
    const uint32_t first = split.first_tile * S::kTile;
    const uint32_t positions = first < limit ? min(split.num_tiles * S::kTile, limit - first) : 0;
    return l.fill_by(2 * split.num_tiles, positions * (S::kRowBytes + S::kValueBytes),
                     [&] { return fill_unlike<V>(l.ring, job, split, limit, l.phase); });
  } else {
    constexpr uint32_t kParts = S::kParts, kBytes = S::kRowBytes, kEntries = S::kEntries;
    constexpr Stream kStream{S::kTile,          2,           kParts, kBytes, kBytes, 1, kEntries, inverse(1),
                             inverse(kEntries), S::kInFlight};
    const uint32_t group = split.group / V::kPasses, end = split.first_tile + split.num_tiles;
    if (l.lane < 2) {
      l.shared.data[l.lane] = reinterpret_cast<uint64_t>(l.lane == 0 ? V::k_cache(job, split.row, group)
                                                                     : V::v_cache(job, split.row, group));
      l.shared.matrices[l.lane] = {l.lane == 0 ? V::kPitchK : V::kPitchV, limit, 0, end};
    }
    __syncwarp();
    return l.fill(kStream, l.shared.data, l.shared.matrices, {split.first_tile, end});
  }
}

template <class V, class L>
MPK_DEVICE void load_splits(L& l, const Job& job) {
  const Cut<V> cut(job);
#pragma unroll 1
  for (uint32_t turn = 0;; turn++) {
    const KvSplit split = cut.split(turn, l.worker(job));
    if (split.num_tiles == 0 || !Positions<V>::load(l, job, split, cut.limit(split.row))) return;
  }
}

template <class V, class L>
MPK_DEVICE void load(L& l, const Job& job) {
  static_assert(Sizes<V> && Places<V>);
  static_assert(
      V::kBatch == 1 ||
          kv_own_count(tiles_of<V>(V::kLength), V::kFewSplits, V::kSplitTiles) * V::kBatch * kUnits<V> <= V::kSplits,
      "the schedule has less room for results of splits");
  Positions<V>::prefetch(job, l.lane);
  if constexpr (kMaySpread<V>)
    if (spreads<V>(job)) return load_splits<Spread<V>>(l, job);
  load_splits<V>(l, job);
}

// ---- the consumers' part

template <class Rows, class V, class C>
MPK_DEVICE void stage_row(C& c, const Job& job, uint32_t row, uint32_t batch_row, typename V::T* data) {
  WarpThreads<C> threads(c);
  typename Rows::template Chain<WarpThreads<C>> chain(threads, job, row, batch_row);
  chain.fetch(threads, job, row, data);
  chain.apply(threads, job, row, data);
}

// Tiles that have landed when a split is staged: the first tile of each warp, as far as the ring holds them beside the
// entries that the loader fills only together.
template <class V, class C>
inline constexpr uint32_t kHeldTiles =
    (C::Config::kSlots - (kLeastFilled<C::Config::kSlotBytes> - 1)) / Shape<V>::kEntries;
template <class V, class C>
inline constexpr uint32_t kStagedTiles = kHeldTiles<V, C> < kConsumerWarps ? kHeldTiles<V, C> : kConsumerWarps;

// Copies a key or value by the lanes of a warp.
template <class S, class T>
MPK_DEVICE void copy_chunks(T* to, const T* from, bool is_value, int lane) {
  const int chunks = S::kAlike || !is_value ? S::kChunks : S::kValueChunks;
#pragma unroll
  for (int i = 0; i < (S::kChunks > S::kValueChunks ? S::kChunks : S::kValueChunks); i += 32)
    if (i + lane < chunks) reinterpret_cast<uint4*>(to)[i + lane] = reinterpret_cast<const uint4*>(from)[i + lane];
}

// A warp stages row `place` of a split's rows: first the rows of q, then the key and value of a new position. The
// worker with the first tile of a group also writes these to the caches. begins() is called once the operands known
// beforehand are loaded. False when it returns false.
template <class V, class C, class Begins>
MPK_DEVICE bool load_row(C& c, const Job& job, const KvSplit& split, Slot<V> slot, int place, uint8_t* staged,
                         Begins begins) {
  using S = Shape<V>;
  using T = typename V::T;
  const uint32_t group = split.group / V::kPasses;
  const bool is_query = place < V::kHeads, is_value = place == V::kHeads + 1;
  const bool is_new = V::kHasNew && !is_query && place < V::kHeads + 2;
  const uint32_t row = is_query ? split.row * (V::kGroups * V::kPasses * V::kHeads) + split.group * V::kHeads + place
                                : split.row * V::kGroups + group;
  T* data = reinterpret_cast<T*>(staged) + (is_query ? place : place - V::kHeads + S::kNewRow) * S::kPitch;
  if constexpr (V::kOneChain) {
    WarpThreads<C> threads(c);
    const Job chained = job.from(is_query ? V::kRefsQ : V::kRefsK);
    typename V::RowsQ::template Chain<WarpThreads<C>> chain(threads, chained, row, split.row);
    if (!begins()) return false;
    if (is_query || is_new) {
      chain.fetch(threads, is_value ? job.from(V::kRefsV) : chained, row, data);
      if (!is_value) chain.apply(threads, chained, row, data);
    }
  } else {
    if (!begins()) return false;
    if (is_query) stage_row<typename V::RowsQ, V>(c, job.from(V::kRefsQ), row, split.row, data);
    if constexpr (V::kHasNew) {
      if (is_new && !is_value) stage_row<typename V::RowsK, V>(c, job.from(V::kRefsK), row, split.row, data);
      if (is_value) stage_row<typename V::RowsV, V>(c, job.from(V::kRefsV), row, split.row, data);
    }
  }
  __syncwarp();
  if constexpr (!S::kTensorCores) {
    float* queries = reinterpret_cast<float*>(staged + S::kFloatsOffset) + place * S::kSize;
    if (is_query)
      for (int d = c.lane; d < S::kSize; d += 32) queries[query_place<V>(d)] = to_float(data[d]);
  }
  T* to;
  if (is_new && split.first_tile == 0 && split.group % V::kPasses == 0 && slot >= 0 && slot < V::kLength &&
      Positions<V>::find(job, split.row, group, slot, is_value, to)) {
    copy_chunks<S>(to, data, is_value, c.lane);
  }
  return true;
}

// Stages the rows of a split, one row a warp. False when there is no such split, or the launch was aborted. Operands
// known beforehand are loaded first, since finding the split takes a limit from memory.
template <class V, class C>
MPK_DEVICE bool stage(C& c, const Job& job, const KvSplit& split, Slot<V> slot) {
  static_assert(V::kHeads + 2 <= kConsumerWarps);
  const auto begins = [&] { return (!V::kEarly || c.await()) && split.num_tiles != 0; };
  if (!load_row<V>(c, job, split, slot, c.warp, c.staged(), begins)) return false;
  // Waiting for the warp's first tile here fetches its code into the instruction cache while rows are awaited.
  if (c.warp < min(split.num_tiles, kStagedTiles<V, C>) && !c.ring.wait(c.entry + c.warp * Shape<V>::kEntries, c.phase))
    c.failed = true;
  return c.sync();
}

// Adds one tile of keys and values. False when the launch was aborted. The first `present` tiles have landed.
template <class V, class C>
MPK_DEVICE bool add_tile(C& c, const Job& job, const KvSplit& split, uint32_t index, uint32_t limit, Slot<V> slot,
                         uint8_t* staged, uint32_t present, Softmax<V>& softmax) {
  using S = Shape<V>;
  using T = typename S::T;
  const T* new_rows = reinterpret_cast<const T*>(staged) + S::kNewRow * S::kPitch;
  const uint32_t entry = c.entry + index * S::kEntries;
  const uint32_t first = (split.first_tile + index) * S::kTile;
  Live<V> live(first, limit);
  // The cache may still hold what preceded this launch, and the ring's slot what preceded this tile.
  bool has_new, patched;
  const auto compare = [&] {
    has_new = V::kHasNew && live.has(slot, first);
    patched = has_new || !live.has_all();
  };
  if (Live<V>::kAreKnown) compare();
  auto data_of = [&](uint32_t e) { return reinterpret_cast<T*>(c.ring.slot(e)); };
  auto patch_keys = [&](T* keys) {
    if (has_new) copy_chunks<S>(keys + (uint32_t(slot) - first) * S::kSize, new_rows, false, c.lane);
    if (!S::kTogether) __syncwarp();
  };
  auto patch_values = [&](T* values) {
    if (!patched) return;
    if (has_new) copy_chunks<S>(values + (uint32_t(slot) - first) * S::kValueSize, new_rows + S::kPitch, true, c.lane);
#pragma unroll 1
    for (uint32_t i = live.num_first() * S::kValueChunks + c.lane; i < S::kTile * S::kValueChunks; i += 32)
      if (Live<V>::kAreKnown || !live.has(i / S::kValueChunks)) reinterpret_cast<uint4*>(values)[i] = uint4{};
    __syncwarp();
  };
  auto wait = [&](uint32_t e) { return S::kTensorCoreSums ? c.ring.wait_here(e, c.phase) : c.ring.wait(e, c.phase); };
  auto release = [&](uint32_t e) {
    if (patched) ptx::fence_proxy_async_shared();
    c.ring.release(e);
  };
  softmax.fetch_mask(job, split, first, live, c.lane);
  if (index >= present && !wait(entry)) return false;
  if constexpr (!Live<V>::kAreKnown) {
    live = Live<V>(c.ring.word_of(entry));
    compare();
  }
  T* keys = data_of(entry);
  T* values = S::kTogether ? keys + S::kTile * S::kSize : data_of(entry + 1);
  patch_keys(keys);
  if (S::kTogether) patch_values(values);
  auto await_values = [&] {
    if (S::kTogether) return true;
    release(entry);
    if (!wait(entry + 1)) return false;
    patch_values(values);
    return true;
  };
  return softmax.add({keys, values, live}, staged, c.warp, c.lane, await_values,
                     [&] { release(entry + S::kEntries - 1); });
}

// Merges the warps' results of a head, which begin at `results`. The worker of the group's last split adds the other
// splits' partial results, and stores the head, or computes its tiles, in the place of the results. False when the
// launch was aborted.
template <class V, class C>
MPK_DEVICE bool combine_head(C& c, const Job& job, const KvSplit& split, int head, float* results) {
  Combined<V> all(results, Shape<V>::kStored * kPartial<V>, c.lane);
  if constexpr (kMayCut<V>) {
    const uint32_t tag = tag_of(c);
    uint8_t* partials = V::partials(job) + split.first * kSplitBytes<V> + head * V::kPartialBytes;
    if (!split.is_last) {
      all.store_partial(partials + split.index * kUnits<V> * kSplitBytes<V>, tag, c.lane);
      return true;
    }
    if (!all.add(c, partials, split.index, tag)) return false;
  }
  const uint32_t number = split.group * V::kHeads + head;
  if constexpr (V::kStored) all.store(job, split.row, number, c.lane);
  if constexpr (HasTiles<V>) {
    using T = typename V::T;
    T* row = reinterpret_cast<T*>(results);
    __syncwarp();
    all.finish(job, number, c.lane, [&](uint32_t at, const auto& rounded) {
#pragma unroll
      for (int e = 0; e < Shape<V>::kWidth; e++) row[at + e] = rounded.v[e];
    });
    __syncwarp();
    V::tiles(job, split.row * kUnits<V> * V::kHeads + number, row, 0, 1, c.lane);
  }
  return true;
}

// Merges the warps' results of a split, a warp for each head, and stores them. False when the launch was aborted.
template <class V, class C>
MPK_DEVICE bool combine_warps(C& c, const Job& job, const KvSplit& split, Softmax<V>& softmax) {
  using S = Shape<V>;
  float* stored = reinterpret_cast<float*>(c.staged() + S::kCombineOffset);
#pragma unroll 1
  for (int first = 0; first < V::kHeads; first += S::kStored) {
    if (first > 0 && !c.sync()) return false;
    softmax.store(first, stored + c.warp * S::kStored * kPartial<V>, c.lane);
    if (!c.sync()) return false;
    const int head = first + c.warp;
    if (c.warp >= S::kStored || head >= V::kHeads) continue;
    if (!combine_head<V>(c, job, split, head, stored + c.warp * kPartial<V>)) c.failed = true;
  }
  return true;
}

template <class V, class C>
MPK_DEVICE void compute_splits(C& c, const Job& job) {
  using S = Shape<V>;
  static_assert(S::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  const Cut<V> cut(job);
  const Positions<V> positions(job);
  const uint32_t worker = c.worker(job);
  // No worker has two splits.
  constexpr bool kOnce = V::kBatch == 1 && kUnits<V> <= V::kWorkers;
#pragma unroll 1
  for (uint32_t turn = 0;; turn++) {
    const KvSplit split = cut.split(turn, worker);
    if (!kOnce && split.num_tiles == 0) return;
    if (!kOnce && turn > 0 && !c.sync()) return;  // the split before is no longer read
    const uint32_t limit = cut.limit(split.row);
    const Slot<V> slot = positions.written(job, split.row);
    Softmax<V> softmax;
    if (!stage<V>(c, job, split, slot)) return;
    c.stamp_first(&PhaseStamps::staged);
#pragma unroll 1
    for (uint32_t t = c.warp; t < split.num_tiles && !c.failed; t += kConsumerWarps)
      c.failed = !add_tile<V>(c, job, split, t, limit, slot, c.staged(), kStagedTiles<V, C>, softmax);
    if (!combine_warps<V>(c, job, split, softmax)) return;
    c.entry += S::kEntries * split.num_tiles;
    if (kOnce) return;
  }
}

// ---- the same with splits that overlap
//
// A stage is full once the split's rows are staged, and empty once its tiles' results are stored. Two splits fit.

template <class V, class C>
MPK_DEVICE uint8_t* stage_of(C& c, uint32_t number) {
  return c.staged() + number % 2 * Shape<V>::kBufferBytes;
}

// Computes the splits' tiles. False when the launch was aborted.
template <class V, class C>
MPK_DEVICE bool consume_stages(C& c, const Job& job, const Cut<V>& cut, const Positions<V>& positions) {
  using S = Shape<V>;
  uint32_t place = c.warp;  // the warp's turn at the split's tiles
#pragma unroll 1
  for (uint32_t turn = 0;; turn++) {
    const KvSplit split = cut.split(turn, c.worker(job));
    if (split.num_tiles == 0) return true;
    const uint32_t limit = cut.limit(split.row);
    const Slot<V> slot = positions.written(job, split.row);
    uint8_t* staged = stage_of<V>(c, c.stage);
    Softmax<V> softmax;
    if (!await_stage(c, c.stages().full, c.stage, Waiting::kFullSlot)) return false;
    c.stamp_first(&PhaseStamps::staged);
#pragma unroll 1
    for (uint32_t t = place; t < split.num_tiles; t += kTileWarps<V>)
      if (!add_tile<V>(c, job, split, t, limit, slot, staged, 0, softmax)) return false;
    softmax.store(0, reinterpret_cast<float*>(staged + S::kCombineOffset) + place * S::kStored * kPartial<V>, c.lane);
    place = (place + kTileWarps<V> - split.num_tiles % kTileWarps<V>) % kTileWarps<V>;
    c.stages().release(c.stage % kStages, c.lane);
    c.stage++;
    c.entry += S::kEntries * split.num_tiles;
  }
}

// Stages and merges. A split is merged once the next one's rows are staged. So a warp that polls other workers' splits
// has staged all of its own before.
template <class V, class C>
MPK_DEVICE bool produce_stages(C& c, const Job& job, const Cut<V>& cut, const Positions<V>& positions) {
  using S = Shape<V>;
  const int helper = c.warp - kTileWarps<V>;
  const auto combine = [&](const KvSplit& split, uint32_t stage) {
    float* stored = reinterpret_cast<float*>(stage_of<V>(c, stage) + S::kCombineOffset);
    if (!await_stage(c, c.stages().empty, stage, Waiting::kFreeSlot)) return false;
#pragma unroll 1
    for (int head = helper; head < V::kHeads; head += kProducerWarps)
      if (!combine_head<V>(c, job, split, head, stored + head * kPartial<V>)) return false;
    __syncwarp();
    return true;
  };
  KvSplit before{};
  bool has_before = false;
#pragma unroll 1
  for (uint32_t turn = 0;; turn++) {
    const KvSplit split = cut.split(turn, c.worker(job));
    if (split.num_tiles != 0) {
      const Slot<V> slot = positions.written(job, split.row);
#pragma unroll 1
      for (int place = helper; place < V::kHeads + (V::kHasNew ? 2 : 0); place += kProducerWarps)
        load_row<V>(c, job, split, slot, place, stage_of<V>(c, c.stage), [] { return true; });
      ptx::mbar_arrive(&c.stages().full[c.stage % kStages]);
    }
    if (has_before && !combine(before, c.stage - 1)) return false;
    if (split.num_tiles == 0) return true;
    c.stage++;
    c.entry += S::kEntries * split.num_tiles;
    before = split;
    has_before = true;
  }
}

template <class V, class C>
MPK_DEVICE void compute_overlapped(C& c, const Job& job) {
  static_assert(Shape<V>::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  const Cut<V> cut(job);
  const Positions<V> positions(job);
  if (!c.await()) return;
  if (!(c.warp < kTileWarps<V> ? consume_stages<V>(c, job, cut, positions) : produce_stages<V>(c, job, cut, positions)))
    c.failed = true;
}

template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  static_assert(Variant<V, C>);
  if (!V::kEarly && !c.await()) return;
  if constexpr (kMaySpread<V>)
    if (spreads<V>(job)) return compute_splits<Spread<V>>(c, job);
  if constexpr (V::kOverlaps)
    compute_overlapped<V>(c, job);
  else
    compute_splits<V>(c, job);
}

}  // namespace mpk::attention
