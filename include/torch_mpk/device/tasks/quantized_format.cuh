// What a variant declares of the format of quantised weights.
#pragma once

#include "torch_mpk/device/quantized.cuh"
#include "torch_mpk/device/tasks/linear_shape.cuh"

namespace mpk::linear {

// How zero points are given, see WeightFormat: they are added, or taken from the numbers, one or eight to an element.
inline constexpr int kNoZero = 0, kAddedZero = 1, kPackedPoints = 3;

// What the format of weights says.
template <class V>
concept QuantizedSizes = requires {
  // Weights of 8 bits are e4m3, or else int8. Those of 4 bits are e2m1, or 8 more than their numbers, or have a sign.
  // Each row has one scale and nothing else, which V::finish applies. Each column says which group it belongs to.
  // Numbers are looked up in a table. Scales are bytes with scales of their own.
  requires Constants<bool, V::kIsE4M3, V::kIsE2M1, V::kHasMiddle, V::kScalesByRow, V::kHasGroups, V::kHasCode,
                     V::kNestedScales, V::kGivenXScale>;
  // Columns of a scale of the weight, where it has several to a row; of a scale of x, 0 if x is not quantised.
  // Rows that a word has of 4-bit weights, and of zero points that are packed with them; 1: it has columns.
  requires Constants<int, V::kWeightBits, V::kWordRows, V::kZero, V::kScaleColumns, V::kXScaleColumns>;
};

// Where scales are, that have blocks of some rows and columns; and zero points, of the same blocks.
template <class V>
concept HasScales = V::kScalesByRow || requires(const Job& job, int i) {
  requires Constants<bool, V::kRowsHaveScales>;            // of their own
  { V::scale(job, i) } -> Same<const typename V::Scale*>;  // of segment or part i
  { V::scale_pitch(i) } -> Same<int64_t>;                  // to the next rows
  { V::scale_column_pitch(i) } -> Same<int64_t>;
  { V::scale_rows(i) } -> Same<uint32_t>;
  requires V::kZero == kNoZero || requires {
    { V::zero(job, i) } -> Same<const typename V::Zero*>;
    { V::zero_pitch(i) } -> Same<int64_t>;
    { V::zero_column_pitch(i) } -> Same<int64_t>;
  };
};

// A type of 16 bits as it is, others as float.
template <class T>
struct KeptAs {
  using Type = typename Choose<sizeof(T) == 2, T, float>::Type;
};

// What belongs to the numbers of a block: its scale alone, or its zero point, too, which is added, or else is what is
// taken from them. They keep the types in which they are given, if these are of 16 bits: all values are exact.
template <class V, int zero = V::kZero>
struct BlockScale {
  using Scale = typename KeptAs<typename V::Scale>::Type;
  using Zero = typename Choose<zero == kAddedZero, typename KeptAs<typename V::Zero>::Type, Scale>::Type;
  Scale scale;
  Zero zero_point;

  MPK_DEVICE float offset() const {
    const float point = to_float(zero_point);
    return zero == kAddedZero ? point : -point * to_float(scale);
  }
};
template <class V>
struct BlockScale<V, kNoZero> {
  using Scale = typename KeptAs<typename V::Scale>::Type;
  Scale scale;

