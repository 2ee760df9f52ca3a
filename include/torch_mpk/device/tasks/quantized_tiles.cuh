// quantized_linear of prompts, by warpgroups: rows of weights are the first factor of the products, which tensor cores
// take from registers, and rows of x the second. So weights become numbers of x's type on their way from the ring, once
// for all of a tile's rows of x, and nothing of x is converted.
//
// A tile is V::kXRows rows of x by V::kTileRows rows of each part's weight. A warp has the same rows of each part, 16
// in all. An entry of the ring has some blocks of 64 columns: x as in linear_tiles.cuh, and weights as they are stored,
// row after row. A lane loads whole 16 bytes of its two rows, as the three lanes beside it do, and takes its pairs of
// neighbours from them.
//
// Sums are transposed: a warp has its rows of weights for all rows of x. It passes them through shared memory, a strip
// of rows of x at a time, so that neighbouring lanes hold neighbouring results.
#pragma once

#include "torch_mpk/device/tasks/linear_tiles.cuh"
#include "torch_mpk/device/tasks/quantized_weights.cuh"
#include "torch_mpk/device/tasks/widened_weights.cuh"

namespace mpk::linear {

template <class V, class C>
concept QuantizedTilesVariant =
    TilesVariant<V, C> && QuantizedSizes<V> && HasScales<V> && sizeof(typename V::T) == 2 && V::kXScaleColumns == 0;

// Constants derived from a variant.
template <class V>
struct QuantizedTilesShape : TilesShape<V> {
  using TilesShape<V>::kBlocks, TilesShape<V>::kXBytes;
  static constexpr int kRowBytes = kBoxColumns * V::kWeightBits / 8;  // of a row of weights in a block
  static constexpr int kPartBytes = V::kTileRows * kRowBytes, kWeightBytes = V::kParts * kPartBytes;
  static constexpr int kEntryBytes = kBlocks * (kXBytes + kWeightBytes);
  // A slice of columns is multiplied while the next one is converted.
  static constexpr int kSlice = 32, kSteps = kSlice / 16, kSlices = kBoxColumns / kSlice;
  static constexpr int kSliceQuads = kSlice * V::kWeightBits / 8 / 16;
  // The rows of x that a worker finishes, and a thread's sums of them.
  static constexpr int kShare = V::kXRows / V::kSplit, kShareSums = kShare / 2;
  static constexpr int kSumParts = 1, kPartSums = V::kXRows / 2;
  // A warp's rows of each part's weight; the rows of x of a strip, and those that make 32 results of it.
  static constexpr int kWarpColumns = V::kTileRows / kConsumerWarps;
  static constexpr int kStrip = strip_of(kShare, 32), kRowsAtOnce = 32 / kWarpColumns;
  static_assert(V::kTileRows % kConsumerWarps == 0 && V::kParts * kWarpColumns <= kWarpRows);
  static_assert(V::kXRows % (8 * V::kSplit) == 0 && kStrip % kRowsAtOnce == 0 &&
                kStrip * kSumPitch * int(sizeof(float)) <= kStripBytes);
  static_assert(V::kSize % V::kChunkSize == 0 && V::kChunkSize % kBoxColumns == 0);
  static_assert(V::kScalesByRow || V::kScaleColumns % kBoxColumns == 0 || V::kScaleColumns >= V::kSize);

  MPK_DEVICE static void load_weights(uint8_t* to, const void* map, int row, int block, uint64_t* full, uint64_t hint) {
    ptx::rows_load(to, map, row, block * (kRowBytes / 2), full, hint);
  }
};

// ---- the loader's part

template <class V, class L>
MPK_DEVICE void load_quantized_tiles(L& l, const Job& job) {
  load_tiles_by<V, QuantizedTilesShape<V>>(l, job);
}

// ---- the consumers' part

// A lane's two rows of weights in a tile: which weight's they are, their numbers, and where they are in a block. The
// last row, or part, stands for missing ones.
template <class V>
struct TileWeightRows {
  using S = QuantizedTilesShape<V>;
  int which[2];
  uint32_t n[2];
  int offset[2];

