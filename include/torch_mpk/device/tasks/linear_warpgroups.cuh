// Linears whose warpgroups multiply lines of weights by boxes of x have this in common: rows of weights are the first
// factor of the products, and rows of x, as many eights as there are, the second. A line is an entry of the ring: 128
// bytes of each of V::kBoxRows rows. Stages of x, tiles, split-K, and what becomes of the sums are as in
// linear_rows.cuh.
#pragma once

#include "torch_mpk/device/tasks/linear_rows.cuh"

namespace mpk::linear {

template <class V, class C>
concept WarpgroupsVariant = RowsVariant<V, C> && Constants<int, V::kHeldStages> && Constants<bool, V::kJoinsParts>;

// A thread's sums of its warpgroup's boxes.
template <class V>
using HeldSums = WarpgroupSums<V::kXRows>[RowsShape<V>::kHeld];

// A line that a warpgroup multiplies: that of its h-th box, number `chunk` of the worker's part of K and `i` of its
// stage of x, which is ring entry `entry`.
struct OwnLine {
  int h, i;
  uint32_t chunk, entry;
};

// Which boxes of a pass, or which lines of all of them, a warpgroup multiplies. (multiply_by_warpgroup has a loop of
// its own: with this one, linears of 64 rows take more registers than there are.)
template <class V>
struct OwnLines {
  using S = RowsShape<V>;
  static constexpr bool kTakesTurns = S::kTurns > 1;
  static constexpr int kStep = S::kTurns;  // from one of its lines of a box to the next
  uint32_t boxes, group;

  MPK_DEVICE OwnLines(Span pass, uint32_t warp)
      : boxes((pass.end - pass.begin) * S::kBoxesOfTile), group(warp / kWarpgroupWarps) {}
  MPK_DEVICE uint32_t box(int h) const { return kTakesTurns ? h : group + h * kWarpgroups; }
  // The first line of a stage that is its own.
  MPK_DEVICE uint32_t first(uint32_t stage) const {
    return kTakesTurns ? (group + stage * S::kChunksOfStage) % kWarpgroups : 0;
  }
  // How many of its lines of a stage it takes at a time: those of all of its boxes, or two of one. With more rows of x
  // there are too few registers: 64 rows took 8.0 ms instead of 7.5 (docs/experiments.md).
  template <int held>
  static constexpr int count_together() {
    if (V::kXRows > 32) return 1;
    return held > 1 ? held : S::kChunksOfStage % (2 * kStep) == 0 ? 2 : 1;
  }
  // The boxes that `count` lines are of.
  template <int held, int count>
  static constexpr int boxes_together() {
    return count == held ? count : 1;
  }

