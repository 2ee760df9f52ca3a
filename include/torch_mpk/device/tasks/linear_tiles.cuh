// linear with many rows of x, by warpgroups: y[r, n] = sum over k of x[r, k] * weight[n, k].
//
// A tile is V::kXRows rows of x by V::kTileRows rows of each part's weight. A worker computes its tiles one after the
// other. Each ring entry holds some columns of all of a tile's rows, and every warpgroup multiplies 64 rows of x. Sums
// stay in registers. Where there are few tiles, V::kSplit workers share a tile, each with an equal part of the columns
// (split-K). They exchange their sums, and each finishes its share of the results. In the epilogue each warp passes its
// 16 rows through shared memory, a strip of columns at a time, so that neighbouring lanes hold neighbouring results.
//
// Where x has fewer rows than warpgroups multiply, only these are loaded. The products of the other rows are of
// whatever stands in shared memory, and nothing reads them.
#pragma once

#include "torch_mpk/device/tagged.cuh"
#include "torch_mpk/device/tasks/linear_shape.cuh"
#include "torch_mpk/device/tasks/linear_tile_rows.cuh"

namespace mpk::linear {

template <class V>
concept TilesSizes = requires {
  typename V::T;
  // Rows of x; K.
  requires Constants<int, V::kBatch, V::kSize>;
  // Segments: linears one after the other in row space. Parts: linears whose row n is computed side by side.
  requires Constants<int, V::kSegments, V::kParts>;
  // The rows of a tile; the columns of an entry; split_k.
  requires Constants<int, V::kXRows, V::kTileRows, V::kChunkSize, V::kSplit>;
  requires Constants<uint32_t, V::kNumTiles>;
};

// See Results. Loads what all results have in common once.
template <class V, class C>
concept TilesResults = Constants<bool, V::kHasExtra> &&
                       requires(C& c, const Job& job, int segment, int r, uint32_t n, const float (&sums)[V::kParts],
                                const typename V::Extra& extra, const typename V::Common& common) {
                         { V::common(job) } -> Same<typename V::Common>;
                         { V::preload(job, segment, r, n) } -> Same<typename V::Extra>;
                         V::finish(c, job, segment, r, n, sums, extra, common);
                       };

template <class V, class C>
concept TilesVariant = TilesSizes<V> && TilesResults<V, C> && requires(int i) {
  { V::first_tile(i) } -> Same<uint32_t>;  // of segment i, counting the tiles with the first rows of x
  { V::num_rows(i) } -> Same<uint32_t>;
} && (V::kSplit == 1 || SplitsK<V>);

// V: has_rows(segment) says whether its results end with row tasks. with_rows(segment, f) calls f with an object of
// their class, see RowsBehind.
template <class V>
concept EndsWithRows = requires(int segment) {
  { V::has_rows(segment) } -> Same<bool>;
};

// Columns of a strip, at most `most`, that divide a share.
constexpr int strip_of(int share, int most) { return share % most == 0 ? most : strip_of(share, most / 2); }

// Constants derived from a variant.
template <TilesSizes V>
struct TilesShape {
  static constexpr int kColumns = V::kTileRows * V::kParts;  // of a tile's results
  // Of an entry, 128 bytes of each row: x, then weights.
  static constexpr int kBlocks = V::kChunkSize * element_bytes<V>() / kBoxRowBytes;
  static constexpr int kXBytes = V::kXRows * kBoxRowBytes;  // of a block
  static constexpr int kPartBytes = V::kTileRows * kBoxRowBytes, kWeightBytes = V::kParts * kPartBytes;
  static constexpr int kEntryBytes = kBlocks * (kXBytes + kWeightBytes);
  static constexpr int kChunks = (V::kSize + V::kChunkSize - 1) / V::kChunkSize;
  static constexpr int kPartChunks = kChunks / V::kSplit;  // of a part
  static constexpr uint32_t kUnits = V::kNumTiles * V::kSplit;
  static constexpr int kXTiles = (V::kBatch + V::kXRows - 1) / V::kXRows;
  // The columns of each part that a worker finishes, and a thread's sums of them.
  static constexpr int kShare = V::kTileRows / V::kSplit, kShareSums = kShare / 2;
  static constexpr int kSumParts = V::kParts, kPartSums = V::kTileRows / 2;  // of all of a thread's sums
  // The columns of a strip, and the rows that make 32 results of it.
  static constexpr int kStrip = strip_of(kShare, strip_columns(V::kParts)), kRowsAtOnce = 32 / kStrip;
  static constexpr int kStagedBytes = kConsumerWarps * kStripBytes;

