// e4m3_linear with many rows of x, by warpgroups: tiles as in linear_tiles.cuh, of e4m3 numbers, 128 columns to a
// block.
//
// Tensor cores add e4m3 products up with fewer bits than fp32 has, and scales change from one 128 columns to the next.
// So the sums of each block go to other registers, times the scales of its columns. While one warpgroup does that, the
// other multiplies.
#pragma once

#include "torch_mpk/device/quantized.cuh"
#include "torch_mpk/device/tasks/linear_tiles.cuh"

namespace mpk::linear {

template <class V, class C>
concept E4M3Variant = TilesVariant<V, C> && requires(const Job& job, int i) {
  requires Constants<int, V::kElementBytes, V::kXScaleColumns, V::kScaleColumns, V::kXScalePitch, V::kXScaleStep>;
  requires Constants<bool, V::kScalesByRow>;  // of weights: each row, or several, have one scale for all columns
  { V::x_scales(job) } -> Same<const float*>;
  { V::scale(job, i) } -> Same<const typename V::Scale*>;  // of segment or part i
  { V::scale_rows(i) } -> Same<uint32_t>;
  { V::scale_pitch(i) } -> Same<int64_t>;  // to the next rows
  { V::scale_column_pitch(i) } -> Same<int64_t>;
};

// The scales of a thread's sums: of its two rows of x, and of each part's rows of weights.
template <class V>
struct E4M3Scales {
  static constexpr int kStep = kBoxRowBytes;  // columns of a block
  static constexpr bool kChangesX = V::kXScaleColumns < V::kSize, kChangesWeights = !V::kScalesByRow;
  static_assert(!kChangesX || V::kXScaleColumns == kStep);
  static_assert(!kChangesWeights || V::kScaleColumns % kStep == 0 || V::kScaleColumns >= V::kSize);
  struct Factors {
    float x[2], weights[V::kParts];
  };
  const float* x[2];
  const typename V::Scale* weights[V::kParts];

  MPK_DEVICE E4M3Scales(const Job& job, const TilePlace<V>& place, int row) {
#pragma unroll
    for (int i = 0; i < 2; i++)
      x[i] = V::x_scales(job) + int64_t(min(place.x_row + row + 8 * i, uint32_t(V::kBatch - 1))) * V::kXScalePitch;
#pragma unroll
    for (int p = 0; p < V::kParts; p++) {
      const int which = V::kParts > 1 ? p : place.segment;
      weights[p] = V::scale(job, which) + place.weight_row / V::scale_rows(which) * V::scale_pitch(which);
    }
  }
  // Of a block; those that are the same for all are factors of the result.
  MPK_DEVICE Factors at(int block, int segment) const {
    Factors f;
#pragma unroll
    for (int i = 0; i < 2; i++) f.x[i] = kChangesX ? x[i][block * V::kXScaleStep] : 1;
#pragma unroll
    for (int p = 0; p < V::kParts; p++) {
      const int column = block * kStep / V::kScaleColumns;
      f.weights[p] =
          kChangesWeights ? to_float(weights[p][column * V::scale_column_pitch(V::kParts > 1 ? p : segment)]) : 1;
    }
    return f;
  }
};

// The number of a thread's sum in its part, times two columns of it; see WarpgroupSums.
template <class V, class F>
MPK_DEVICE void for_sums(F f) {
  constexpr int kOfPart = V::kTileRows / 2;
#pragma unroll
  for (int p = 0; p < V::kParts; p++)
#pragma unroll
    for (int i = 0; i < kOfPart; i++) f(p, i, p * kOfPart + i);
}

// Applies the scales that belong to all columns.
template <class V>
MPK_DEVICE void finish_e4m3_sums(const Job& job, const TilePlace<V>& place, const E4M3Scales<V>& scales, int lane,
                                 WarpgroupSums<TilesShape<V>::kColumns>& sums) {
  using Scales = E4M3Scales<V>;
  const float of_x[] = {Scales::kChangesX ? 1 : *scales.x[0], Scales::kChangesX ? 1 : *scales.x[1]};
  for_sums<V>([&](int p, int i, int sum) {
    float factor = of_x[i / 2 % 2];
    if constexpr (!Scales::kChangesWeights) {
      const int which = V::kParts > 1 ? p : place.segment;
      const uint32_t n = place.weight_row + i / 4 * 8 + lane % 4 * 2 + i % 2;
      factor *= to_float(
          V::scale(job, which)[min(n, V::num_rows(place.segment) - 1) / V::scale_rows(which) * V::scale_pitch(which)]);
    }
    sums[sum] *= factor;
  });
}

// Sums a part of a tile, see sum_part.
template <class V, class C>
MPK_DEVICE void sum_e4m3_part(C& c, const Job& job, const TilePlace<V>& place, uint32_t part,
                              WarpgroupSums<TilesShape<V>::kColumns>& sums) {
  using S = TilesShape<V>;
  using Scales = E4M3Scales<V>;
  const int x_offset = rows_of_warpgroup<V>(c.warp);
  const Scales scales(job, place, c.warp * kWarpRows + c.lane / 4);
  const int first = part * S::kPartChunks * S::kBlocks;
  constexpr int kAllBlocks = V::kSize / Scales::kStep;
  typename Scales::Factors next = scales.at(first, place.segment);
  WarpgroupSums<S::kColumns> products = {};
#pragma unroll 1
  for (uint32_t chunk = 0; chunk < S::kPartChunks; chunk++) {
    const uint32_t entry = c.entry + chunk;
    if (!c.failed && !c.ring.wait(entry, c.phase)) c.failed = true;
    const uint8_t* slot = c.ring.slot(entry);
#pragma unroll
    for (int b = 0; b < S::kBlocks; b++) {
      const typename Scales::Factors factors = next;
      ptx::hold_sums(products);
      ptx::begin_products();
      multiply_byte_blocks<S::kColumns>(products, slot + b * S::kXBytes + x_offset,
                                        slot + S::kBlocks * S::kXBytes + b * S::kWeightBytes);
      ptx::commit_products();
      const int number = first + chunk * S::kBlocks + b;
      next = scales.at(min(number + 1, kAllBlocks - 1), place.segment);
      ptx::await_sums(products);
      if (b + 1 == S::kBlocks) c.ring.release_share(entry);
      // Columns past the last are zero, if the last entry has fewer blocks, but those of weights may have no scale.
      if (V::kSize % V::kChunkSize != 0 && number >= kAllBlocks) continue;
      for_sums<V>([&](int p, int i, int sum) {
        sums[sum] = fmaf(products[sum], factors.x[i / 2 % 2] * factors.weights[p], sums[sum]);
      });
    }
  }
  c.entry += S::kPartChunks;
  if constexpr (!Scales::kChangesX || !Scales::kChangesWeights) finish_e4m3_sums<V>(job, place, scales, c.lane, sums);
}

template <class V, class C>
MPK_DEVICE void compute_e4m3_tiles(C& c, const Job& job) {
  static_assert(E4M3Variant<V, C>);
  using Sums = WarpgroupSums<TilesShape<V>::kColumns>;
  compute_tiles_by<V>(c, job, [&](const TilePlace<V>& place, uint32_t part, Sums& sums) {
    sum_e4m3_part<V>(c, job, place, part, sums);
  });
}

}  // namespace mpk::linear
