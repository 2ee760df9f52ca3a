// Numbers of 4 bits, many of which stand in a vector of words.
#pragma once

// A byte to a lane.
MPK_INLINE vu load_bytes(const uint8_t* p) {
#if defined(MPK_TIER_AVX512)
  return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(MPK_TIER_AVX2)
  return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  vu bytes;
  for (int i = 0; i < kLanes; i++) bytes[i] = p[i];
  return bytes;
#endif
}

constexpr float kNumbersE2M1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

// -8 to 7 as they are (kI4), with 8 more (kU4), or looked up, in the format's table (kE2M1) or a given one (kTable).
// at<n> is the number of each lane's bits n to n + 3, as floats.
template <WeightCode kCode>
struct Numbers4 {
  static constexpr bool kIsInteger = kCode == WeightCode::kI4 || kCode == WeightCode::kU4;
  static constexpr int kMiddle = 8;
  static MPK_INLINE const float* table_of(const float* codebook) {
    return kCode == WeightCode::kE2M1 ? kNumbersE2M1 : codebook;
  }
#if defined(MPK_TIER_AVX512)
  vf table;
  __m512i table_of_halves;  // in bfloat16, twice, since a look-up takes five bits

  MPK_INLINE explicit Numbers4(const float* codebook) {
    alignas(64) float numbers[16];
    alignas(64) uint16_t halves[32];
    for (int code = 0; code < 16; code++) {
      numbers[code] = kIsInteger ? static_cast<float>((kCode == WeightCode::kI4 ? code ^ kMiddle : code) - kMiddle)
                                 : table_of(codebook)[code];
      halves[code] = halves[code + 16] = static_cast<uint16_t>(as_bits(numbers[code]) >> 16);
    }
    table = load_vec(numbers), table_of_halves = _mm512_load_si512(halves);
  }
  MPK_INLINE vu readable(vu words) const { return words; }
  template <int kBelow>
  MPK_INLINE vf at(vu words) const {
    return (vf)_mm512_permutexvar_ps((__m512i)(words >> kBelow), (__m512)table);
  }
  // The same of bits n to n + 3 of each half of a lane, as bfloat16.
  template <int kBelow>
  MPK_INLINE __m512i halves(__m512i words) const {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(words, kBelow), table_of_halves);
  }
#else
  const float* table;

  MPK_INLINE explicit Numbers4(const float* codebook) : table(table_of(codebook)) {}
  // Codes become integers with a sign, which shifts extract.
  MPK_INLINE vu readable(vu words) const { return kCode == WeightCode::kU4 ? words ^ 0x88888888u : words; }
  template <int kBelow>
  MPK_INLINE vf at(vu words) const {
    if constexpr (kIsInteger) return __builtin_convertvector((vi)(words << (28 - kBelow)) >> 28, vf);
#if defined(MPK_TIER_AVX2)
    const __m256i codes = (__m256i)(words >> kBelow);
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), codes);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), codes);
    return (vf)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
#else
    vf numbers;
    for (int i = 0; i < kLanes; i++) numbers[i] = table[words[i] >> kBelow & 15];
    return numbers;
#endif
  }
#endif
};
