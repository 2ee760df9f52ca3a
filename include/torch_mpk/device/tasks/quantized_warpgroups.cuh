// quantized_linear with many rows of x, by warpgroups: rows of weights are the first factor of the products, which
// tensor cores take from registers, and rows of x the second, in boxes of shared memory as in linear_rows.cuh. So
// weights become numbers of x's type in registers, on their way from the ring, and nothing of x is converted.
//
// An entry of the ring is a line: 128 bytes of each of V::kBoxRows rows of weights. A lane loads the two neighbours
// that it multiplies, one byte of 4-bit weights, and leaves the ring early. Numbers take scales and zero points before
// they are multiplied, and are rounded as the matrices of dequantise.cuh are. With few rows of x, weights of 4 bits
// have a loop of their own, see four_bit_warpgroups.cuh.
#pragma once

#include "torch_mpk/device/tasks/linear_warpgroups.cuh"
#include "torch_mpk/device/tasks/widened_weights.cuh"

namespace mpk::linear {

template <class V, class C>
concept QuantizedWarpgroupsVariant = WarpgroupsVariant<V, C> && QuantizedSizes<V> && HasScales<V> &&
                                     sizeof(typename V::T) == 2 && V::kXScaleColumns == 0;

template <class V>
struct ConvertedShape {
  // The columns of a line, and those that are in registers together, twice: one slice is multiplied while the next one
  // is converted.
  static constexpr int kLine = V::kChunkSize, kSlice = 32, kSteps = kSlice / 16, kSlices = kLine / kSlice;
  static_assert(kLine == 128 * 8 / V::kWeightBits);
  // Columns that share a scale, of those of a line.
  static constexpr int kGroup = V::kScaleColumns > 0 && V::kScaleColumns < kLine ? V::kScaleColumns : kLine;
  static constexpr int kGroups = kLine / kGroup;
  static_assert(kGroup % kSlice == 0 && kBoxColumns % kSlice == 0);
};

// Loads two neighbouring weights.
template <class V>
MPK_DEVICE uint32_t load_pair(ptx::SharedAddress from) {
  if constexpr (V::kWeightBits == 4) {
    return ptx::load_shared_8(from);
  } else {
    return ptx::load_shared_16(from);
  }
}

// The scales and zero points of a warp's 16 rows of a line, group after group. A lane loads some of them, long before
// they are needed, and lanes exchange them then.
template <class V, bool there = !V::kScalesByRow>
struct LineFactors {
  using Q = ConvertedShape<V>;
  static constexpr int kCount = Q::kGroups * kWarpRows, kOfLane = (kCount + 31) / 32;
  GivenScale<V> given[kOfLane];

  // Calls `use` with the places of those of a lane: row and column of the weight's scales, and the number.
  template <class Use>
  MPK_DEVICE static void find_places(const WarpRows& rows, uint32_t line, int lane, Use use) {
#pragma unroll
    for (int i = 0; i < kOfLane; i++) {
      const int number = min(lane + 32 * i, kCount - 1);
      use(min(rows.first + number % kWarpRows, rows.last), line * Q::kLine / V::kScaleColumns + number / kWarpRows, i);
    }
  }
  MPK_DEVICE void load(const Job& job, const WarpRows& rows, uint32_t line, int lane) {
    find_places(rows, line, lane, [&](uint32_t n, uint32_t column, int i) {
      given[i] = load_given_scale<V>(job, rows.which, n, column);
    });
  }

  struct Words {
    uint32_t words[kOfLane];  // see pack_factors
    // For half `i` of the rows, of which a lane has one.
    MPK_DEVICE uint32_t word(int group, int i, int lane) const {
      const int number = group * kWarpRows + 8 * i;
      return __shfl_sync(~0u, words[number / 32], number % 32 + lane / 4);
    }
    MPK_DEVICE PairFactors find(int group, int i, int lane) const { return factors_of<V>(word(group, i, lane)); }
    MPK_DEVICE SumFactors of_sums(int group, int i, int lane) const { return sum_factors_of<V>(word(group, i, lane)); }
  };
  MPK_DEVICE Words words(const WarpRows& rows, uint32_t line, int lane) const {
    Words packed;
    find_places(rows, line, lane,
                [&](uint32_t n, uint32_t, int i) { packed.words[i] = pack_factors<V>(given[i], rows.which, n); });
    return packed;
  }

  // To L2, before anything is awaited: eight at a time, whichever way they are neighbours.
  MPK_DEVICE static void fetch(const Job& job, Span tiles, int rank) {
    constexpr uint32_t kColumns = (V::kSize + V::kScaleColumns - 1) / V::kScaleColumns;
    const uint32_t row_step = V::scale_pitch(0) == 1 ? 8 : 1, column_step = V::scale_column_pitch(0) == 1 ? 8 : 1;
    const uint32_t rows = V::kBoxRows / row_step, columns = (kColumns + column_step - 1) / column_step;
    const uint32_t count = (tiles.end - tiles.begin) * V::kParts * rows * columns;
#pragma unroll 1
    for (uint32_t number = rank; number < count; number += kConsumerThreads) {
      const uint32_t at = number / columns, part = at / rows;
      const WarpRows box = WarpRows::of_part<V>(tiles.begin + part / V::kParts, part % V::kParts, 0);
      fetch_block_scale<V>(job, box.which, min(box.first + at % rows * row_step, box.last),
                           number % columns * column_step);
    }
  }
};
// Where V::finish applies them.
template <class V>
struct LineFactors<V, false> {
  struct Words {
    MPK_DEVICE PairFactors find(int, int, int) const { return unscaled_factors<V>(); }
    MPK_DEVICE SumFactors of_sums(int, int, int) const { return {1, -above<V>()}; }
  };
  MPK_DEVICE void load(const Job&, const WarpRows&, uint32_t, int) {}
  MPK_DEVICE Words words(const WarpRows&, uint32_t, int) const { return {}; }
  MPK_DEVICE static void fetch(const Job&, Span, int) {}
};

// A slice of a warp's 16 rows of a line: a lane's pairs of weights, as they lie, in the order of products' first
// factor.
template <class V>
struct Slice {
  using Q = ConvertedShape<V>;
  uint32_t pairs[Q::kSteps][4];

