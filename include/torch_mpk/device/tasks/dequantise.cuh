// dequantise: a quantised weight as a matrix of 16 bits in memory.
#pragma once

#include "torch_mpk/device/launch.cuh"
#include "torch_mpk/device/tasks/quantized_weights.cuh"
#include "torch_mpk/device/tasks/weights_in_place.cuh"

namespace mpk::linear {

template <class V, class C>
concept DequantiseVariant = QuantizedSizes<V> && HasScales<V> && HasWeightsInPlace<V> && requires(const Job& job) {
  requires Constants<bool, V::kIsWide>;
  requires Constants<int64_t, V::kPitch>;  // of the matrix
  requires Constants<uint32_t, V::kRows, V::kSize>;
  { V::matrix(job) } -> Same<typename V::T*>;
};

// Eight columns of a row, whose numbers are one access. What belongs to them is converted where it is stored: units are
// loaded together.
template <class V>
struct WideUnit {
  static constexpr uint32_t kColumns = 8, kCount = V::kRows * (V::kSize / kColumns);
  // Where words of a row are apart, those of the next row are beside them.
  static constexpr bool kIsApart = V::kWordColumns < V::kSize;
  static constexpr bool kHasOwnScale = !V::kHasGroups && !V::kNestedScales;  // one that is loaded beside the numbers
  uint32_t row, column;
  uint32_t words[V::kWeightBits == 8 ? 2 : 1];
  GivenScale<V> given;

  MPK_DEVICE void load(const Job& job, uint32_t i) {
    row = kIsApart ? i % V::kRows : i / (V::kSize / kColumns);
    column = (kIsApart ? i / V::kRows : i % (V::kSize / kColumns)) * kColumns;
    const uint8_t* from = RowInPlace<V>(job, 0, row).at(column);
    if constexpr (V::kWeightBits == 8) {
      const uint2 both = __ldg(reinterpret_cast<const uint2*>(from));
      words[0] = both.x, words[1] = both.y;
    } else {
      words[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
    }
    if constexpr (kHasOwnScale) given = load_given_scale<V>(job, 0, row, column / V::kScaleColumns);
  }
  // A multiprocessor has few instructions for each number in the time that memory takes for it.
  MPK_DEVICE void find_numbers(const RowInPlace<V>& in_place, float (&numbers)[kColumns]) const {
    if constexpr (V::kIsE2M1) {
      uint32_t pairs[4];
      to_halves<V>(words[0], pairs);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 both = __half22float2(reinterpret_cast<const __half2&>(pairs[i]));
        numbers[i] = both.x, numbers[i + 4] = both.y;
      }
    } else if constexpr (V::kWeightBits == 4 && !V::kHasCode) {
      using Bits = FourBits<__nv_bfloat16>;  // the upper half of a float
      uint32_t pairs[4];
      Bits::template widen<V>(words[0], pairs);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        numbers[i] = __uint_as_float(pairs[i] << 16) - Bits::kAbove;
        numbers[i + 4] = __uint_as_float(pairs[i] & 0xffff0000) - Bits::kAbove;
      }
    } else if constexpr (V::kWeightBits == 8 && V::kIsE4M3 && arch::kConvertsE4M3) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t pair = ptx::halves_of_e4m3(static_cast<uint16_t>(words[i / 2] >> i % 2 * 16));
        const float2 both = __half22float2(reinterpret_cast<const __half2&>(pair));
        numbers[2 * i] = both.x, numbers[2 * i + 1] = both.y;
      }
    } else {
#pragma unroll
      for (int e = 0; e < static_cast<int>(kColumns); e++) {
        const int byte = e * V::kWeightBits / 8;
        numbers[e] = in_place.number_in(static_cast<uint8_t>(words[byte / 4] >> byte % 4 * 8), e);
      }
    }
  }
  MPK_DEVICE void store(const Job& job) const {
    using T = typename V::T;
    const RowInPlace<V> in_place(job, 0, row);
    BlockScale<V> block;
    if constexpr (kHasOwnScale)
      block = block_scale<V>(to_float(given.scale), given, 0, row);
    else if constexpr (!V::kHasGroups)
      block = in_place.block_of(column);
    float numbers[kColumns];
    find_numbers(in_place, numbers);
    Vec<T, kColumns> elements;
#pragma unroll
    for (int e = 0; e < static_cast<int>(kColumns); e++) {
      const BlockScale<V> own = V::kHasGroups ? in_place.block_of(column + e) : block;
      elements.v[e] = cast<T>(fmaf(numbers[e], to_float(own.scale), own.offset()));
    }
    *reinterpret_cast<Vec<T, kColumns>*>(V::matrix(job) + row * V::kPitch + column) = elements;
  }
};

// A number, or a word's numbers of a column.
template <class V>
struct NarrowUnit {
  static constexpr uint32_t kCount = V::kRows / V::kWordRows * V::kSize;
  uint32_t line, column;

  MPK_DEVICE void load(const Job&, uint32_t i) { line = i / V::kSize, column = i % V::kSize; }
  MPK_DEVICE void store(const Job& job) const {
#pragma unroll
    for (uint32_t r = 0; r < V::kWordRows; r++) {
      const uint32_t row = line * V::kWordRows + r;
      const RowInPlace<V> in_place(job, 0, row);
      V::matrix(job)[row * V::kPitch + column] = cast<typename V::T>(in_place.weight(column));
    }
  }
};

// All threads of all workers share the units, neighbours side by side, some at a time.
template <class V, class C>
MPK_DEVICE void compute_dequantised(C& c, const Job& job) {
  static_assert(DequantiseVariant<V, C>);
  if (!c.await()) return;
  using Unit = typename Choose<V::kIsWide, WideUnit<V>, NarrowUnit<V>>::Type;
  constexpr uint32_t kStep = C::Config::kNumWorkers * kConsumerThreads, kTogether = V::kIsWide ? 8 : 4;
  for (uint32_t first = c.worker(job) * kConsumerThreads + c.rank; first < Unit::kCount; first += kTogether * kStep) {
    Unit units[kTogether];
#pragma unroll
    for (uint32_t u = 0; u < kTogether; u++) units[u].load(job, min(first + u * kStep, Unit::kCount - 1));
#pragma unroll
    for (uint32_t u = 0; u < kTogether; u++)
      if (first + u * kStep < Unit::kCount) units[u].store(job);
  }
}

}  // namespace mpk::linear