  MPK_DEVICE TileWeightRows(const TilePlace<V>& place, int warp, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int number = lane / 4 + 8 * half, part = min(number / S::kWarpColumns, V::kParts - 1);
      const int row = warp * S::kWarpColumns + number % S::kWarpColumns;
      which[half] = V::kParts > 1 ? part : place.segment;
      n[half] = min(place.weight_row + row, V::num_rows(place.segment) - 1);
      offset[half] = part * S::kPartBytes + row * S::kRowBytes;
    }
  }
};

// The scales and zero points of a lane's rows in a group of blocks, which it loads long before they are needed.
template <class V, bool there = !V::kScalesByRow>
struct TileFactors {
  static constexpr uint32_t kAllGroups = (V::kSize + V::kScaleColumns - 1) / V::kScaleColumns, kAhead = 4;  // to L2
  static constexpr uint32_t kBlocks = V::kScaleColumns < V::kSize ? V::kScaleColumns / kBoxColumns : ~0u;  // of a group
  GivenScale<V> given[2];

  // If the block begins a group, or is the worker's first.
  MPK_DEVICE void load(const Job& job, const TileWeightRows<V>& rows, uint32_t block, bool is_first = false) {
    const uint32_t group = block / kBlocks;
    if ((block % kBlocks != 0 && !is_first) || group >= kAllGroups) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      given[half] = load_given_scale<V>(job, rows.which[half], rows.n[half], group);
      if (group + kAhead < kAllGroups) fetch_block_scale<V>(job, rows.which[half], rows.n[half], group + kAhead);
    }
  }
  MPK_DEVICE void find(const TileWeightRows<V>& rows, PairFactors (&factors)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; half++)
      factors[half] = factors_of<V>(pack_factors<V>(given[half], rows.which[half], rows.n[half]));
  }
};
// Where rows have one scale each, sums take it, see RowScales.
template <class V>
struct TileFactors<V, false> {
  MPK_DEVICE void load(const Job&, const TileWeightRows<V>&, uint32_t, bool = false) {}
  MPK_DEVICE void find(const TileWeightRows<V>&, PairFactors (&factors)[2]) const {
    factors[0] = factors[1] = unscaled_factors<V>();
  }
};

// 32 columns of a lane's two rows, as they are stored.
template <class V>
struct StoredSlice {
  using S = QuantizedTilesShape<V>;
  uint4 rows[2][S::kSliceQuads];

  MPK_DEVICE void load(const uint8_t* block, const TileWeightRows<V>& of, int slice) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int q = 0; q < S::kSliceQuads; q++)
        rows[half][q] = *reinterpret_cast<const uint4*>(block + of.offset[half] + (slice * S::kSliceQuads + q) * 16);
  }
  // In the order of products' first factor.
  MPK_DEVICE void convert(ptx::Quad (&weights)[S::kSteps], const PairFactors (&factors)[2], int lane) const {
#pragma unroll
    for (int k = 0; k < S::kSteps; k++)
#pragma unroll
      for (int m = 0; m < 4; m++) weights[k].v[m] = apply_factors<V>(widen_pair(k, m / 2, m % 2, lane), factors[m % 2]);
  }

 private:
  // Eight columns are a word of 4 bits, of whose bytes a lane takes one; of 8 bits two, of whose bytes it takes two.
  MPK_DEVICE uint32_t widen_pair(int step, int eight, int half, int lane) const {
    const int pair = lane % 4, number = step * 2 + eight;
    if constexpr (V::kWeightBits == 4) {
      return widen<V>(ptx::choose_bytes(word(half, number), 0, 0x4440 + pair));
    } else {
      const uint32_t low = word(half, 2 * number), high = word(half, 2 * number + 1);
      return V::kIsE4M3 ? widen<V>(ptx::choose_bytes(low, high, 0x10 + pair * 0x22))
                        : widen_bytes<V>(ptx::choose_bytes(low, high, 0x1100 + pair * 0x2222));
    }
  }
  MPK_DEVICE uint32_t word(int half, int number) const {
    const uint4& quad = rows[half][number / 4];
    return number % 4 == 0 ? quad.x : number % 4 == 1 ? quad.y : number % 4 == 2 ? quad.z : quad.w;
  }
};