  // Starts the copy of a part's rows of weights in a block.
  MPK_DEVICE static void load_weights(uint8_t* to, const void* map, int row, int block, uint64_t* full, uint64_t hint) {
    ptx::box_load(to, map, row, block, full, hint);
  }
};

// A tile. Tiles with all rows of x and the same weights follow each other, so that workers read the same weights at the
// same time.
template <class V>
struct TilePlace {
  uint32_t x_row, weight_row;
  int segment;

  MPK_DEVICE explicit TilePlace(uint32_t tile) {
    constexpr uint32_t kXTiles = TilesShape<V>::kXTiles;
    const uint32_t of_weights = tile / kXTiles;
    segment = segment_of<V>(of_weights);
    x_row = (tile - of_weights * kXTiles) * V::kXRows;
    weight_row = (of_weights - V::first_tile(segment)) * V::kTileRows;
  }
};

// How many of `count` units a worker has, if workers take them in turn.
MPK_DEVICE uint32_t units_in_turn(uint32_t count, uint32_t worker, uint32_t workers) {
  return worker < count ? (count - 1 - worker) / workers + 1 : 0;
}

// ---- the loader's part

// The job's references begin with the maps of the weights, then of x.
template <class V, class Shape>
struct TileEntry {
  using S = Shape;
  const uint64_t* maps;
  uint32_t tile, chunk;

  MPK_DEVICE void start(uint8_t* to, uint64_t* full) const {
    start_weights(to, full);
    start_x(to, full);
  }
  // Expects the bytes of x, too.
  MPK_DEVICE void start_weights(uint8_t* to, uint64_t* full) const {
    const TilePlace<V> place(tile);
    ptx::mbar_arrive_expect(full, S::kEntryBytes);
#pragma unroll
    for (int b = 0; b < S::kBlocks; b++)
#pragma unroll
      for (int p = 0; p < V::kParts; p++)
        S::load_weights(to + S::kBlocks * S::kXBytes + b * S::kWeightBytes + p * S::kPartBytes,
                        map(V::kParts > 1 ? p : place.segment), place.weight_row, chunk * S::kBlocks + b, full,
                        S::kXTiles > 1 ? ptx::kEvictNormal : ptx::kEvictFirst);
  }
  MPK_DEVICE void start_x(uint8_t* to, uint64_t* full) const {
    const TilePlace<V> place(tile);
#pragma unroll
    for (int b = 0; b < S::kBlocks; b++)
      ptx::box_load(to + b * S::kXBytes, map(V::kParts > 1 ? V::kParts : V::kSegments), place.x_row,
                    chunk * S::kBlocks + b, full, ptx::kEvictNormal);
  }

