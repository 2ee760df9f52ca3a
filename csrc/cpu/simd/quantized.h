// Matrix times few vectors, of weights in bytes: each is converted in registers, once for several rows of x.
//
// The order of an output element's sum depends on K and on the runs alone.
#pragma once

// Four vectors of weights: their bytes are one register wide, or a part of one.
constexpr int kQuantizedStep = 4 * kLanes;

// e4m3 as float: exponent and mantissa move to a half's place, which is 2^-8 of the number, denormals too.
struct WeightsE4M3 {
  static constexpr float kScale = 256;

  static MPK_INLINE vf load(const uint8_t* p) {
#if defined(MPK_TIER_AVX512)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return (vf)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xbf80))));
#elif defined(MPK_TIER_AVX2)
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return (vf)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(short(0xbf80))));
#else
    f16 halves[kLanes];
    for (int i = 0; i < kLanes; i++) halves[i].bits = static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7);
    return load_vec(halves);
#endif
  }
  // Whether one of kQuantizedStep weights is NaN.
  static MPK_INLINE bool has_nan(const uint8_t* p) {
#if defined(MPK_TIER_AVX512)
    const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(0x7f));
    return _mm512_cmpeq_epi8_mask(magnitude, _mm512_set1_epi8(0x7f)) != 0;
#elif defined(MPK_TIER_AVX2)
    const __m256i most = _mm256_set1_epi8(0x7f);
    const __m256i magnitude = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), most);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(magnitude, most)) != 0;
#else
    bool found = false;
    for (int i = 0; i < kQuantizedStep; i++) found |= (p[i] & 0x7f) == 0x7f;
    return found;
#endif
  }
};

struct WeightsI8 {
  static constexpr float kScale = 1;

  static MPK_INLINE vf load(const uint8_t* p) {
#if defined(MPK_TIER_AVX512)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(MPK_TIER_AVX2)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    vf v;
    for (int i = 0; i < kLanes; i++) v[i] = static_cast<int8_t>(p[i]);
    return v;
#endif
  }
  static MPK_INLINE bool has_nan(const uint8_t*) { return false; }
};

int64_t quantized_pitch(int64_t run) { return (run + kQuantizedStep - 1) / kQuantizedStep * kQuantizedStep; }

// kRows weight rows times kCols rows of x.
template <class W, int kRows, int kCols>
MPK_INLINE void quantized_rows(const QuantizedArgs& a, const int64_t* rows, int64_t first_col, int64_t pitch) {
  const int64_t runs = (a.k + a.run - 1) / a.run;
  const uint8_t* w[kRows];
  vf total[kRows][kCols] = {};
  bool nan[kRows] = {};
  for (int i = 0; i < kRows; i++) w[i] = a.weight + rows[i] * a.weight_stride;
  for (int64_t run = 0; run < runs; run++) {
    const float* x = a.x + (first_col * runs + run) * pitch;
    const int64_t size = a.k - run * a.run < a.run ? a.k - run * a.run : a.run;
    vf acc[kRows][kCols] = {};
    int64_t k = 0;
    const auto step = [&](const uint8_t* const* from) {
      for (int i = 0; i < kRows; i++) nan[i] |= W::has_nan(from[i]);
      for (int v = 0; v < kQuantizedStep; v += kLanes)
        for (int i = 0; i < kRows; i++) {
          const vf weights = W::load(from[i] + v);
          for (int j = 0; j < kCols; j++)
            acc[i][j] = vec_fma(weights, load_vec(x + j * runs * pitch + k + v), acc[i][j]);
        }
    };
    for (; k + kQuantizedStep <= size; k += kQuantizedStep) {
      const uint8_t* from[kRows];
      for (int i = 0; i < kRows; i++) {
        from[i] = w[i] + run * a.run + k;
        __builtin_prefetch(from[i] + kPrefetchBytes);
      }
      step(from);
    }
    if (k < size) {
      uint8_t whole[kRows][kQuantizedStep] = {};
      const uint8_t* from[kRows];
      for (int i = 0; i < kRows; i++) {
        __builtin_memcpy(whole[i], w[i] + run * a.run + k, size - k);
        from[i] = whole[i];
      }
      step(from);
    }
    for (int i = 0; i < kRows; i++) {
      const float of_weight = a.weight_factors[(rows[i] - a.begin) * a.weight_factors_stride + run] * W::kScale;
      for (int j = 0; j < kCols; j++)
        total[i][j] = vec_fma(acc[i][j], vf{} + of_weight * a.x_factors[(first_col + j) * runs + run], total[i][j]);
    }
  }
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kCols; j++)
      a.sums[(first_col + j) * (a.end - a.begin) + rows[i] - a.begin] =
          nan[i] ? __builtin_nanf("") : sum_lanes(total[i][j]);
}

template <class W, int kRows, int kCols = kMaxCols>
MPK_INLINE void quantized_cols(const QuantizedArgs& a, const int64_t* rows, int64_t first_col, int64_t pitch) {
  for (; first_col + kCols <= a.num_rows; first_col += kCols)
    quantized_rows<W, kRows, kCols>(a, rows, first_col, pitch);
  if constexpr (kCols > 1) {
    if (first_col < a.num_rows) quantized_cols<W, kRows, kCols - 1>(a, rows, first_col, pitch);
  }
}

template <class W>
void quantized(const QuantizedArgs& a) {
  const int64_t pitch = quantized_pitch(a.run < a.k ? a.run : a.k), length = (a.end - a.begin) / kRowStreams;
  for (int64_t n = 0; n < length; n++) {
    int64_t rows[kRowStreams];
    for (int i = 0; i < kRowStreams; i++) rows[i] = a.begin + i * length + n;
    quantized_cols<W, kRowStreams>(a, rows, 0, pitch);
  }
  for (int64_t n = a.begin + kRowStreams * length; n < a.end; n++) quantized_cols<W, 1>(a, &n, 0, pitch);
}

// Round to nearest, ties to even. Behind the clamp a magnitude is at most 448, or NaN. Below 2^-6 numbers are multiples
// of 2^-9, which the sum with 2^14 rounds to; else 20 bits of the mantissa go.
void round_e4m3(float* values, int64_t n, float scale) {
  for (int64_t i = 0; i < n; i++) {
    const float v = values[i] / scale;
    float magnitude = as_float(as_bits(v) & 0x7fffffffu);
    magnitude = magnitude > 448 ? 448 : magnitude;
    const uint32_t bits = as_bits(magnitude);
    const float normal = as_float((bits + 0x7ffff + (bits >> 20 & 1)) & 0xfff00000u);
    const float denormal = magnitude + 0x1p14f - 0x1p14f;
    float rounded = magnitude < 0x1p-6f ? denormal : normal;
    rounded = magnitude != magnitude ? magnitude : rounded;
    values[i] = as_float(as_bits(rounded) | (as_bits(v) & 0x80000000u));
  }
}
