// What a variant says of the format of quantised weights.
#pragma once

#include "torch_mpk/device/quantized.cuh"
#include "torch_mpk/device/tasks/linear_shape.cuh"

namespace mpk::linear {

// What the format of weights says.
template <class V>
concept QuantizedSizes = requires {
  // Weights are e4m3, or else int8. Each row has one scale, which V::finish applies.
  requires Constants<bool, V::kIsE4M3, V::kScalesByRow, V::kGivenXScale>;
  // Columns of a scale of the weight, where it has several to a row; of a scale of x, 0 if x is not quantised.
  requires Constants<int, V::kScaleColumns, V::kXScaleColumns>;
};

// Where scales are, that have blocks of some rows and columns.
template <class V>
concept HasScales = V::kScalesByRow || requires(const Job& job, int i) {
  { V::scale(job, i) } -> Same<const typename V::Scale*>;  // of segment or part i
  { V::scale_pitch(i) } -> Same<int64_t>;
  { V::scale_rows(i) } -> Same<uint32_t>;
};

}  // namespace mpk::linear
