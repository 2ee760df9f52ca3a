// Vectors of one tier: GCC/Clang vector extensions, with intrinsics only where extensions lack an operation.
//
// Included inside the tier's own (unnamed) namespace, after its target pragma; see tier.h. Nothing in here may be
// shared between tiers: a linker that merged two copies could pick the one this processor cannot run.
#pragma once

#define MPK_INLINE inline __attribute__((always_inline))

constexpr int kVecBytes = MPK_VEC_BYTES;
constexpr int kLanes = kVecBytes / 4;

typedef float vf __attribute__((vector_size(kVecBytes)));
typedef uint32_t vu __attribute__((vector_size(kVecBytes)));
typedef int32_t vi __attribute__((vector_size(kVecBytes)));
typedef uint16_t vh __attribute__((vector_size(kVecBytes / 2)));  // as many 16-bit elements as vf has lanes
typedef float vf_unaligned __attribute__((vector_size(kVecBytes), aligned(1), may_alias));
typedef uint32_t vu_unaligned __attribute__((vector_size(kVecBytes), aligned(1), may_alias));
typedef uint16_t vh_unaligned __attribute__((vector_size(kVecBytes / 2), aligned(1), may_alias));

// Numbers 0 to n - 1, for what has to be a constant.
template <int... i>
struct Sequence {};
template <int n, int... i>
struct MakeSequence : MakeSequence<n - 1, n - 1, i...> {};
template <int... i>
struct MakeSequence<0, i...> {
  using type = Sequence<i...>;
};

// Storage types: distinct, so that templates can tell float16 from bfloat16.
struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

MPK_INLINE float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
MPK_INLINE uint32_t as_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

MPK_INLINE vf vec_fma(vf a, vf b, vf c) {
#if defined(MPK_TIER_AVX512)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(MPK_TIER_AVX2)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The same number in all lanes. (A sum with 0 would be computed: it makes 0 of -0.)
MPK_INLINE vf splat(float v) { return v - vf{}; }

// The sum of the lanes, in a fixed order: halves onto each other.
MPK_INLINE float sum_lanes(vf v) {
#if defined(MPK_TIER_AVX512)
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(MPK_TIER_AVX2)
  const __m256 a = (__m256)v;
#endif
#if defined(MPK_TIER_AVX512) || defined(MPK_TIER_AVX2)
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
#else
  static_assert(kLanes == 4);
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

MPK_INLINE float bf16_to_float(bf16 h) { return as_float(static_cast<uint32_t>(h.bits) << 16); }

// Round to nearest, ties to even; a NaN stays a NaN.
MPK_INLINE bf16 float_to_bf16(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return {static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded)};
}

// Moves exponent and mantissa into place and corrects the exponent's bias by a multiplication, which also normalises
// denormals; infinities and NaNs keep the largest exponent.
MPK_INLINE float f16_to_float(f16 h) {
  const uint32_t magnitude = (h.bits & 0x7fffu) << 13;
  const uint32_t scaled = as_bits(as_float(magnitude) * 0x1p112f);
  const uint32_t bits = magnitude >= (0x7c00u << 13) ? magnitude | 0x7f800000u : scaled;
  return as_float(bits | (h.bits & 0x8000u) << 16);
}

// Round to nearest, ties to even. Below the smallest normal number the sum with 0.5 does the rounding.
MPK_INLINE f16 float_to_f16(float value) {
  const uint32_t bits = as_bits(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  const uint32_t denormal = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
  uint32_t half = magnitude < 0x38800000u ? denormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return {static_cast<uint16_t>(half | sign)};
}

// One vector of consecutive elements, as floats.
MPK_INLINE vf load_vec(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
MPK_INLINE vf load_vec(const bf16* p) {
  return (vf)(__builtin_convertvector((vh) * reinterpret_cast<const vh_unaligned*>(p), vu) << 16);
}
MPK_INLINE vf load_vec(const f16* p) {
#if defined(MPK_TIER_AVX512)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(MPK_TIER_AVX2)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const vu h = __builtin_convertvector((vh) * reinterpret_cast<const vh_unaligned*>(p), vu);  // as f16_to_float
  const vu magnitude = (h & 0x7fffu) << 13;
  const vu scaled = (vu)((vf)magnitude * 0x1p112f);
  const vu special = (vu)((vi)magnitude >= static_cast<int32_t>(0x7c00u << 13));  // signed: SSE2 has no other
  return (vf)(((magnitude | 0x7f800000u) & special) | (scaled & ~special) | (h & 0x8000u) << 16);
#endif
}

// The first n < kLanes elements of a vector, the others 0; reads nothing behind them.
template <class T>
MPK_INLINE vf load_vec_partial(const T* p, int64_t n) {
  T whole[kLanes] = {};
  __builtin_memcpy(whole, p, n * sizeof(T));
  return load_vec(whole);
}
#if defined(MPK_TIER_AVX512)
MPK_INLINE vf load_vec_partial(const float* p, int64_t n) {
  return (vf)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
}
#endif