  MPK_DEVICE float offset() const { return 0; }
};

// Where a block's scale and zero point are, of the block of row n and of column block `column`.
template <class V>
MPK_DEVICE const typename V::Scale* place_of_scale(const Job& job, int which, uint32_t row, uint32_t column) {
  return V::scale(job, which) + row * V::scale_pitch(which) + column * V::scale_column_pitch(which);
}
template <class V>
MPK_DEVICE const typename V::Zero* place_of_zero(const Job& job, int which, uint32_t row, uint32_t column) {
  const uint32_t line = V::kZero == kPackedPoints ? row / 8 : row;
  return V::zero(job, which) + line * V::zero_pitch(which) + column * V::zero_column_pitch(which);
}

// The place of a row's 4 bits in a word of eight rows, see WeightFormat::place.
template <class V>
MPK_DEVICE uint32_t place_in_word(uint32_t row) {
  return V::kWordRows > 1 ? row % 8 / 2 + row % 2 * 4 : row % 8;
}

// To L2.
template <class V>
MPK_DEVICE void fetch_block_scale(const Job& job, int which, uint32_t n, uint32_t column) {
  const uint32_t row = n / V::scale_rows(which);
  ptx::prefetch_l2(place_of_scale<V>(job, which, row, column));
  if constexpr (V::kZero != kNoZero) ptx::prefetch_l2(place_of_zero<V>(job, which, row, column));
}

// The scale that a block's own stands for, which may be a byte with a scale of its own.
template <class V>
MPK_DEVICE float widen_scale(typename V::Scale scale, const Job& job, int which, uint32_t row, uint32_t column) {
  if constexpr (V::kNestedScales) {
    const float own = V::scale_scale(job, which)[(row * V::kRowScales + column) / V::kScaleBlock];
    return fmaf(V::scale_code(job, which)[scale], own, V::scale_offset(job, which)[0]);
  } else {
    return to_float(scale);
  }
}
// A block's scale and zero point as they are given: loaded long before they are needed, they are converted only then.
template <class V, int zero = V::kZero>
struct GivenScale {
  typename V::Scale scale;
  typename V::Zero zero_point;
};
template <class V>
struct GivenScale<V, kNoZero> {
  typename V::Scale scale;
};
template <class V>
MPK_DEVICE GivenScale<V> load_given_scale(const Job& job, int which, uint32_t n, uint32_t column) {
  const uint32_t row = n / V::scale_rows(which);
  GivenScale<V> given;
  given.scale = *place_of_scale<V>(job, which, row, column);
  if constexpr (V::kZero != kNoZero) given.zero_point = *place_of_zero<V>(job, which, row, column);
  return given;
}

// The block of row n, whose whole scale is `scale`.
template <class V>
MPK_DEVICE BlockScale<V> block_scale(float scale, const GivenScale<V>& given, int which, uint32_t n) {
  using Block = BlockScale<V>;
  Block block;
  block.scale = cast<typename Block::Scale>(scale);
  if constexpr (V::kZero == kAddedZero) {
    block.zero_point = cast<typename Block::Zero>(to_float(given.zero_point));
  } else if constexpr (V::kZero != kNoZero) {
    const uint32_t shift = V::kZero == kPackedPoints ? place_in_word<V>(n / V::scale_rows(which)) * 4 : 0;
    const int point = V::kZero == kPackedPoints ? static_cast<int>(given.zero_point >> shift & 15)
                                                : static_cast<int>(given.zero_point);
    block.zero_point = cast<typename Block::Zero>(static_cast<float>(point - (V::kHasMiddle ? 8 : 0)));
  }
  return block;
}
template <class V>
MPK_DEVICE BlockScale<V> load_block_scale(const Job& job, int which, uint32_t n, uint32_t column) {
  const GivenScale<V> given = load_given_scale<V>(job, which, n, column);
  const float scale = widen_scale<V>(given.scale, job, which, n / V::scale_rows(which), column);
  return block_scale<V>(scale, given, which, n);
}

// The number of column k, which is in `byte`.
template <class V>
MPK_DEVICE float weight_of(uint8_t byte, int k) {
  if constexpr (V::kWeightBits == 4) {
    const int code = byte >> k % 2 * 4 & 15;
    return V::kIsE2M1 ? to_float(E2M1{static_cast<uint8_t>(code)})
                      : static_cast<float>((V::kHasMiddle ? code : code ^ 8) - 8);
  } else {
    return V::kIsE4M3 ? to_float(E4M3{byte}) : static_cast<float>(static_cast<int8_t>(byte));
  }
}

}  // namespace mpk::linear