 private:
  MPK_DEVICE const void* map(int i) const { return reinterpret_cast<const void*>(maps[i]); }
};

// Weights fill the ring while the phase before still makes x. Copies in flight must land, so those of x are started
// even when the launch was aborted.
template <class V, class S, class L>
MPK_DEVICE void load_tiles_by(L& l, const Job& job) {
  static_assert(S::kEntryBytes <= L::Config::kSlotBytes);
  constexpr uint32_t kWorkers = L::Config::kNumWorkers, kSlots = L::Config::kSlots;
  const uint32_t worker = l.worker(job), count = units_in_turn(S::kUnits, worker, kWorkers) * S::kPartChunks;
  const auto describe = [&](uint32_t number) {
    const uint32_t turn = min(number, count - 1) / S::kPartChunks, unit = worker + turn * kWorkers;
    const uint32_t first = unit % V::kSplit * S::kPartChunks;
    return TileEntry<V, S>{job.refs(), unit / V::kSplit, first + number - turn * S::kPartChunks};
  };
  const uint32_t early = min(count, kSlots), end = l.ring.entry + count;
  l.failed = !begin_entries(l.ring, early, l.phase, describe);
  if (l.failed) return;
  const bool is_there = l.await(job);
  finish_entries(l.ring, early, describe);
  if (is_there)
    l.ring.entry =
        fill_entries(l.ring, count - early, kSlots, l.phase, [&](uint32_t number) { return describe(early + number); });
  l.failed = l.ring.entry != end;
  if constexpr (kProfiled<typename L::Config>) l.stamps.bytes += uint64_t(count) * S::kEntryBytes;
}
template <class V, class L>
MPK_DEVICE void load_tiles(L& l, const Job& job) {
  load_tiles_by<V, TilesShape<V>>(l, job);
}

// ---- the consumers' part

// Where the rows of x that a warp multiplies begin, in a block.
template <class V>
MPK_DEVICE int rows_of_warpgroup(int warp) {
  return V::kXRows > kWarpgroupRows ? warp / kWarpgroupWarps * (kWarpgroupRows * kBoxRowBytes) : 0;
}

// Sums a tile's part of the columns, from ring entry c.entry on. A warp whose wait aborts goes on with whatever stands
// in the ring, since the other warps of its warpgroup cannot multiply without it.
template <class V, class C>
MPK_DEVICE void sum_part(C& c, WarpgroupSums<TilesShape<V>::kColumns>& sums) {
  using S = TilesShape<V>;
  const int x_offset = rows_of_warpgroup<V>(c.warp);
#pragma unroll 1
  for (uint32_t chunk = 0; chunk < S::kPartChunks; chunk++) {
    const uint32_t entry = c.entry + chunk;
    if (!c.failed && !c.ring.wait(entry, c.phase)) c.failed = true;
    const uint8_t* slot = c.ring.slot(entry);
    ptx::begin_products();
#pragma unroll
    for (int b = 0; b < S::kBlocks; b++)
      multiply_blocks<typename V::T, S::kColumns>(sums, ptx::swizzled(slot + b * S::kXBytes + x_offset),
                                                  ptx::swizzled(slot + S::kBlocks * S::kXBytes + b * S::kWeightBytes));
    ptx::commit_products();
    if (chunk > 0) {
      ptx::await_products<1>();
      c.ring.release_share(entry - 1);
    }
  }
  ptx::await_sums(sums);
  c.ring.release_share(c.entry + S::kPartChunks - 1);
  c.entry += S::kPartChunks;
}

// A warp's sums of its share of a tile, part by part. S: as TilesShape.
template <class S>
using SumsOfShare = float[S::kShareSums * S::kSumParts];
template <class V>
using ShareSums = SumsOfShare<TilesShape<V>>;

// Split-K exchange: each worker finishes its share of the columns, and sends its sums of the other shares to their
// workers, as tagged words, two of a thread's side by side.
template <class V, class C, class S = TilesShape<V>>
struct Partials {
  static constexpr int kPairs = S::kShareSums * S::kSumParts / 2, kOthers = V::kSplit - 1;  // pairs in a thread's share
  C& c;
  uint32_t part, tag;
  ulonglong2* first;  // the thread's first word for the tile's first part

  MPK_DEVICE Partials(C& c, const Job& job, uint32_t tile, uint32_t part)
      : c(c),
        part(part),
        tag(tag_of(c)),
        first(reinterpret_cast<ulonglong2*>(V::partials(job) + uint64_t(tile) * kOthers * V::kPartialBytes) + c.rank) {
    static_assert(V::kPartialBytes == V::kSplit * kPairs * kConsumerThreads * int(sizeof(ulonglong2)));
  }

  // The place of word `pair` for part `to`; `other` counts the parts that send to it.
  MPK_DEVICE ulonglong2* place(int to, int other, int pair) const {
    return first + ((to * kOthers + other) * kPairs + pair) * kConsumerThreads;
  }

  // Keeps the sums of its own share.
  MPK_DEVICE void send(const float (&sums)[S::kPartSums * S::kSumParts], SumsOfShare<S>& mine) const {
#pragma unroll
    for (int to = 0; to < V::kSplit; to++) {
      const int other = int(part) - (int(part) > to);
#pragma unroll
      for (int i = 0; i < 2 * kPairs; i += 2) {
        const float* pair = sums + i / S::kShareSums * S::kPartSums + to * S::kShareSums + i % S::kShareSums;
        if (to == part)
          mine[i] = pair[0], mine[i + 1] = pair[1];
        else
          ptx::store_relaxed_gpu(place(to, other, i / 2), tagged(pair[0], pair[1], tag));
      }
    }
  }

