// Weights that kernels read where they are: a variant's declarations, and a row of such weights.
#pragma once

#include "torch_mpk/device/tasks/quantized_format.cuh"

namespace mpk::linear {

template <class V>
concept HasWeightsInPlace = requires(const Job& job, int i) {
  { V::weight(job, i) } -> Same<const uint8_t*>;  // i: segment or part
  { V::weight_pitch(i) } -> Same<int64_t>;        // in bytes
  // Columns that stand side by side, and bytes to those behind them.
  requires Constants<int, V::kWordColumns>;
  { V::word_pitch(i) } -> Same<int64_t>;
  // The group of each column, of so many groups.
  requires !V::kHasGroups || requires {
    requires Constants<int, V::kGroups>;
    { V::column_groups(job, i) } -> Same<const int32_t*>;
  };
  // Numbers of all codes, of which the first of two stands in the high bits.
  requires !V::kHasCode || requires {
    { V::codebook(job, i) } -> Same<const float*>;
  };
  // Numbers of scales, by byte; for so many of them a scale of theirs; what is added to the products.
  requires !V::kNestedScales || requires {
    requires Constants<int, V::kRowScales, V::kScaleBlock>;
    { V::scale_code(job, i) } -> Same<const float*>;
    { V::scale_scale(job, i) } -> Same<const float*>;
    { V::scale_offset(job, i) } -> Same<const float*>;
  };
};

// A row of weights where it is.
template <class V>
struct RowInPlace {
  const Job& job;
  const int which;  // segment or part
  const uint32_t n;
  const uint32_t place;      // of its 4 bits, in words that have several rows
  const uint8_t* const row;  // or where these bits of column 0 are

  MPK_DEVICE RowInPlace(const Job& job, int which, uint32_t n)
      : job(job),
        which(which),
        n(n),
        place(V::kWordRows > 1 ? place_in_word<V>(n) : 0),
        row(V::weight(job, which) + n / V::kWordRows * V::weight_pitch(which) + place / 2) {}

  // Where the number of column k is.
  MPK_DEVICE const uint8_t* at(int k) const {
    return row + k / V::kWordColumns * V::word_pitch(which) + k % V::kWordColumns * V::kWeightBits / 8;
  }
  // The number of column k, which is in `byte`.
  MPK_DEVICE float number_in(uint8_t byte, int k) const {
    if constexpr (V::kHasCode) {
      return V::codebook(job, which)[byte >> (1 - k % 2) * 4 & 15];
    } else {
      return weight_of<V>(byte, V::kWordRows > 1 ? place : k);
    }
  }
  MPK_DEVICE float number(int k) const { return number_in(*at(k), k); }
  // The scale and zero point of column k, or of its group. A group's number is unchecked: NaN if there is no such
  // group.
  MPK_DEVICE BlockScale<V> block_of(int k) const {
    if constexpr (V::kHasGroups) {
      const uint32_t group = V::column_groups(job, which)[k];
      BlockScale<V> block = load_block_scale<V>(job, which, n, min(group, V::kGroups - 1u));
      if (group >= V::kGroups) block.scale = cast<typename BlockScale<V>::Scale>(__int_as_float(0x7fffffff));
      return block;
    } else {
      return load_block_scale<V>(job, which, n, k / V::kScaleColumns);
    }
  }
  MPK_DEVICE float weight(int k) const {
    const BlockScale<V> block = block_of(k);
    return fmaf(number(k), to_float(block.scale), block.offset());
  }

  // A lane's part of the product with a run of x.
  template <class T>
  MPK_DEVICE float sum(const T* x, int first, int end, int lane) const {
    float sum = 0, sum_of_x = 0;
    for (int k = first + lane; k < end; k += 32) {
      if constexpr (V::kHasGroups) {
        sum = fmaf(weight(k), to_float(x[k]), sum);
      } else {
        sum = fmaf(number(k), to_float(x[k]), sum);
        if constexpr (V::kZero != kNoZero) sum_of_x += to_float(x[k]);
      }
    }
    if constexpr (!V::kScalesByRow && !V::kHasGroups) {
      const BlockScale<V> block = block_of(first);
      sum *= to_float(block.scale);
      if constexpr (V::kZero != kNoZero) sum = fmaf(sum_of_x, block.offset(), sum);
    }
    return sum;
  }
};

}  // namespace mpk::linear
