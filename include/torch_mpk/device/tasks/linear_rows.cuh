// linear with several rows of x, on tensor cores: y[r, n] = sum over k of x[r, k] * weight[n, k].
//
// Weights come through the ring in boxes of V::kBoxRows rows by V::kChunkSize columns, each by one copy of the copy
// engine. A worker computes all of its rows at once, K outermost: warps hold the sums in registers, and only the
// current columns of x are needed. Two boxes of 8 rows, or one of 16, are the first factor of the products (a block),
// and eight rows of x the second. Where a worker has fewer blocks than warps, several warps take turns at a block's
// chunks, and their sums are added in order.
//
// x is staged as a whole, where it fits or comes through row tasks. Otherwise producer warps copy it in stages of a
// chunk's columns: by the copy engine, as boxes, unless it may begin anywhere.
//
// With more rows of x in such stages, warpgroups multiply, each with up to 64 rows of weights, for all of which they
// read x from shared memory once.
//
// Where a worker would read more of x than of weights, V::kSplit workers share tiles (split-K): each takes an equal
// part of the columns, and needs that part of x alone. They exchange their sums in the workspace.
#pragma once

#include "torch_mpk/device/tagged.cuh"
#include "torch_mpk/device/tasks/linear_rows_sums.cuh"

namespace mpk::linear {

// A result of a pass: row `r` of x with row `n` of a segment. A warp takes a strip of 32 rows of weights with one row
// of x at a time, or, where a pass has fewer rows, all of them with several rows of x. It takes numbers c.warp, c.warp
// + kConsumerWarps, ...: all rows of x with a strip, then with the next strip.
template <class V>
struct RowsResult {
  static constexpr int kRows = V::kEpilogueTiles * V::kBoxRows;
  static constexpr uint32_t kStripRows = V::kSplit > 1 || kRows > 16 ? 32 : next_power_of_two(kRows);
  static constexpr uint32_t kXRows = 32 / kStripRows, kNumbers = (V::kBatch + kXRows - 1) / kXRows;  // of a strip
  uint32_t local, r;  // local: weight row within the pass
  uint32_t n = 0;
  int segment = 0;
  bool is_there = false;

  MPK_DEVICE RowsResult(Span tiles, uint32_t number, uint32_t lane)
      : RowsResult(tiles, number % kNumbers * kXRows + lane / kStripRows, number / kNumbers, lane % kStripRows) {}
  MPK_DEVICE RowsResult(Span tiles, uint32_t r, uint32_t strip, uint32_t lane) : local(strip * 32 + lane), r(r) {
    if (local >= (tiles.end - tiles.begin) * V::kBoxRows || !has_x()) return;
    const uint32_t tile = tiles.begin + local / V::kBoxRows;
    segment = segment_of<V>(tile);
    n = (tile - V::first_tile(segment)) * V::kBoxRows + local % V::kBoxRows;
    is_there = n < V::num_rows(segment);
  }
  MPK_DEVICE bool has_x() const { return V::kBatch % (V::kSplit > 1 ? 4 * V::kSplit : kXRows) == 0 || r < V::kBatch; }
  MPK_DEVICE typename V::Extra preload(const Job& job) const {
    if (!is_there) return {};
    return V::preload(job, segment, r, n);
  }
};

// The sums of a pass's tiles, as the worker's warps left them in shared memory.
template <class V>
struct PassSums {
  using S = RowsShape<V>;
  Shares<V> shares;
  const float *from, *factors;

  MPK_DEVICE PassSums(const Shares<V>& shares, const uint8_t* staged)
      : shares(shares),
        from(reinterpret_cast<const float*>(staged + S::kSumsOffset)),
        factors(reinterpret_cast<const float*>(staged + S::kFactorsOffset)) {}

  // The sum of row `r` of x with row `local` of a part of the weights.
  MPK_DEVICE float at(uint32_t r, uint32_t local, int part) const {
    const uint32_t box = local / V::kBoxRows * S::kBoxesOfTile + (S::kJoinsParts ? 0 : part);
    const uint32_t row = local % V::kBoxRows + (S::kJoinsParts ? part * V::kBoxRows : 0);
    const uint32_t block = box * S::kBlocksOfBox / S::kBoxesOfBlock + row / kWarpRows;
    const float* sum =
        from + block * S::kBlockFloats + r * kSumPitch + box % S::kBoxesOfBlock * V::kBoxRows + row % kWarpRows;
    float each[Shares<V>::kMostSharers], total = 0;  // read together
#pragma unroll
    for (uint32_t turn = 0; turn < Shares<V>::kMostSharers; turn++)
      each[turn] = turn < shares.sharers ? sum[turn * shares.blocks * S::kBlockFloats] : 0;
#pragma unroll
    for (float one : each) total += one;
    return total;
  }