  // Adds the other parts' sums to its own share, in the order of the parts.
  MPK_DEVICE void add(SumsOfShare<S>& mine) const {
    constexpr int kAtOnce = pairs_at_once(kPairs);
#pragma unroll
    for (int begin = 0; begin < kPairs && !c.failed; begin += kAtOnce) {
      ulonglong2 words[kOthers][kAtOnce];
      const bool is_received = spin(
          c.shared.watchdog,
          [&] {
            uint32_t differs = 0;
#pragma unroll
            for (int o = 0; o < kOthers; o++)
#pragma unroll
              for (int i = 0; i < kAtOnce; i++) words[o][i] = ptx::load_relaxed_gpu(place(part, o, begin + i));
#pragma unroll
            for (int o = 0; o < kOthers; o++)
#pragma unroll
              for (int i = 0; i < kAtOnce; i++) differs |= differing(words[o][i], tag);
            return differs == 0;
          },
          [&] { return polling(c.phase); });
      if (!is_received) c.failed = true;
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; i++) {
        const float own = mine[2 * begin + i];
        float total = part == 0 ? own : 0.0f;
#pragma unroll
        for (int o = 0; o < kOthers; o++) {
          total += float_of(i % 2 == 0 ? words[o][i / 2].x : words[o][i / 2].y);
          if (o + 1 == part) total += own;
        }
        mine[2 * begin + i] = total;
      }
    }
    c.failed = __any_sync(~0u, c.failed);
  }

 private:
  // Limited by registers.
  static constexpr int pairs_at_once(int pairs) {
    constexpr int kWords = 16;
    return pairs % 2 == 0 && pairs * kOthers > kWords ? pairs_at_once(pairs / 2) : pairs;
  }
};

// Writes the next strip of every part, [row][part][column], and frees its registers.
template <class V>
MPK_DEVICE void show_strip(ShareSums<V>& sums, float* strip, int lane) {
  using S = TilesShape<V>;
  constexpr int kOfPart = S::kShareSums, kOfStrip = S::kStrip / 2;  // a thread's sums
  float* mine = strip + lane / 4 * kStripPitch + lane % 4 * 2;
#pragma unroll
  for (int p = 0; p < V::kParts; p++) {
#pragma unroll
    for (int j = 0; j < kOfStrip / 4; j++)
#pragma unroll
      for (int i = 0; i < 4; i += 2)
        *reinterpret_cast<float2*>(mine + i * 4 * kStripPitch + p * S::kStrip + j * 8) = {
            sums[p * kOfPart + 4 * j + i], sums[p * kOfPart + 4 * j + i + 1]};
#pragma unroll
    for (int i = 0; i < kOfPart - kOfStrip; i++) sums[p * kOfPart + i] = sums[p * kOfPart + kOfStrip + i];
  }
}

// What a lane's results of a strip need besides their sums; the strip begins at column `first` of the tile.
template <class V, class C>
struct Strip {
  using S = TilesShape<V>;
  static constexpr int kRows = kWarpRows / S::kRowsAtOnce;  // of a lane
  uint32_t n;
  int first_row;
  bool is_there;
  typename V::Extra extras[kRows] = {};

  MPK_DEVICE Strip(const C& c, const Job& job, const TilePlace<V>& place, int first)
      : n(place.weight_row + first + c.lane % S::kStrip),
        first_row(place.x_row + c.warp * kWarpRows + c.lane / S::kStrip),
        is_there(n < V::num_rows(place.segment)) {
    if constexpr (V::kHasExtra) {
#pragma unroll
      for (int i = 0; i < kRows; i++)
        if (has(i)) extras[i] = V::preload(job, place.segment, row(i), n);
    }
  }
  MPK_DEVICE int row(int i) const { return first_row + i * S::kRowsAtOnce; }
  MPK_DEVICE bool has(int i) const { return is_there && row(i) < V::kBatch; }

  // Each segment has a loop of its own. In a common loop each result would have to find its segment, and one segment's
  // branches would keep the others' results from being stored together. A second loop, without bounds checks, serves
  // strips whose results all exist, which are most.
  MPK_DEVICE void finish(C& c, const Job& job, int segment, const float* strip,
                         const typename V::Common& common) const {
#pragma unroll
    for (int s = 0; s < V::kSegments; s++) {
      if (s != segment) continue;
      if ((V::kBatch % kWarpRows == 0 && V::num_rows(s) % V::kTileRows == 0) ||
          __all_sync(~0u, is_there && row(kRows - 1) < V::kBatch))
        finish_segment<true>(c, job, s, strip, common);
      else
        finish_segment<false>(c, job, s, strip, common);
    }
  }