// Sums a tile's part of the columns, from ring entry c.entry on. A warp whose wait aborts goes on, see sum_part.
template <class V, class C>
MPK_DEVICE void sum_converted(C& c, const Job& job, const TilePlace<V>& place, uint32_t part,
                              WarpgroupSums<V::kXRows>& sums) {
  using S = QuantizedTilesShape<V>;
  const uint32_t first = part * S::kPartChunks * S::kBlocks;
  const TileWeightRows<V> rows(place, c.warp, c.lane);
  TileFactors<V> factors;  // of the next block
  factors.load(job, rows, first, true);
  ptx::Quad weights[2][S::kSteps] = {};
  // Others multiply nothing. The branch also keeps slices one after the other in registers.
  const bool has_rows = place.weight_row + c.warp * S::kWarpColumns < V::num_rows(place.segment);
#pragma unroll 1
  for (uint32_t chunk = 0; chunk < S::kPartChunks; chunk++) {
    const uint32_t entry = c.entry + chunk;
    if (!c.failed && !c.ring.has(entry)) {
      ptx::await_sums(sums);  // a call may use registers that products in flight read or write
      c.failed = !c.ring.wait_longer(entry, c.phase);
    }
    const uint8_t* slot = c.ring.slot(entry);
#pragma unroll 1
    for (int b = 0; b < S::kBlocks; b++) {
      const uint8_t* block = slot + S::kBlocks * S::kXBytes + b * S::kWeightBytes;
      const ptx::SwizzledMatrix x = ptx::swizzled(slot + b * S::kXBytes);
      PairFactors of_block[2];
      factors.find(rows, of_block);
      factors.load(job, rows, first + chunk * S::kBlocks + b + 1);
#pragma unroll
      for (int slice = 0; slice < S::kSlices; slice++) {
        StoredSlice<V> stored;
        stored.load(block, rows, slice);
        ptx::await_products<1>();  // those that read the same registers
        if (slice == 1 && b == 0 && chunk > 0) c.ring.release_share(entry - 1);
        if (has_rows) stored.convert(weights[slice % 2], of_block, c.lane);
        ptx::begin_products();
#pragma unroll
        for (int k = 0; k < S::kSteps; k++)
          ptx::multiply_registers<typename V::T, V::kXRows>(sums, weights[slice % 2][k],
                                                            ptx::from_element(x, 0, slice * S::kSlice + 16 * k));
        ptx::commit_products();
      }
    }
  }
  ptx::await_sums(sums);
  c.ring.release_share(c.entry + S::kPartChunks - 1);
  c.entry += S::kPartChunks;
}

// The operands of a lane's results of a strip besides their sums; the strip begins at row `first` of x.
template <class V, class C>
struct TransposedStrip {
  using S = QuantizedTilesShape<V>;
  static constexpr int kRows = S::kStrip / S::kRowsAtOnce;  // of a lane
  uint32_t n;
  int first_row;
  bool is_there;
  typename V::Extra extras[kRows] = {};

  MPK_DEVICE TransposedStrip(const C& c, const Job& job, const TilePlace<V>& place, int first)
      : n(place.weight_row + c.warp * S::kWarpColumns + c.lane % S::kWarpColumns),
        first_row(first + c.lane / S::kWarpColumns),
        is_there(n < V::num_rows(place.segment)) {
    if constexpr (V::kHasExtra) {
#pragma unroll
      for (int i = 0; i < kRows; i++)
        if (has(i)) extras[i] = V::preload(job, place.segment, row(i), n);
    }
  }
  MPK_DEVICE int row(int i) const { return first_row + i * S::kRowsAtOnce; }
  MPK_DEVICE bool has(int i) const { return is_there && row(i) < V::kBatch; }

  // Segments, and strips whose results all exist, have loops of their own, see Strip.
  MPK_DEVICE void finish(C& c, const Job& job, int segment, const float* strip,
                         const typename V::Common& common) const {
#pragma unroll
    for (int s = 0; s < V::kSegments; s++) {
      if (s != segment) continue;
      if ((V::kBatch % S::kStrip == 0 && V::num_rows(s) % V::kTileRows == 0) ||
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
    const float* mine = strip + c.lane / S::kWarpColumns * kSumPitch + c.lane % S::kWarpColumns;
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      if (!all && !has(i)) break;
      float results[V::kParts];
#pragma unroll
      for (int p = 0; p < V::kParts; p++) results[p] = mine[i * S::kRowsAtOnce * kSumPitch + p * S::kWarpColumns];
      V::finish(c, job, segment, row(i), n, results, extras[i], common);
    }
  }
};

// Factors of the sums of a lane's two rows of weights.
template <class V>
struct RowScales {
  float of[2] = {1, 1};

