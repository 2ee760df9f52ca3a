// The number formats of quantised weights and scales, and how x is quantised or put in order for them.
#pragma once

#include "torch_mpk/device/arch/arch.cuh"
#include "torch_mpk/device/pointwise.cuh"

namespace mpk {

// 4 bits of exponent, 3 of mantissa. The largest number is 448, and the pattern above it is NaN.
struct E4M3 {
  uint8_t bits;
};
// A power of two.
struct E8M0 {
  uint8_t bits;
};
// 2 bits of exponent, 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and these below zero.
struct E2M1 {
  uint8_t bits;  // the low four
};

// Moved to a half's place, exponent and mantissa give 2^-8 of the number, denormals included.
MPK_DEVICE float to_float(E4M3 v) {
  if ((v.bits & 0x7f) == 0x7f) return __int_as_float(0x7fffffff);
  const uint32_t magnitude = v.bits & 0x7f, sign = static_cast<uint32_t>(v.bits & 0x80) << 24;
  const float value =
      magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f : __uint_as_float((magnitude << 20) + (120u << 23));
  return __uint_as_float(__float_as_uint(value) | sign);
}
MPK_DEVICE float to_float(E8M0 v) {
  if (v.bits == 0xff) return __int_as_float(0x7fffffff);
  return __uint_as_float(v.bits == 0 ? 0x00400000u : static_cast<uint32_t>(v.bits) << 23);
}
MPK_DEVICE float to_float(E2M1 v) {
  const uint32_t magnitude = v.bits & 7, sign = static_cast<uint32_t>(v.bits & 8) << 28;
  const uint32_t value = magnitude < 2 ? magnitude * 0x3f000000u : (magnitude << 22) + (126u << 23);
  return __uint_as_float(value | sign);
}

inline constexpr float kLargestE4M3 = 448, kLeastScale = 1e-12f;

// Products with words of eight 4-bit weights have the columns of x in another order: in so many, column c is at c % 4 *
// 8 + c / 4, since the low and the high half of a word become numbers together.
inline constexpr int kOrderedColumns = 32;

// Eight columns of x as the four pairs of a word's weights. Each is one of the four of 8 columns of ordered ones.
MPK_DEVICE uint4 in_order_of_words(const uint4& x) {
  return {ptx::low_halves(x.x, x.z), ptx::high_halves(x.x, x.z), ptx::low_halves(x.y, x.w), ptx::high_halves(x.y, x.w)};
}

// Rounds a float to e4m3: to nearest, ties to even, saturating.
MPK_DEVICE float round_e4m3(float v) {
  float magnitude = fabsf(v);
  if (magnitude > kLargestE4M3) magnitude = kLargestE4M3;  // false for NaN
  const uint32_t bits = __float_as_uint(magnitude);
  const float normal = __uint_as_float((bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000u);
  const float denormal = (magnitude + 0x1p14f) - 0x1p14f;
  const float rounded = magnitude < 0x1p-6f ? denormal : magnitude == magnitude ? normal : magnitude;
  return copysignf(rounded, v);
}

// The bits of a float that is rounded to e4m3.
MPK_DEVICE uint32_t e4m3_bits(float v) {
  const float rounded = round_e4m3(v), magnitude = fabsf(rounded);
  const uint32_t sign = __float_as_uint(rounded) >> 24 & 0x80;
  if (magnitude != magnitude) return sign | 0x7f;
  if (magnitude < 0x1p-6f) return sign | static_cast<uint32_t>(magnitude * 0x1p9f);
  return sign | ((__float_as_uint(magnitude) >> 20) - (120 << 3));
}
// The bits of two floats, the first's in the lower byte.
MPK_DEVICE uint16_t e4m3_pair(float low, float high) {
  if constexpr (arch::kConvertsE4M3) {
    return ptx::e4m3_of(low, high);
  } else {
    return static_cast<uint16_t>(e4m3_bits(low) | e4m3_bits(high) << 8);
  }
}

// The scale for numbers of at most this magnitude.
MPK_DEVICE float e4m3_scale(float most) { return fmaxf(most / kLargestE4M3, kLeastScale); }

// v / scale, rounded as a division, from the scale's inverse: e4m3 has so few numbers that many quotients lie half way
// between two. A scale that is not v's own may make the quotient infinite: with `saturates`, it is then only known to
// be beyond e4m3's numbers.
template <bool saturates>
MPK_DEVICE float divide_rounded(float v, float scale, float inverse) {
  float quotient = v * inverse;
  if constexpr (saturates) quotient = fminf(fmaxf(quotient, -2 * kLargestE4M3), 2 * kLargestE4M3);
  return fmaf(fmaf(-quotient, scale, v), inverse, quotient);
}

}  // namespace mpk
