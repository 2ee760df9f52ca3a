// Matrix times few vectors, with weights in bytes, which are converted in registers once for several rows of x.
//
// The order of an output element's sum depends on K and on the runs alone.
#pragma once

// Four vectors of weights: where a weight has a byte they are one register wide, or a part of one.
constexpr int kQuantizedStep = 4 * kLanes;

#if defined(MPK_TIER_AVX512)
// e4m3 by a table of its 128 magnitudes in bfloat16, NaN included. Arithmetic would produce denormals, which some
// processors handle a hundred times more slowly.
struct WeightsE4M3 {
  static constexpr bool kIsFinite = false;
  static constexpr float kScale = 1;
  static constexpr int kPacked = 1;  // weights to a byte
  __m512i table[4];

  MPK_INLINE WeightsE4M3() {
    alignas(64) uint16_t magnitudes[128];
    for (int m = 0; m < 128; m++) {
      const float value = m < 8 ? m * 0x1p-9f : as_float((static_cast<uint32_t>(m) << 20) + (120u << 23));
      magnitudes[m] = m == 127 ? 0x7fc0 : static_cast<uint16_t>(as_bits(value) >> 16);
    }
    for (int i = 0; i < 4; i++) table[i] = _mm512_load_si512(magnitudes + 32 * i);
  }
  // 32 weights as bfloat16.
  MPK_INLINE __m512i words(const uint8_t* p) const {
    const __m512i w = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i magnitude = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(w, _mm512_set1_epi16(0x40)),
                                                      _mm512_permutex2var_epi16(table[0], w, table[1]),
                                                      _mm512_permutex2var_epi16(table[2], w, table[3]));
    return _mm512_or_si512(magnitude, _mm512_slli_epi16(_mm512_and_si512(w, _mm512_set1_epi16(0x80)), 8));
  }
  MPK_INLINE void load(const uint8_t* p, vf (&out)[4]) const {
    for (int half = 0; half < 2; half++) {
      const __m512i w = words(p + 32 * half);
      out[2 * half] = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(w)), 16);
      out[2 * half + 1] = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(w, 1)), 16);
    }
  }
  MPK_INLINE bool has_nan(const uint8_t*) const { return false; }  // it is among the numbers
};
#else
struct WeightsE4M3 {
  static constexpr bool kIsFinite = false;
  static constexpr int kPacked = 1;
#if defined(MPK_TIER_AVX2)
  static constexpr float kScale = 1;

  // Below 2^-6 there is no implicit one, so it is subtracted again. No intermediate is a denormal.
  static MPK_INLINE vf load_vector(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256i bits = _mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(0x7f)), 20);
    const __m256 value = _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(120 << 23)));
    const __m256 less = _mm256_fmsub_ps(value, _mm256_set1_ps(2), _mm256_set1_ps(0x1p-6f));
    const __m256 is_less = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(1 << 23), bits));
    const __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(0x80)), 24));
    return (vf)_mm256_or_ps(_mm256_blendv_ps(value, less, is_less), sign);
  }
#else
  static constexpr float kScale = 256;

  // In a half's place, exponent and mantissa give 2^-8 of the number, denormals included.
  static MPK_INLINE vf load_vector(const uint8_t* p) {
    f16 halves[kLanes];
    for (int i = 0; i < kLanes; i++) halves[i].bits = static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7);
    return load_vec(halves);
  }