  MPK_DEVICE RowScales(const Job& job, const TilePlace<V>& place, int warp, int lane) {
    if constexpr (V::kScalesByRow) {
      const TileWeightRows<V> rows(place, warp, lane);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int which = rows.which[half];
        of[half] = to_float(V::scale(job, which)[rows.n[half] / V::scale_rows(which) * V::scale_pitch(which)]);
      }
    }
  }
};

// A warp's sums of its worker's share of a tile.
template <class V>
using TransposedSums = SumsOfShare<QuantizedTilesShape<V>>;

// Writes the sums of the next rows of x, [row of x][row of weights], and frees their registers.
template <class V>
MPK_DEVICE void show_transposed(TransposedSums<V>& sums, const RowScales<V>& scales, float* strip, int lane) {
  constexpr int kStrip = QuantizedTilesShape<V>::kStrip, kShown = kStrip / 2, kAll = QuantizedTilesShape<V>::kShareSums;
  float* mine = strip + lane % 4 * 2 * kSumPitch + lane / 4;
#pragma unroll
  for (int j = 0; j < kStrip / 8; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) mine[(8 * j + i % 2) * kSumPitch + i / 2 * 8] = sums[4 * j + i] * scales.of[i / 2];
#pragma unroll
  for (int i = 0; i < kAll - kShown; i++) sums[i] = sums[kShown + i];
}

// Finishes a worker's share of a tile, which begins at row `begin` of x. `next`: the first strip.
template <class V, class C>
MPK_DEVICE void finish_transposed(C& c, const Job& job, const TilePlace<V>& place, int begin,
                                  TransposedStrip<V, C> next, TransposedSums<V>& sums,
                                  const typename V::Common& common) {
  using S = QuantizedTilesShape<V>;
  float* strip = reinterpret_cast<float*>(c.staged() + c.warp * kStripBytes);
  const int end = min(begin + S::kShare, V::kBatch);
  const RowScales<V> scales(job, place, c.warp, c.lane);
#pragma unroll 1
  for (int first = begin; first < end; first += S::kStrip) {
    const TransposedStrip<V, C> current = next;
    if (first + S::kStrip < end) next = TransposedStrip<V, C>(c, job, place, first + S::kStrip);
    show_transposed<V>(sums, scales, strip, c.lane);
    __syncwarp();
    current.finish(c, job, place.segment, strip, common);
    __syncwarp();
  }
}

template <class V, class C>
MPK_DEVICE void compute_quantized_tiles(C& c, const Job& job) {
  static_assert(QuantizedTilesVariant<V, C>);
  using S = QuantizedTilesShape<V>;
  static_assert(S::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  if (!c.await()) return;
  const typename V::Common common = V::common(job);
#pragma unroll 1
  for (uint32_t unit = c.worker(job); unit < S::kUnits; unit += C::Config::kNumWorkers) {
    const uint32_t tile = unit / V::kSplit, part = unit - tile * V::kSplit;
    const TilePlace<V> place(tile);
    WarpgroupSums<V::kXRows> sums = {};
    sum_converted<V>(c, job, place, part, sums);
    if (c.failed) continue;  // the other warps of its warpgroup go on
    const int begin = place.x_row + part * S::kShare;
    if constexpr (V::kSplit > 1) {
      TransposedSums<V> mine = {};
      const Partials<V, C, S> partials(c, job, tile, part);
      partials.send(sums, mine);
      const TransposedStrip<V, C> strip(c, job, place, begin);
      partials.add(mine);
      if (!c.failed) finish_transposed<V>(c, job, place, begin, strip, mine, common);
    } else {
      finish_transposed<V>(c, job, place, begin, TransposedStrip<V, C>(c, job, place, begin), sums, common);
    }
  }
}

}  // namespace mpk::linear