  // Scales a sum of row `r` of x by the row's factor.
  MPK_DEVICE float scaled(uint32_t r, float total) const { return V::kScalesRows ? total * factors[r] : total; }
};

// Finishes a result. Returns its square, where a norm follows.
template <class V, class C>
MPK_DEVICE float finish_result(C& c, const Job& job, const RowsResult<V>& result, const float (&results)[V::kParts],
                               const typename V::Extra& extra) {
  if (!result.is_there) return 0;
  if constexpr (V::kEndsWithNorm) return V::finish(c, job, result.segment, result.r, result.n, results, extra);
  V::finish(c, job, result.segment, result.r, result.n, results, extra);
  return 0;
}

// `sums`: as PassSums. `extra`: operands of the thread's first result.
template <class V, class C, class Sums>
MPK_DEVICE void finish_tiles(C& c, const Job& job, Span tiles, const Sums& sums, const RowSums<V>& row_sums,
                             typename V::Extra extra) {
  using Result = RowsResult<V>;
  const uint32_t numbers = strips_of<V>(tiles.end - tiles.begin) * Result::kNumbers;
#pragma unroll 1
  for (uint32_t number = c.warp; number < numbers; number += kConsumerWarps) {
    const Result result(tiles, number, c.lane);
    if (number != c.warp) extra = result.preload(job);
    float results[V::kParts];
#pragma unroll
    for (int p = 0; p < V::kParts; p++)
      results[p] = result.is_there ? sums.scaled(result.r, sums.at(result.r, result.local, p)) : 0.0f;
    const float square = finish_result(c, job, result, results, extra);
    if constexpr (V::kEndsWithNorm) {
      const float sum = warp_sum<Result::kStripRows>(square);
      if (c.lane % Result::kStripRows == 0 && result.has_x()) row_sums.leave(number / Result::kNumbers, result.r, sum);
    }
  }
}

// Split-K exchange. Each worker finishes the rows of x whose number modulo V::kSplit is its part's, and sends its sums
// of the other rows to the workers that finish them, as tagged words of two rows of x each. Four such rows are a quad:
// a warp sends, or polls, two words for 32 rows of weights (a strip) at a time. Parts have as many quads, in which rows
// past the last have sums, too, that nobody finishes.
template <class V>
struct SplitKExchange {
  static constexpr uint32_t kQuads = (V::kBatch + 4 * V::kSplit - 1) / (4 * V::kSplit) * V::kSplit;
  static constexpr uint32_t kOthers = V::kSplit - 1;
  static_assert(V::kParts == 1 && kQuads * 4 <= 8 * RowsShape<V>::kColumns);
  static_assert(!V::kEndsWithNorm || kQuads * 4 == V::kBatch, "rows past the last have no sums of squares");
  uint8_t* partials;  // of the first worker that shares the tiles
  uint32_t part, rows, strips, tag;