  // Calls `take` with the next `count` lines, which are there, and the place of their stage; and `load` with the box h
  // and chunk of each that comes next, and which of them it is, before the first and in each turn. `sums` are those to
  // which products in flight are added. A warp whose wait aborts goes on with whatever stands in the ring, since the
  // other warps of its warpgroup cannot multiply without it. `held`: the boxes that a warpgroup has, or one for one
  // that has none; 0 where that is not known.
  template <int held, int count, class C, int arrays, class Load, class Take>
  MPK_DEVICE void each(C& c, WarpgroupSums<V::kXRows> (&sums)[arrays], const uint8_t* stages, Load load,
                       Take take) const {
    static_assert(count == 1 || count == count_together<held>());
    constexpr int kBoxes = boxes_together<held, count>();
    constexpr int kAdvance = kStep * (count / kBoxes);
#pragma unroll
    for (int j = 0; j < count; j++) load(kBoxes > 1 ? j : 0, (kTakesTurns ? group : 0) + j / kBoxes * kStep, j);
#pragma unroll 1
    for (uint32_t turn = 0; turn < S::kNumStages; turn++) {
      const StageState<V> stage(c.stage + turn);
      if (!c.failed) c.failed = !stage.await(c);
      c.stamp_first(&PhaseStamps::staged);
      const uint32_t x = warp_uniform(stage.offset());
#pragma unroll 1
      for (uint32_t i = first(turn); i < S::kChunksOfStage; i += kAdvance) {
#pragma unroll
        for (int h = 0; h < (held > 0 ? held : S::kHeld); h += kBoxes) {
          if ((held == 0 || h == 0) && box(h) >= boxes) break;
          const bool is_last = held > 0 ? h + kBoxes == held : h + 1 == S::kHeld || box(h + 1) >= boxes;
          OwnLine lines[count];
#pragma unroll
          for (int j = 0; j < count; j++) {
            const uint32_t at = i + j / kBoxes * kStep, chunk = turn * S::kChunksOfStage + at;
            const int of = h + (kBoxes > 1 ? j : 0);
            lines[j] = {of, static_cast<int>(at), chunk, c.entry + chunk * boxes + box(of)};
          }
          if (!c.failed && !has(c, lines)) {
            // A call may use registers that products in flight read or write.
#pragma unroll
            for (auto& each : sums) ptx::await_sums(each);
#pragma unroll
            for (const OwnLine& line : lines)
              if (!c.failed) c.failed = !c.ring.wait_longer(line.entry, c.phase);
          }
          take(lines, stages + x, [&] {
#pragma unroll
            for (int j = 0; j < count; j++)
              load(is_last ? (kBoxes > 1 ? j : 0) : h + kBoxes + j, lines[j].chunk + (is_last ? kAdvance : 0), j);
          });
        }
      }
      ptx::await_products<0>();
      c.stages().release(stage.barrier(), c.lane);
    }
#pragma unroll
    for (auto& each : sums) ptx::await_sums(each);
  }

 private:
  // Whether lines, in the order in which they come, are there.
  template <class C, int count>
  MPK_DEVICE static bool has(C& c, const OwnLine (&lines)[count]) {
    if constexpr (count == 1) {
      return c.ring.has(lines[0].entry);
    } else {
      uint32_t entries[count];
#pragma unroll
      for (int j = 0; j < count; j++) entries[j] = lines[j].entry;
      return c.ring.has(entries);
    }
  }
};

// A warp's 16 rows of a box: which weight's they are, the first, and the last that there is, which stands for missing
// ones.
struct WarpRows {
  int which;
  uint32_t first, last;

