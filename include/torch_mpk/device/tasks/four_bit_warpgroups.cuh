// ordered_linear: linears of 4-bit weights with 9 to 64 rows of x, by warpgroups. As in quantized_warpgroups.cuh
// weights become numbers of x's type in registers. But here a lane takes a word of eight columns at a time, and numbers
// are multiplied before they have scales or zero points: one instruction makes two of a word, above a power of two
// (FourBits). The sums of columns that share a scale go to other registers, times that scale. What their weights are
// above is taken from them then, and zero points are added, times the sums of these columns of x.
//
// Columns of x stand in the order in which lanes have weights, see order_columns, which has also made the sums. The
// copy engine brings those of a stage beside it.
#pragma once

#include "torch_mpk/device/tasks/quantized_warpgroups.cuh"

namespace mpk::linear {

template <class V, class C>
concept FourBitWarpgroupsVariant = QuantizedWarpgroupsVariant<V, C> && V::kWeightBits == 4 && requires(const Job& job) {
  { V::x_sums(job) } -> Same<const float*>;  // [block of columns][row of x]
};

// Adds a group's products to the sums of its box. `x`: the sums of its columns, from the lane's first row on.
template <int columns>
MPK_DEVICE void add_group(WarpgroupSums<columns>& sums, const WarpgroupSums<columns>& products, const float* x,
                          const SumFactors (&factors)[2]) {
#pragma unroll
  for (int j = 0; j < columns / 8; j++) {
    const float2 of_x = *reinterpret_cast<const float2*>(x + 8 * j);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const SumFactors& f = factors[i / 2];
      const float offset = fmaf(i % 2 == 0 ? of_x.x : of_x.y, f.offset, sums[4 * j + i]);
      sums[4 * j + i] = fmaf(products[4 * j + i], f.scale, offset);
    }
  }
}

// A lane's words of 32 columns, of its upper and its lower row.
struct WordPair {
  uint32_t rows[2];

  // `line`: the lane's first word of its upper row, whose 16 bytes are in the copy engine's swizzle. Rows behind a
  // box's last are what stands in the slot, and their products go nowhere.
  MPK_DEVICE void load(ptx::SharedAddress line, int slice) {
#pragma unroll
    for (int i = 0; i < 2; i++) rows[i] = ptx::load_shared_32((line ^ slice * 16) + i * 8 * 128);
  }
  // As first factors of two products.
  template <class V>
  MPK_DEVICE void convert(ptx::Quad (&weights)[2]) const {
    uint32_t upper[4], lower[4];
    FourBits<typename V::T>::template widen<V>(rows[0], upper);
    FourBits<typename V::T>::template widen<V>(rows[1], lower);
#pragma unroll
    for (int k = 0; k < 2; k++) weights[k] = {upper[2 * k], lower[2 * k], upper[2 * k + 1], lower[2 * k + 1]};
  }
};

// A warpgroup's mainloop. A slice is multiplied while the next one is converted, and a group is added while the next
// one is multiplied.
template <class V, class C>
MPK_DEVICE void multiply_words(C& c, const Job& job, Span pass, HeldSums<V>& sums, const uint8_t* stages) {
  using S = RowsShape<V>;
  using Q = ConvertedShape<V>;
  constexpr int kGroupSlices = Q::kGroup / Q::kSlice;
  static_assert(Q::kGroup == sum_columns<V>() && kGroupSlices > 1);
  const OwnLines<V> own(pass, c.warp);
  const uint32_t first = c.worker(job) % V::kSplit * S::kChunks, warp = c.warp % kWarpgroupWarps;
  LineFactors<V> factors;  // of the next line
  ptx::Quad weights[2][2] = {};
  WarpgroupSums<V::kXRows> products[2] = {};
  const auto load = [&](int h, uint32_t chunk, int) {
    if (own.box(h) < own.boxes && chunk < S::kChunks)
      factors.load(job, WarpRows::of<V>(pass, own.box(h), warp), first + chunk, c.lane);
  };
  own.template each<0, 1>(c, products, stages, load, [&](const OwnLine(&lines)[1], const uint8_t* x, auto load_next) {
    const auto [h, i, chunk, entry] = lines[0];
    const ptx::SharedAddress line =
        ptx::smem_addr(c.ring.slot(entry)) + (warp * kWarpRows + c.lane / 4) * 128 + c.lane / 4 * 16 + c.lane % 4 * 4;
    const ptx::SwizzledMatrix columns = ptx::swizzled(x + i * (Q::kLine / kBoxColumns) * S::kBlockPitch);
    const float* x_sums =
        sums_of_stage<V>(stages, static_cast<uint32_t>(x - stages)) + i * Q::kGroups * V::kXRows + c.lane % 4 * 2;
    WordPair words[2];
    words[0].load(line, 0);
    const auto of_line = factors.words(WarpRows::of<V>(pass, own.box(h), warp), first + chunk, c.lane);
    load_next();
    const auto add = [&](int group) {
      ptx::hold_sums(products[group % 2]);
      const SumFactors of_group[2] = {of_line.of_sums(group, 0, c.lane), of_line.of_sums(group, 1, c.lane)};
      add_group<V::kXRows>(sums[h], products[group % 2], x_sums + group * V::kXRows, of_group);
    };
#pragma unroll
    for (int slice = 0; slice < Q::kSlices; slice++) {
      const int group = slice / kGroupSlices, of_group = slice % kGroupSlices;
      if (slice + 1 < Q::kSlices)
        words[(slice + 1) % 2].load(line, slice + 1);
      else
        c.ring.release_share(entry);
      ptx::await_products<1>();  // those that read the same registers
      words[slice % 2].template convert<V>(weights[slice % 2]);
      const int column = slice * Q::kSlice;
      ptx::begin_products();
#pragma unroll
      for (int k = 0; k < Q::kSteps; k++) {
        const auto of_x = ptx::from_element(columns, column / kBoxColumns * V::kXRows, column % kBoxColumns + 16 * k);
        if (of_group == 0 && k == 0)
          ptx::multiply_registers<typename V::T, V::kXRows, false>(products[group % 2], weights[slice % 2][k], of_x);
        else
          ptx::multiply_registers<typename V::T, V::kXRows>(products[group % 2], weights[slice % 2][k], of_x);
      }
      ptx::commit_products();
      if (group > 0 && of_group == 1) add(group - 1);  // whose last product has been awaited
    }
    ptx::await_products<0>();
    add(Q::kGroups - 1);
  });
}

template <class V, class C>
MPK_DEVICE void compute_four_bit_warpgroups(C& c, const Job& job) {
  static_assert(FourBitWarpgroupsVariant<V, C>);
  compute_by_warpgroups<V, false>(
      c, job, [&](Span tiles) { LineFactors<V>::fetch(job, tiles, c.rank); },
      [&](uint8_t* stages) { return load_boxes<V>(c, job, stages); },
      [&](Span pass, HeldSums<V>& sums, const uint8_t* stages) { multiply_words<V>(c, job, pass, sums, stages); });
}

}  // namespace mpk::linear