 private:
  template <bool all>
  MPK_DEVICE void finish_segment(C& c, const Job& job, int segment, const float* strip,
                                 const typename V::Common& common) const {
    const float* mine = strip + c.lane / S::kStrip * kStripPitch + c.lane % S::kStrip;
    const auto load = [&](int i, float (&results)[V::kParts]) {
#pragma unroll
      for (int p = 0; p < V::kParts; p++) results[p] = mine[i * S::kRowsAtOnce * kStripPitch + p * S::kStrip];
    };
    const auto finish = [&](int i, const float (&results)[V::kParts]) {
      V::finish(c, job, segment, row(i), n, results, extras[i], common);
    };
    if constexpr (all) {
      float results[kRows][V::kParts];
#pragma unroll
      for (int i = 0; i < kRows; i++) load(i, results[i]);
#pragma unroll
      for (int i = 0; i < kRows; i++) finish(i, results[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        if (!has(i)) break;
        float results[V::kParts];
        load(i, results);
        finish(i, results);
      }
    }
  }
};

// Finishes a warp's rows of its worker's share of a tile. `next`: the first strip. Loads what a strip's results need
// while the strip before is finished.
template <class V, class C>
MPK_DEVICE void finish_rows(C& c, const Job& job, const TilePlace<V>& place, int share, Strip<V, C> next,
                            ShareSums<V>& sums, const typename V::Common& common) {
  using S = TilesShape<V>;
  uint8_t* staged = c.staged() + c.warp * kStripBytes;
  if constexpr (EndsWithRows<V>)
    if (V::has_rows(place.segment)) {
      const uint32_t begin = place.weight_row + share, end = min(begin + S::kShare, V::num_rows(place.segment));
      return V::with_rows(place.segment, [&](auto rows) {
        finish_rows_behind<decltype(rows), V::kBatch>(c, job, place.x_row + c.warp * kWarpRows, begin, end, sums,
                                                      staged);
      });
    }
  float* strip = reinterpret_cast<float*>(staged);
#pragma unroll 1
  for (int first = 0; first < S::kShare; first += S::kStrip) {
    const Strip<V, C> current = next;
    if (first + S::kStrip < S::kShare) next = Strip<V, C>(c, job, place, share + first + S::kStrip);
    show_strip<V>(sums, strip, c.lane);
    __syncwarp();
    current.finish(c, job, place.segment, strip, common);
    __syncwarp();
  }
}

// A worker's tiles. `sum` sums a part of a tile: sum(place, part, sums).
template <class V, class C, class Sum>
MPK_DEVICE void compute_tiles_by(C& c, const Job& job, Sum sum) {
  static_assert(TilesVariant<V, C>);
  using S = TilesShape<V>;
  static_assert(V::kXRows <= kTileXRows && V::kXRows % 8 == 0 && V::kTileRows % (8 * V::kSplit) == 0 &&
                S::kChunks % V::kSplit == 0);
  static_assert((S::kBlocks - 1) * S::kXBytes + kTileXRows * kBoxRowBytes <= C::Config::kSlotBytes,
                "what stands behind x is not the slot's");
  static_assert(S::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  if (!c.await()) return;
  const typename V::Common common = V::common(job);
#pragma unroll 1
  for (uint32_t unit = c.worker(job); unit < S::kUnits; unit += C::Config::kNumWorkers) {
    const uint32_t tile = unit / V::kSplit, part = unit - tile * V::kSplit;
    const TilePlace<V> place(tile);
    WarpgroupSums<S::kColumns> sums = {};
    sum(place, part, sums);
    if (c.failed) continue;  // the other warps of its warpgroup go on
    if (place.x_row + c.warp * kWarpRows >= V::kBatch) continue;
    const int share = part * S::kShare;
    if constexpr (V::kSplit > 1) {
      ShareSums<V> mine = {};
      const Partials<V, C> partials(c, job, tile, part);
      partials.send(sums, mine);
      const Strip<V, C> strip(c, job, place, share);
      partials.add(mine);
      if (!c.failed) finish_rows<V>(c, job, place, share, strip, mine, common);
    } else {
      finish_rows<V>(c, job, place, share, Strip<V, C>(c, job, place, share), sums, common);
    }
  }
}

template <class V, class C>
MPK_DEVICE void compute_tiles(C& c, const Job& job) {
  using Sums = WarpgroupSums<TilesShape<V>::kColumns>;
  compute_tiles_by<V>(c, job, [&](const TilePlace<V>&, uint32_t, Sums& sums) { sum_part<V>(c, sums); });
}

}  // namespace mpk::linear