  template <class V>
  MPK_DEVICE static WarpRows of(Span pass, uint32_t box, uint32_t warp) {
    constexpr uint32_t kPartWarps = (V::kBoxRows + kWarpRows - 1) / kWarpRows;
    if constexpr (V::kJoinsParts)
      return of_part<V>(pass.begin + box, min(warp / kPartWarps, V::kParts - 1u), warp % kPartWarps);
    return of_part<V>(pass.begin + box / V::kParts, box % V::kParts, warp);
  }
  // The rows of block `block` of a part of a tile.
  template <class V>
  MPK_DEVICE static WarpRows of_part(uint32_t tile, uint32_t part, uint32_t block) {
    const int segment = segment_of<V>(tile);
    return {V::kParts > 1 ? static_cast<int>(part) : segment,
            (tile - V::first_tile(segment)) * V::kBoxRows + block * kWarpRows, V::num_rows(segment) - 1};
  }
};

// Leaves the sums of a pass in shared memory, as PassSums finds them. False when the launch was aborted.
template <class V, class C>
MPK_DEVICE bool leave_sums(C& c, Span pass, const HeldSums<V>& sums, uint8_t* staged) {
  using S = RowsShape<V>;
  const uint32_t warp = c.warp % kWarpgroupWarps;
  if (c.warp < S::kWarps && warp < S::kBlocksOfBox) {
    const OwnLines<V> own(pass, c.warp);
    const uint32_t turn = S::kTurns > 1 ? own.group * own.boxes : 0;
    float* to = reinterpret_cast<float*>(staged + S::kSumsOffset);
#pragma unroll
    for (int h = 0; h < S::kHeld; h++) {
      if (S::kMaxBoxes > 1 && own.box(h) >= own.boxes) break;
      store_block<V>(to + ((turn + own.box(h)) * S::kBlocksOfBox + warp) * S::kBlockFloats, sums[h], c.lane);
    }
  }
  return c.sync();
}

// `fetch(tiles)` comes before anything is awaited; `produce(stages)` is the producer warps' part, and `sum(pass, sums,
// stages)` a warpgroup's mainloop. `reads_scales`: whether warpgroups read what another phase has made besides x.
template <class V, bool reads_scales, class C, class Fetch, class Produce, class Sum>
MPK_DEVICE void compute_by_warpgroups(C& c, const Job& job, Fetch fetch, Produce produce, Sum sum) {
  using S = RowsShape<V>;
  static_assert(V::kByWarpgroups && V::kBoxesOfX && !V::kStaged && V::kXRows % 8 == 0);
  static_assert(S::kWarps == kWarpgroups * kWarpgroupWarps && S::kRowsOfBox <= kWarpgroupRows && S::kBoxesOfBlock == 1);
  static_assert(S::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  static_assert(!V::kJoinsParts || V::kBoxRows % kWarpRows == 0, "a warp has rows of two parts");
  static_assert(kWarpgroupRows * 128 <= C::Config::kSlotBytes, "missing rows are read where there is no slot");
  static_assert(V::kSplit == 1 || C::Config::kNumWorkers / V::kSplit * V::kMainloopTiles >= V::kNumTiles,
                "sums of another pass would take the place of those that are polled");
  constexpr int kUnaligned = C::Config::kStagedOffset % kBoxAlignment;
  uint8_t* staged = c.staged() + (kUnaligned != 0 ? kBoxAlignment - kUnaligned : 0);
  const Span tiles = shared_span(V::kNumTiles, c.worker(job), V::kSplit, C::Config::kNumWorkers);
  const auto pass_from = [&](uint32_t tile) { return Span{tile, min(tiles.end, tile + V::kMainloopTiles)}; };
  const auto preload = [&](Span pass) { return RowsResult<V>(pass, c.warp, c.lane).preload(job); };
  typename V::Extra extra{};
  constexpr bool kPreloads = V::kHasExtra && V::kSplit == 1;
  fetch(tiles);
  if constexpr (V::kEarly && kPreloads) extra = preload(pass_from(tiles.begin));
  if constexpr (!reads_scales && (V::kEarly || !kPreloads)) {
    if (!c.await_warps()) return;  // only the producer warps await the events
    if (c.warp >= S::kWarps || tiles.begin == tiles.end) c.await_events();
  } else {
    if (!c.await()) return;
  }
#pragma unroll 1
  for (uint32_t first = tiles.begin; first < tiles.end; first += V::kMainloopTiles) {
    const Span pass = pass_from(first);
    if constexpr (kPreloads)
      if (!V::kEarly || first != tiles.begin) extra = preload(pass);
    HeldSums<V> sums = {};
    if (c.warp >= S::kWarps)
      c.failed |= !produce(staged);
    else
      sum(pass, sums, staged);
    c.entry += S::kChunks * (pass.end - pass.begin) * S::kBoxesOfTile;
    c.stage += S::kNumStages;
    if (!c.sync() || !leave_sums<V>(c, pass, sums, staged)) return;  // stages are no longer read
    const PassSums<V> of_pass(Shares<V>(pass.end - pass.begin), staged);
    if constexpr (V::kSplit > 1)
      finish_shared<V>(c, job, pass, of_pass, RowSums<V>(c, job, 0));
    else
      finish_tiles<V>(c, job, pass, of_pass, RowSums<V>(c, job, 0), extra);
    if (pass.end < tiles.end && !c.sync()) return;
  }
}

}  // namespace mpk::linear
