// Quantised weights as numbers of x's type, two at a time, with their scales and zero points applied. They are rounded
// as the matrices of dequantise.cuh are.
#pragma once

#include "torch_mpk/device/tasks/quantized_weights.cuh"

namespace mpk::linear {

// The number that stands above what a weight's bits are converted to, see `widen`.
template <class V>
constexpr float above() {
  if constexpr (V::kWeightBits == 4) {
    return FourBits<typename V::T>::kAbove;
  } else {
    return !V::kIsE4M3 && kSame<typename V::T, __half> ? 1024 + 128 : 0;
  }
}

// Makes two weights of 8 bits, each in the low bits of 16, numbers of T that are `above` what they stand for.
template <class V>
MPK_DEVICE uint32_t widen_bytes(uint32_t bytes) {
  using T = typename V::T;
  if constexpr (kSame<T, __half>) {
    return ptx::mask_and_flip(bytes, 0x00ff00ff, 0x64806480);
  } else {
    // bfloat16 has room for 7 bits: they are above 128, of which the sign takes one or two.
    return ptx::subtract_pairs<T>(ptx::mask_and_flip(bytes, 0x007f007f, 0x43004300),
                                  ptx::mask_and_flip(bytes, 0x00800080, 0x43004300));
  }
}

// Makes two weights numbers of T that are `above` what they stand for.
template <class V>
MPK_DEVICE uint32_t widen(uint32_t pair) {
  using T = typename V::T;
  if constexpr (V::kWeightBits == 4) {
    constexpr uint32_t kBase = FourBits<T>::kBase;
    return ptx::mask_and_flip(pair * 0x1001u, 0x000f000f, V::kHasMiddle ? kBase : kBase ^ 0x00080008);
  } else if constexpr (V::kIsE4M3) {
    const uint32_t halves = ptx::halves_of_e4m3(static_cast<uint16_t>(pair));
    if constexpr (kSame<T, __half>) {
      return halves;
    } else {
      const float2 numbers = __half22float2(reinterpret_cast<const __half2&>(halves));
      const __nv_bfloat162 exact = __floats2bfloat162_rn(numbers.x, numbers.y);
      return reinterpret_cast<const uint32_t&>(exact);
    }
  } else {
    return widen_bytes<V>(ptx::choose_bytes(pair, 0, 0x4140));
  }
}

template <class T>
MPK_DEVICE uint32_t bits_of(T number) {
  static_assert(sizeof(T) == 2);
  return reinterpret_cast<const uint16_t&>(number);
}
// A number twice.
template <class T>
MPK_DEVICE uint32_t pair_of(T number) {
  return bits_of(number) * 0x10001u;
}

// A pair of widened weights has `taken` taken from it, is multiplied by `scale`, and has `added` added then.
struct PairFactors {
  uint32_t taken, scale, added;
};

// The scale of a row's block in the low half of a word, and in the high half what is added, or taken.
template <class V>
MPK_DEVICE uint32_t pack_factors(const GivenScale<V>& given, int which, uint32_t n) {
  using T = typename V::T;
  T other = cast<T>(above<V>());
  if constexpr (V::kZero == kAddedZero)
    other = given.zero_point;
  else if constexpr (V::kZero != kNoZero)
    other = cast<T>(above<V>() + to_float(block_scale<V>(0, given, which, n).zero_point));
  return ptx::low_halves(bits_of(given.scale), bits_of(other));
}
template <class V>
MPK_DEVICE PairFactors factors_of(uint32_t word) {
  const uint32_t scale = ptx::low_halves(word, word), other = ptx::high_halves(word, word);
  return V::kZero == kAddedZero ? PairFactors{pair_of(cast<typename V::T>(above<V>())), scale, other}
                                : PairFactors{other, scale, 0};
}
// The same for a sum of widened weights times numbers of x: it is multiplied by `scale`, and the sum of these numbers
// times `offset` is added.
struct SumFactors {
  float scale, offset;
};
template <class V>
MPK_DEVICE SumFactors sum_factors_of(uint32_t word) {
  using T = typename V::T;
  const uint16_t low = static_cast<uint16_t>(word), high = static_cast<uint16_t>(word >> 16);
  const float scale = to_float(reinterpret_cast<const T&>(low)), other = to_float(reinterpret_cast<const T&>(high));
  return {scale, V::kZero == kAddedZero ? fmaf(-above<V>(), scale, other) : -other * scale};
}

// Where V::finish applies scales.
template <class V>
MPK_DEVICE PairFactors unscaled_factors() {
  return {pair_of(cast<typename V::T>(above<V>())), 0, 0};
}

// Applies them, or makes widened weights what they stand for.
template <class V>
MPK_DEVICE uint32_t apply_factors(uint32_t widened, const PairFactors& f) {
  using T = typename V::T;
  if constexpr (V::kScalesByRow) {
    return above<V>() == 0 ? widened : ptx::subtract_pairs<T>(widened, f.taken);
  } else {
    const uint32_t numbers = ptx::subtract_pairs<T>(widened, f.taken);
    if constexpr (V::kZero == kAddedZero)
      return ptx::fma_pairs<T>(numbers, f.scale, f.added);
    else
      return ptx::multiply_pairs<T>(numbers, f.scale);
  }
}

}  // namespace mpk::linear