#endif
  MPK_INLINE void load(const uint8_t* p, vf (&out)[4]) const {
    for (int v = 0; v < 4; v++) out[v] = load_vector(p + v * kLanes);
  }
  // Whether one of kQuantizedStep weights is NaN, which numbers have as 480.
  MPK_INLINE bool has_nan(const uint8_t* p) const {
#if defined(MPK_TIER_AVX2)
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
#endif

struct WeightsI8 {
  static constexpr float kScale = 1;
  static constexpr bool kIsFinite = true;
  static constexpr int kPacked = 1;

  static MPK_INLINE vf load_vector(const uint8_t* p) {
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
  MPK_INLINE void load(const uint8_t* p, vf (&out)[4]) const {
    for (int v = 0; v < 4; v++) out[v] = load_vector(p + v * kLanes);
  }
  MPK_INLINE bool has_nan(const uint8_t*) const { return false; }
};

// The numbers that codes of 4 bits stand for, over a scale: -8 to 7 as they are; these where 8 more is stored; e2m1,
// whose numbers are halves of integers.
struct SignedCodes {
  static constexpr float kScale = 1;
  static constexpr int number(int code) { return (code ^ 8) - 8; }
};
struct CodesAbove8 {
  static constexpr float kScale = 1;
  static constexpr int number(int code) { return code - 8; }
};
struct CodesE2M1 {
  static constexpr float kScale = 0.5f;
  static constexpr int number(int code) {
    constexpr int kMagnitudes[] = {0, 1, 2, 3, 4, 6, 8, 12};
    return code < 8 ? kMagnitudes[code] : -kMagnitudes[code - 8];
  }
};

// Two to a byte, the first in its low bits.
template <class Codes>
struct Weights4 {
  static constexpr float kScale = Codes::kScale;
  static constexpr bool kIsFinite = true;
  static constexpr int kPacked = 2;
#if defined(MPK_TIER_AVX512)
  __m512i table;  // the numbers of all codes, in bfloat16

  MPK_INLINE Weights4() {
    alignas(64) uint16_t numbers[32];
    for (int code = 0; code < 32; code++)
      numbers[code] = static_cast<uint16_t>(as_bits(static_cast<float>(Codes::number(code & 15))) >> 16);
    table = _mm512_load_si512(numbers);
  }
#elif defined(MPK_TIER_AVX2)
  __m256i table;  // the same in bytes, twice

  MPK_INLINE Weights4() {
    alignas(32) int8_t numbers[32];
    for (int code = 0; code < 32; code++) numbers[code] = static_cast<int8_t>(Codes::number(code & 15));
    table = _mm256_load_si256(reinterpret_cast<const __m256i*>(numbers));
  }
#endif
#if defined(MPK_TIER_AVX2) || defined(MPK_TIER_AVX512)
  // The codes of 16 bytes, each in a byte.
  static MPK_INLINE __m256i codes(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), most = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(bytes, most), high = _mm_and_si128(_mm_srli_epi16(bytes, 4), most);
    return _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
  }
#endif
#if defined(MPK_TIER_AVX512)
  // 32 weights as bfloat16.
  MPK_INLINE __m512i words(const uint8_t* p) const {
    return _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(codes(p)), table);
  }
  MPK_INLINE void load(const uint8_t* p, vf (&out)[4]) const {
    for (int half = 0; half < 2; half++) {
      const __m512i w = words(p + 16 * half);
      out[2 * half] = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(w)), 16);
      out[2 * half + 1] = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(w, 1)), 16);
    }
  }
#elif defined(MPK_TIER_AVX2)
  MPK_INLINE void load(const uint8_t* p, vf (&out)[4]) const {
    const __m256i numbers = _mm256_shuffle_epi8(table, codes(p));
    const __m128i halves[2] = {_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1)};
    for (int v = 0; v < 4; v++) {
      const __m128i eight = v % 2 == 0 ? halves[v / 2] : _mm_srli_si128(halves[v / 2], 8);
      out[v] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
    }
  }
#else
  MPK_INLINE void load(const uint8_t* p, vf (&out)[4]) const {
    for (int v = 0; v < 4; v++, p += kLanes / 2) {
      vf numbers;
      for (int i = 0; i < kLanes; i++) numbers[i] = static_cast<float>(Codes::number(p[i / 2] >> i % 2 * 4 & 15));
      out[v] = numbers;
    }
  }
#endif
  MPK_INLINE bool has_nan(const uint8_t*) const { return false; }
};

// Whether weights can be had as words, which are bfloat16.
template <class W>
constexpr bool kHasWords = requires(const W& w, const uint8_t* p) { w.words(p); };

int64_t quantized_pitch(int64_t run) { return (run + kQuantizedStep - 1) / kQuantizedStep * kQuantizedStep; }

// How a step of weights, or its first half, is multiplied with x: as floats or, if the processor multiplies them, as
// pairs of bfloat16.
struct FloatX {
  using T = float;
  template <int kHalves, class W, int kCols>
  static MPK_INLINE void add(const W& w, const uint8_t* from, const T* x, int64_t pitch, vf (&acc)[kCols]) {
    vf weights[4];
    w.load(from, weights);
    for (int v = 0; v < 2 * kHalves; v++)
      for (int j = 0; j < kCols; j++) acc[j] = vec_fma(weights[v], load_vec(x + j * pitch + v * kLanes), acc[j]);
  }
};
#if defined(MPK_TIER_AVX512_BF16)
struct PairsX {
  using T = bf16;
  template <int kHalves, class W, int kCols>
  static MPK_INLINE void add(const W& w, const uint8_t* from, const T* x, int64_t pitch, vf (&acc)[kCols]) {
    for (int half = 0; half < kHalves; half++) {
      const __m512i weights = w.words(from + 32 * half / W::kPacked);
      for (int j = 0; j < kCols; j++)
        acc[j] = (vf)_mm512_dpbf16_ps((__m512)acc[j], (__m512bh)weights,
                                      (__m512bh)_mm512_loadu_si512(x + j * pitch + 32 * half));
    }
  }
};
#endif

// Adds the offset of each run, which its zero points make, times the sum of its x.
template <int kRows, int kCols>
MPK_INLINE void add_offsets(const QuantizedArgs& a, const int64_t* rows, int64_t first_col, vf (&total)[kRows][kCols]) {
  for (int64_t run = 0; run < a.offsets_stride; run += kLanes)
    for (int i = 0; i < kRows; i++) {
      const vf offsets = load_vec(a.offsets + (rows[i] - a.begin) * a.offsets_stride + run);
      for (int j = 0; j < kCols; j++)
        total[i][j] = vec_fma(offsets, load_vec(a.x_sums + (first_col + j) * a.offsets_stride + run), total[i][j]);
    }
}