  template <class C>
  MPK_DEVICE SplitKExchange(const C& c, const Job& job, Span tiles)
      : part(c.worker(job) % V::kSplit), rows((tiles.end - tiles.begin) * V::kBoxRows), strips((rows + 31) / 32) {
    partials = V::partials(job) + uint64_t(c.worker(job) - part) * V::kPartialBytes;
    tag = tag_of(c);
  }
  // Row `i` of a quad. The quad belongs to part quad % kSplit.
  MPK_DEVICE static uint32_t row(uint32_t quad, int i) {
    return quad % V::kSplit + (quad / V::kSplit * 4 + i) * V::kSplit;
  }
  // A lane's two words of a quad and strip, as part `from` sent them, 32 words apart.
  MPK_DEVICE ulonglong2* words(uint32_t from, uint32_t quad, uint32_t strip, uint32_t lane) const {
    return reinterpret_cast<ulonglong2*>(partials + from * V::kPartialBytes) + (quad * strips + strip) * 64 + lane;
  }
};

template <class V, class C>
MPK_DEVICE void send_sums(C& c, const SplitKExchange<V>& exchange, const PassSums<V>& sums) {
#pragma unroll 1
  for (uint32_t number = c.warp; number < exchange.kQuads * exchange.strips; number += kConsumerWarps) {
    const uint32_t quad = number % exchange.kQuads, strip = number / exchange.kQuads, local = strip * 32 + c.lane;
    if (quad % V::kSplit == exchange.part || local >= exchange.rows) continue;
    ulonglong2* to = exchange.words(exchange.part, quad, strip, c.lane);
    const auto sum = [&](int i) { return sums.at(exchange.row(quad, i), local, 0); };
#pragma unroll
    for (int i = 0; i < 2; i++) ptx::store_relaxed_gpu(to + 32 * i, tagged(sum(2 * i), sum(2 * i + 1), exchange.tag));
  }
}

// Polls the other parts' sums of a quad and strip, all in flight together. False when the launch was aborted.
template <class V, class C>
MPK_DEVICE bool receive_sums(C& c, const SplitKExchange<V>& exchange, uint32_t quad, uint32_t strip,
                             ulonglong2 (&words)[V::kSplit - 1][2]) {
  const bool is_there = strip * 32 + c.lane < exchange.rows;
  return poll(c.shared.watchdog, c.phase, [&] {
#pragma unroll
    for (uint32_t o = 0; o < exchange.kOthers; o++) {
      const ulonglong2* from = exchange.words(o < exchange.part ? o : o + 1, quad, strip, c.lane);
#pragma unroll
      for (int i = 0; i < 2; i++)
        words[o][i] = is_there ? ptx::load_relaxed_gpu(from + 32 * i) : tagged(0u, 0u, exchange.tag);
    }
    uint32_t missing = 0;
#pragma unroll
    for (uint32_t o = 0; o < exchange.kOthers; o++)
#pragma unroll
      for (int i = 0; i < 2; i++) missing |= differing(words[o][i], exchange.tag);
    return missing;
  });
}

// finish_tiles where workers share tiles. Sums are added in the order of the parts.
template <class V, class C>
MPK_DEVICE void finish_shared(C& c, const Job& job, Span tiles, const PassSums<V>& sums, const RowSums<V>& row_sums) {
  const SplitKExchange<V> exchange(c, job, tiles);
  send_sums(c, exchange, sums);
  constexpr uint32_t kMine = SplitKExchange<V>::kQuads / V::kSplit;
  const uint32_t strips = strips_of<V>(tiles.end - tiles.begin);
#pragma unroll 1
  for (uint32_t number = c.warp; number < kMine * strips; number += kConsumerWarps) {
    const uint32_t quad = number % kMine * V::kSplit + exchange.part, strip = number / kMine;
    const auto result_of = [&](int i) { return RowsResult<V>(tiles, exchange.row(quad, i), strip, c.lane); };
    typename V::Extra extras[4];
#pragma unroll
    for (int i = 0; i < 4; i++) extras[i] = result_of(i).preload(job);
    ulonglong2 words[exchange.kOthers][2];
    bool is_received = receive_sums(c, exchange, quad, strip, words);
    if (V::kEndsWithNorm) is_received = __all_sync(~0u, is_received);  // lanes add up their squares
    if (!is_received) {
      c.failed = true;
      return;
    }
    float squares[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const RowsResult<V> result = result_of(i);
      const float mine = result.is_there ? sums.at(result.r, result.local, 0) : 0.0f;
      float results[1] = {exchange.part == 0 ? mine : 0.0f};
#pragma unroll
      for (uint32_t o = 0; o < exchange.kOthers; o++) {
        results[0] += float_of(i % 2 == 0 ? words[o][i / 2].x : words[o][i / 2].y);
        if (o + 1 == exchange.part) results[0] += mine;
      }
      results[0] = result.is_there ? sums.scaled(result.r, results[0]) : 0.0f;
      squares[i] = finish_result(c, job, result, results, extras[i]);
    }
    if constexpr (V::kEndsWithNorm) {
      const float sum = sum_values(squares, c.lane);  // of the row that 8 lanes share
      if (c.lane % 8 == 0) row_sums.leave(strip, exchange.row(quad, c.lane / 8), sum);
    }
  }
}

// The epilogue from tile `at` of a pass on, kEpilogueTiles at a time: writes their sums to shared memory, and finishes
// them.
template <class V, int at, class C, class Finish>
MPK_DEVICE bool run_epilogue(C& c, Span pass, const WarpgroupSums<V::kBoxRows> (&sums)[RowsShape<V>::kHeld],
                             uint8_t* staged, Finish finish) {
  using S = RowsShape<V>;
  const Span turn{pass.begin + at, min(pass.end, pass.begin + at + V::kEpilogueTiles)};
  if (at > 0 && turn.begin >= pass.end) return true;
  if (at > 0 && !c.sync()) return false;  // the sums before have been read
  if (!store_boxes<V, at * V::kParts, S::kHasSubtiles ? 1 : S::kHeld>(c, sums, (pass.end - pass.begin) * V::kParts,
                                                                      staged))
    return false;
  finish(turn);
  if constexpr (at + V::kEpilogueTiles < V::kMainloopTiles)
    return run_epilogue<V, at + V::kEpilogueTiles>(c, pass, sums, staged, finish);
  return true;
}

template <class V, class C>
MPK_DEVICE void compute_rows(C& c, const Job& job) {
  static_assert(RowsVariant<V, C>);
  using S = RowsShape<V>;
  static_assert(S::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  static_assert(S::kBoxBytes <= C::Config::kSlotBytes);
  static_assert(V::kSplit == 1 || C::Config::kNumWorkers / V::kSplit * V::kMainloopTiles >= V::kNumTiles,
                "sums of another pass would take the place of those that are polled");
  constexpr int kUnaligned = C::Config::kStagedOffset % kBoxAlignment;
  uint8_t* staged = c.staged() + (V::kBoxesOfX && kUnaligned != 0 ? kBoxAlignment - kUnaligned : 0);
  const Span tiles = shared_span(V::kNumTiles, c.worker(job), V::kSplit, C::Config::kNumWorkers);
  const auto pass_from = [&](uint32_t tile) { return Span{tile, min(tiles.end, tile + V::kMainloopTiles)}; };
  const auto preload = [&](Span pass) { return RowsResult<V>(pass, c.warp, c.lane).preload(job); };
  typename V::Extra extra{};
  constexpr bool kPreloads = V::kHasExtra && V::kSplit == 1;
  RowSums<V>::fetch_factors(c, job, tiles);
  if constexpr (V::kEarly && kPreloads) extra = preload(pass_from(tiles.begin));
  if constexpr (V::kBoxesOfX && (V::kEarly || !kPreloads)) {
    if (!c.await_warps()) return;  // only the producer warps await the events
    if (c.warp >= S::kWarps || tiles.begin == tiles.end) c.await_events();
  } else if constexpr (!V::kStaged) {
    if (!c.await()) return;
  } else {
    bool ok;
    if constexpr (V::kSplit > 1)
      ok = stage_columns<V>(c, job, staged);
    else
      ok = stage_all<V>(c, job, staged);
    if (!ok || !c.sync()) return;
    c.stamp(&PhaseStamps::staged);
  }
  const auto finish = [&](Span of_pass, const Shares<V>& shares) {
    const PassSums<V> sums(shares, staged);
    const RowSums<V> row_sums(c, job, (of_pass.begin - tiles.begin) / V::kMainloopTiles);
    if constexpr (V::kSplit > 1)
      finish_shared<V>(c, job, of_pass, sums, row_sums);
    else
      finish_tiles<V>(c, job, of_pass, sums, row_sums, extra);
  };
#pragma unroll 1
  for (uint32_t first = tiles.begin; first < tiles.end; first += V::kMainloopTiles) {
    const Span pass = pass_from(first);
    if constexpr (kPreloads)
      if (!V::kEarly || first != tiles.begin) extra = preload(pass);
    if constexpr (V::kByWarpgroups) {
      WarpgroupSums<V::kBoxRows> sums[S::kHeld] = {};
      if (!sum_by_warpgroups<V>(c, job, (pass.end - pass.begin) * V::kParts, staged, sums)) return;
      if (!run_epilogue<V, 0>(c, pass, sums, staged, [&](Span turn) {
            if constexpr (kPreloads)
              if (turn.begin != pass.begin) extra = preload(turn);
            finish(turn, Shares<V>(turn.end - turn.begin));
          }))
        return;
    } else {
      const Shares<V> shares(pass.end - pass.begin);
      if (!sum_boxes<V>(c, job, pass.end - pass.begin, shares, staged, Products<V>{})) return;
      finish(pass, shares);
    }
    if (pass.end < tiles.end && !c.sync()) return;
  }
  RowSums<V>(c, job, (tiles.end - tiles.begin + V::kMainloopTiles - 1) / V::kMainloopTiles).leave_none(c);
}

}  // namespace mpk::linear
