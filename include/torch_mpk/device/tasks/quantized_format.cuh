// What a variant declares of the format of quantised weights.
#pragma once

#include "torch_mpk/device/quantized.cuh"
#include "torch_mpk/device/tasks/linear_shape.cuh"

namespace mpk::linear {

template <class V>
concept QuantizedSizes = requires {
  // Weights are e4m3, or else int8. Each row has one scale, which V::finish applies.
  requires Constants<bool, V::kIsE4M3, V::kScalesByRow, V::kGivenXScale>;
  // Columns that share a scale of the weight, where a row has several; columns that share a scale of x, 0 if x is not
  // quantised.
  requires Constants<int, V::kScaleColumns, V::kXScaleColumns>;
};

// The place of scales of blocks.
template <class V>
concept HasScales = V::kScalesByRow || requires(const Job& job, int i) {
  { V::scale(job, i) } -> Same<const typename V::Scale*>;  // i: segment or part
  { V::scale_pitch(i) } -> Same<int64_t>;
  { V::scale_rows(i) } -> Same<uint32_t>;
};

}  // namespace mpk::linear