// kRows weight rows times kCols rows of x.
template <class W, class X, int kRows, int kCols>
MPK_INLINE void quantized_rows(const QuantizedArgs& a, const W& w, const typename X::T* all_x, const int64_t* rows,
                               int64_t first_col, int64_t pitch) {
  const int64_t runs = (a.k + a.run - 1) / a.run;
  const uint8_t* weights[kRows];
  vf total[kRows][kCols] = {};
  bool nan[kRows] = {};
  for (int i = 0; i < kRows; i++) weights[i] = a.weight + rows[i] * a.weight_stride;
  for (int64_t run = 0; run < runs; run++) {
    const auto* x = all_x + (first_col * runs + run) * pitch;
    const int64_t size = a.k - run * a.run < a.run ? a.k - run * a.run : a.run;
    vf acc[kRows][kCols] = {};
    int64_t k = 0;
    for (; k + kQuantizedStep <= size; k += kQuantizedStep)
      for (int i = 0; i < kRows; i++) {
        const uint8_t* from = weights[i] + (run * a.run + k) / W::kPacked;
        __builtin_prefetch(from + kPrefetchBytes);
        nan[i] |= w.has_nan(from);
        X::template add<2>(w, from, x + k, runs * pitch, acc[i]);
      }
    // What is less than a step is read where it is, if the row goes on behind it: x has zeros there.
    if (W::kIsFinite && k < size && run * a.run + k + kQuantizedStep <= a.k) {
      const bool is_half = size - k <= kQuantizedStep / 2;
      for (int i = 0; i < kRows; i++) {
        const uint8_t* from = weights[i] + (run * a.run + k) / W::kPacked;
        __builtin_prefetch(from + kPrefetchBytes);
        is_half ? X::template add<1>(w, from, x + k, runs * pitch, acc[i])
                : X::template add<2>(w, from, x + k, runs * pitch, acc[i]);
      }
    } else if (k < size) {
      for (int i = 0; i < kRows; i++) {
        uint8_t whole[kQuantizedStep] = {};
        __builtin_memcpy(whole, weights[i] + (run * a.run + k) / W::kPacked, (size - k) / W::kPacked);
        nan[i] |= w.has_nan(whole);
        X::template add<2>(w, whole, x + k, runs * pitch, acc[i]);
      }
    }
    for (int i = 0; i < kRows; i++) {
      const float of_weight = a.weight_factors[(rows[i] - a.begin) * a.weight_factors_stride + run] * W::kScale;
      for (int j = 0; j < kCols; j++)
        total[i][j] = vec_fma(acc[i][j], vf{} + of_weight * a.x_factors[(first_col + j) * runs + run], total[i][j]);
    }
  }
  if (a.offsets != nullptr) add_offsets<kRows, kCols>(a, rows, first_col, total);
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kCols; j++)
      a.sums[(first_col + j) * (a.end - a.begin) + rows[i] - a.begin] =
          nan[i] ? __builtin_nanf("") : sum_lanes(total[i][j]);
}

template <class W, class X, int kRows, int kCols = kMaxCols>
MPK_INLINE void quantized_cols(const QuantizedArgs& a, const W& w, const typename X::T* x, const int64_t* rows,
                               int64_t first_col, int64_t pitch) {
  for (; first_col + kCols <= a.num_rows; first_col += kCols)
    quantized_rows<W, X, kRows, kCols>(a, w, x, rows, first_col, pitch);
  if constexpr (kCols > 1) {
    if (first_col < a.num_rows) quantized_cols<W, X, kRows, kCols - 1>(a, w, x, rows, first_col, pitch);
  }
}

template <class W, class X>
MPK_INLINE void quantized_by(const QuantizedArgs& a, const typename X::T* x, int64_t pitch) {
  const W w;
  const int64_t length = (a.end - a.begin) / kRowStreams;
  for (int64_t n = 0; n < length; n++) {
    int64_t rows[kRowStreams];
    for (int i = 0; i < kRowStreams; i++) rows[i] = a.begin + i * length + n;
    quantized_cols<W, X, kRowStreams>(a, w, x, rows, 0, pitch);
  }
  for (int64_t n = a.begin + kRowStreams * length; n < a.end; n++) quantized_cols<W, X, 1>(a, w, x, &n, 0, pitch);
}

template <class W>
void quantized(const QuantizedArgs& a) {
  const int64_t pitch = quantized_pitch(a.run < a.k ? a.run : a.k);
#if defined(MPK_TIER_AVX512_BF16)
  if constexpr (kHasWords<W>) {
    if (a.x_is_bf16) {
      auto* pairs = reinterpret_cast<bf16*>(a.scratch);
      const int64_t count = a.num_rows * ((a.k + a.run - 1) / a.run) * pitch;
      for (int64_t i = 0; i < count; i++) pairs[i].bits = static_cast<uint16_t>(as_bits(a.x[i]) >> 16);
      return quantized_by<W, PairsX>(a, pairs, pitch);
    }
  }
#endif
  quantized_by<W, FloatX>(a, a.x, pitch);
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