  // `line`: the lane's first weights of its upper row. 16 bytes of a row are in the copy engine's swizzle. Rows behind
  // a box's last are what stands in the slot, and their products go nowhere.
  MPK_DEVICE void load(ptx::SharedAddress line, int slice) {
#pragma unroll
    for (int k = 0; k < Q::kSteps; k++)
#pragma unroll
      for (int m = 0; m < 4; m++) {
        const int byte = (slice * Q::kSlice + k * 16 + m / 2 * 8) * V::kWeightBits / 8;
        pairs[k][m] = load_pair<V>((line ^ byte / 16 * 16) + byte % 16 + m % 2 * 8 * 128);
      }
  }
  MPK_DEVICE void convert(ptx::Quad (&weights)[Q::kSteps], const PairFactors (&factors)[2]) const {
#pragma unroll
    for (int k = 0; k < Q::kSteps; k++)
#pragma unroll
      for (int m = 0; m < 4; m++) weights[k].v[m] = apply_factors<V>(widen<V>(pairs[k][m]), factors[m % 2]);
  }
};

// A warpgroup's mainloop. A slice is multiplied while the next one is converted, and the one behind that is loaded.
template <class V, class C>
MPK_DEVICE void multiply_converted(C& c, const Job& job, Span pass, HeldSums<V>& sums, const uint8_t* stages) {
  using S = RowsShape<V>;
  using Q = ConvertedShape<V>;
  const OwnLines<V> own(pass, c.warp);
  const uint32_t first = c.worker(job) % V::kSplit * S::kChunks, warp = c.warp % kWarpgroupWarps;
  constexpr bool kAhead = V::kXRows <= 32;  // else there are no registers for it
  // Others multiply nothing, beside the first. The branch also keeps slices one after the other in registers.
  const bool has_rows = warp < S::kBlocksOfBox;
  LineFactors<V> factors;  // of the next line
  ptx::Quad weights[2][Q::kSteps] = {};
  const auto load = [&](int h, uint32_t chunk, int) {
    if (own.box(h) < own.boxes && chunk < S::kChunks)
      factors.load(job, WarpRows::of<V>(pass, own.box(h), warp), first + chunk, c.lane);
  };
  own.template each<0, 1>(c, sums, stages, load, [&](const OwnLine(&lines)[1], const uint8_t* x, auto load_next) {
    const auto [h, i, chunk, entry] = lines[0];
    const ptx::SharedAddress line = ptx::smem_addr(c.ring.slot(entry)) + (warp * kWarpRows + c.lane / 4) * 128 +
                                    c.lane / 4 * 16 + c.lane % 4 * (V::kWeightBits / 4);
    const ptx::SwizzledMatrix columns = ptx::swizzled(x + i * (Q::kLine / kBoxColumns) * S::kBlockPitch);
    Slice<V> slices[2];
    slices[0].load(line, 0);
    const auto words = factors.words(WarpRows::of<V>(pass, own.box(h), warp), first + chunk, c.lane);
    load_next();
    PairFactors of_group[2];
#pragma unroll
    for (int slice = 0; slice < Q::kSlices; slice++) {
      const int loaded = slice + (kAhead ? 1 : 0);
      if (loaded > 0 && loaded < Q::kSlices) slices[loaded % 2].load(line, loaded);
      if (slice + 1 == Q::kSlices) c.ring.release_share(entry);
      if (slice * Q::kSlice % Q::kGroup == 0)
#pragma unroll
        for (int half = 0; half < 2; half++) of_group[half] = words.find(slice * Q::kSlice / Q::kGroup, half, c.lane);
      ptx::await_products<1>();  // those that read the same registers
      if (has_rows) slices[slice % 2].convert(weights[slice % 2], of_group);
      const int column = slice * Q::kSlice;
      ptx::begin_products();
#pragma unroll
      for (int k = 0; k < Q::kSteps; k++)
        ptx::multiply_registers<typename V::T, V::kXRows>(
            sums[h], weights[slice % 2][k],
            ptx::from_element(columns, column / kBoxColumns * V::kXRows, column % kBoxColumns + 16 * k));
      ptx::commit_products();
    }
  });
}

template <class V, class C>
MPK_DEVICE void compute_quantized_warpgroups(C& c, const Job& job) {
  static_assert(QuantizedWarpgroupsVariant<V, C>);
  compute_by_warpgroups<V, false>(
      c, job, [&](Span tiles) { LineFactors<V>::fetch(job, tiles, c.rank); },
      [&](uint8_t* stages) { return load_boxes<V>(c, job, stages); },
      [&](Span pass, HeldSums<V>& sums, const uint8_t* stages) { multiply_converted<V>(c, job, pass, sums, stages); });
}

}  // namespace mpk::linear
