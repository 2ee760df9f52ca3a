// Experts' products with quantised weights. Which tiles there are, who has them, and how their boxes come is as for
// weights of 16 bits; what a warp does with a tile's boxes is as in quantized_rows.cuh. x is where it is: a warp
// converts the rows of a tile's pairs in registers, 128 columns at a time, as it multiplies them.
#pragma once

#include "torch_mpk/device/tasks/expert_sums.cuh"
#include "torch_mpk/device/tasks/quantized_rows.cuh"

namespace mpk::experts {

using linear::BlockScale;
using linear::kNoZero;

template <class V>
concept QuantizedExperts = linear::QuantizedSizes<V> && linear::HasScales<V>;

// ---- weights that stand anywhere

// The scale that x's columns from `first` on are divided by, over one block of it.
template <class V>
MPK_DEVICE float x_scale_at(const typename V::T* x, int first, int lane) {
  float most = 0;
  for (int k = first + lane; k < min(first + V::kXScaleColumns, V::kSize); k += 32)
    most = fmaxf(most, fabsf(to_float(x[k])));
  return e4m3_scale(warp_max(most));
}

// Multiplies a tile's rows, a byte at a time, with one pair.
template <class V>
MPK_DEVICE void multiply_pair(const Job& job, const Pairs<V>& pairs, int expert, int pair, uint32_t row, int lane) {
  const typename V::T* x = V::x(job) + pair / V::kChoices * V::kXRow + pair % V::kChoices * V::kXChoice;
  const auto row_of = [&](int i) { return min(first_weight_row<V>(row, i >= 8) + i % 8, uint32_t(V::kRows - 1)); };
  float totals[kTileRows] = {}, factor = 1;
#pragma unroll 1
  for (int first = 0; first < V::kSize; first += V::kRun) {
    if constexpr (V::kXScaleColumns > 0)
      if (first % V::kXScaleColumns == 0) factor = x_scale_at<V>(x, first, lane);
    float sums[kTileRows] = {}, sum_of_x = 0;
#pragma unroll 1
    for (int k = first + lane; k < min(first + V::kRun, V::kSize); k += 32) {
      float value = to_float(x[k]);
      if constexpr (V::kXScaleColumns > 0) value = round_e4m3(value / factor);
      sum_of_x += value;
      const uint8_t* weight = V::weight(job) + expert * V::kExpertPitch + k * V::kWeightBits / 8;
#pragma unroll
      for (int i = 0; i < kTileRows; i++)
        sums[i] = fmaf(linear::weight_of<V>(weight[row_of(i) * V::kRowPitch], k), value, sums[i]);
    }
#pragma unroll
    for (int i = 0; i < kTileRows; i++) {
      const BlockScale<V> block = linear::load_block_scale<V>(job, expert, row_of(i), first / V::kScaleColumns);
      sums[i] *= to_float(block.scale);
      if constexpr (V::kZero != kNoZero) sums[i] = fmaf(sum_of_x, block.offset(), sums[i]);
      totals[i] = fmaf(sums[i], factor, totals[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kTileRows; i++) totals[i] = warp_sum(totals[i]);
  constexpr int kStep = Interleaved<V> ? 2 : 1, kApart = Interleaved<V> ? 1 : 8;
#pragma unroll
  for (int i = 0; i < kTileRows / 2; i++)
    if (lane == i)
      pairs.store(job, pair, row, i, cast<typename V::T>(totals[i * kStep]),
                  cast<typename V::T>(totals[i * kStep + kApart]));
}

// As compute_rows, with any number of pairs.
template <class V, class C>
MPK_DEVICE void compute_direct(C& c, const Job& job) {
  static_assert(QuantizedExperts<V>);
  if (!c.await()) return;
  clear_others<V>(c, job);
  const Chosen<V> chosen(V::ids(job), c.lane);
  const Span mine = tiles_of<V>(chosen, c.worker(job), C::Config::kNumWorkers);
  const Pairs<V> pairs{};
#pragma unroll 1
  for (uint32_t tile = mine.begin + c.warp; tile < mine.end; tile += kConsumerWarps) {
    const int expert = chosen[tile / kTilesOfExpert<V>];
#pragma unroll 1
    for (int first = 0; first < V::kPairs; first += 32) {
      const bool is_mine = first + c.lane < V::kPairs && expert_of<V>(V::ids(job), first + c.lane) == expert;
      for (uint32_t found = __ballot_sync(~0u, is_mine); found != 0; found &= found - 1)
        multiply_pair<V>(job, pairs, expert, first + __ffs(found) - 1, tile % kTilesOfExpert<V> * kTileRows, c.lane);
    }
  }
}

// ---- weights in boxes

// The columns of a row that fill no line of 128 bytes. Boxes are of whole lines, so these are read where they are.
template <class V>
inline constexpr int kTailColumns = V::kRowBytes % kBoxRowBytes * 8 / V::kWeightBits;

template <class V>
struct BoxedShape {
  static constexpr int kStep = 128;  // columns that are converted together
  static constexpr int kTail = kTailColumns<V>, kTailSteps = (kTail + kStep - 1) / kStep;
  static constexpr int kSteps = (V::kSize - kTail) / kStep;  // that come in boxes
  static constexpr int kBoxSteps = kEntryColumns * 16 / V::kWeightBits / kStep;
  static constexpr int kGroup =
      V::kScaleColumns < kStep ? V::kScaleColumns : kStep;                     // columns that are scaled together
  static constexpr int kGroupsOfStep = kStep / kGroup, kSlices = kGroup / 32;  // slices of 32 columns
  static_assert(kStep % kGroup == 0 && V::kScaleColumns % kGroup == 0 && kGroup % 32 == 0 && kTail % kGroup == 0);
  static_assert(V::kXScaleColumns == 0 || V::kXScaleColumns == kStep);
  static_assert(kTail == 0 || (V::kWeightBits == 4 && V::kXScaleColumns == 0));
};

// The scales of a step's groups in a tile's rows, of which a lane has one of the upper and one of the lower half. They
// are loaded a step ahead, and converted where they are needed.
template <class V>
struct TileScales {
  using S = BoxedShape<V>;
  linear::GivenScale<V> given[S::kGroupsOfStep][2];

  MPK_DEVICE static uint32_t row_of(uint32_t row, bool is_lower, int lane) {
    return first_weight_row<V>(row, is_lower) + (V::kRowsHaveScales ? lane / 4 : 0);
  }
  MPK_DEVICE void load(const Job& job, int expert, uint32_t row, int step, int lane) {
#pragma unroll
    for (int group = 0; group < S::kGroupsOfStep; group++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int column = step * S::kStep + group * S::kGroup;
        if constexpr (S::kTail > 0) column = min(column, V::kSize - 1);  // the last step may have fewer groups
        given[group][i] =
            linear::load_given_scale<V>(job, expert, row_of(row, i == 1, lane), column / V::kScaleColumns);
      }
  }
  MPK_DEVICE void convert(BlockScale<V> (&blocks)[S::kGroupsOfStep][2], int expert, uint32_t row, int lane) const {
#pragma unroll
    for (int group = 0; group < S::kGroupsOfStep; group++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        blocks[group][i] =
            linear::block_scale<V>(to_float(given[group][i].scale), given[group][i], expert, row_of(row, i == 1, lane));
  }
  // All of a tile, to L2.
  MPK_DEVICE static void fetch(const Job& job, int expert, uint32_t row, int lane) {
    constexpr int kRows = V::kRowsHaveScales ? 8 : 1, kColumns = (V::kSize + V::kScaleColumns - 1) / V::kScaleColumns;
    for (int i = lane; i < 2 * kRows * kColumns; i += 32)
      linear::fetch_block_scale<V>(job, expert, first_weight_row<V>(row, i % 2 == 1) + i / 2 % kRows, i / 2 / kRows);
  }
};

// 128 columns of a lane's row of x, of which its four lanes have a quarter each, and their factor. `count`: slices of
// 32 columns that there are; the others are zeros.
template <class V>
struct StepOfX {
  using S = BoxedShape<V>;
  using T = typename V::T;
  uint4 slices[4];
  linear::XScale scale;

  MPK_DEVICE StepOfX(const T* row, int step, int count, int lane) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const T* x = row + step * S::kStep + i * 32;
      if constexpr (V::kWeightBits == 4) {
        slices[i] = i < count ? *reinterpret_cast<const uint4*>(x + lane % 4 * 8) : uint4{0, 0, 0, 0};
      } else {
        const uint2 first = *reinterpret_cast<const uint2*>(x + lane % 4 * 4),
                    second = *reinterpret_cast<const uint2*>(x + 16 + lane % 4 * 4);
        slices[i] = {first.x, first.y, second.x, second.y};
      }
      float v[8];
      linear::unpack<T>(slices[i], v);
      most = fmaxf(most, linear::largest(v));
    }
    for (int distance = 1; distance < 4; distance *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
    scale = linear::x_scale_of<V>(most);
  }
  // The second factors of two products, whose first are what BlockWeights makes of 32 columns.
  MPK_DEVICE void convert(int slice, uint32_t (&words)[4]) const {
    float v[8];
    linear::unpack<T>(slices[slice], v);
    linear::convert_access<V>(scale, v, words);
  }
};

// Adds the products of a group of columns with a group of pairs to a lane's sums.
template <class V>
MPK_DEVICE void multiply_columns(SumFragment& sums, const ptx::Quad (&halves)[4][2], const StepOfX<V>& x, int group,
                                 const BlockScale<V> (&blocks)[2], int lane) {
  constexpr int kSlices = BoxedShape<V>::kSlices;
  SumFragment products = {};
  float sum_of_x = 0;
#pragma unroll
  for (int i = group * kSlices; i < (group + 1) * kSlices; i++) {
    uint32_t words[4];
    x.convert(i, words);
#pragma unroll
    for (int k = 0; k < 2; k++) ptx::mma<__half>(products, halves[i][k], {words[2 * k], words[2 * k + 1]});
    if constexpr (V::kZero != kNoZero) sum_of_x += linear::sum_accesses<4>(words);
  }
#pragma unroll
  for (int column = 0; column < 2; column++) {
    const int from = (lane % 4 * 2 + column) * 4;  // a lane of that pair's row
    const float factor = __shfl_sync(~0u, x.scale.scale, from), added = __shfl_sync(~0u, sum_of_x, from);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = half * 2 + column;
      const float scale = to_float(blocks[half].scale);
      if constexpr (V::kZero == kNoZero)
        sums[i] = fmaf(products[i], factor * scale, sums[i]);
      else
        sums[i] = fmaf(fmaf(products[i], scale, added * blocks[half].offset()), factor, sums[i]);
    }
  }
}

// A lane's part of the last columns of its two rows.
template <class V>
struct Tail {
  static constexpr int kSlices = kTailColumns<V> / 32;
  const uint8_t* rows[2];

  MPK_DEVICE Tail(const Job& job, int expert, uint32_t row, int lane) {
#pragma unroll
    for (int m = 0; m < 2; m++)
      rows[m] = V::weight(job) + expert * V::kExpertPitch +
                (first_weight_row<V>(row, m == 1) + lane / 4) * V::kRowPitch + (V::kRowBytes - kSlices * 16) +
                lane % 4 * 4;
  }
  // The slices of a step, zeros behind the last.
  MPK_DEVICE void load(int step, ptx::Quad (&halves)[4][2]) const {
    const auto word = [&](int m, int slice) { return __ldg(reinterpret_cast<const uint32_t*>(rows[m] + slice * 16)); };
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int slice = step * 4 + i;
      if (slice < kSlices)
        linear::BlockWeights<V, 1>::convert(word(0, slice), word(1, slice), halves[i]);
      else
        halves[i][0] = halves[i][1] = {};
    }
  }
};

template <QuantizedExperts V, class C>
MPK_DEVICE bool multiply_boxes(C& c, const Job& job, Pairs<V>& pairs, uint32_t row, uint32_t entry, uint32_t stride) {
  using S = BoxedShape<V>;
  SumFragment sums[kGroups<V>] = {};
  const int num_groups = pairs.num_groups();
  TileScales<V> scales;
  TileScales<V>::fetch(job, pairs.expert, row, c.lane);
  scales.load(job, pairs.expert, row, S::kTail > 0 ? S::kSteps : 0, c.lane);
  const auto multiply_step = [&](const ptx::Quad(&halves)[4][2], int step, int groups) {
    BlockScale<V> blocks[S::kGroupsOfStep][2];
    scales.convert(blocks, pairs.expert, row, c.lane);
    const int next = step + 1 < S::kSteps + S::kTailSteps ? step + 1 : 0;
    if (step + 1 != S::kSteps) scales.load(job, pairs.expert, row, next, c.lane);  // else it was the last
#pragma unroll
    for (int g = 0; g < kGroups<V>; g++) {
      if (g > 0 && g >= num_groups) continue;
      const StepOfX<V> of_x(V::x(job) + pairs.row_of_x(g, c.lane), step, groups * S::kSlices, c.lane);
#pragma unroll
      for (int group = 0; group < groups; group++)
        multiply_columns<V>(sums[g], halves, of_x, group, blocks[group], c.lane);
    }
  };
  // Columns that come in no box are first: behind the others there are fewer registers.
#pragma unroll
  for (int step = 0; step < S::kTailSteps; step++) {
    ptx::Quad halves[4][2];
    Tail<V>(job, pairs.expert, row, c.lane).load(step, halves);
    multiply_step(halves, S::kSteps + step, min(S::kTail - step * S::kStep, S::kStep) / S::kGroup);
  }
#pragma unroll 1
  for (uint32_t box = 0; box < kBoxesOfTile<V>; box++, entry += stride) {
    if (!c.ring.wait(entry, c.phase)) return false;
    const uint8_t* slot = c.ring.slot(entry);
    linear::BlockWeights<V, 1> weights({slot}, {slot + kLowerRows<V>}, c.lane);
    const int first = box * S::kBoxSteps, steps = min(S::kBoxSteps, S::kSteps - first);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      ptx::Quad halves[4][2];
#pragma unroll
      for (int i = 0; i < 4; i++) weights.load(i, i % 2, 0, halves[i]);
      weights.advance(step);
      multiply_step(halves, first + step, S::kGroupsOfStep);
    }
    c.ring.release(entry);
  }
#pragma unroll
  for (int g = 0; g < kGroups<V>; g++) pairs.store(job, g, row, c.lane, sums[g]);
#pragma unroll 1
  while (pairs.find_next(job, c.lane))
#pragma unroll 1
    for (int i = 0; i < pairs.count; i++) multiply_pair<V>(job, pairs, pairs.expert, pairs.list[i], row, c.lane);
  return true;
}

}  // namespace mpk::experts
