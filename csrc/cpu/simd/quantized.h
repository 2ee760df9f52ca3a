// Matrix times few vectors, with weights in bytes, which are converted in registers once for several rows of x.
//
// The order of an output element's sum depends on K and on the runs alone.
#pragma once

// Two vectors of weights.
constexpr int kQuantizedStep = 2 * kLanes;
constexpr int kWideBytes = 64;  // of weights that a wide step converts at a time

#if defined(MPK_TIER_AVX512)
// A magnitude of e4m3 in bfloat16, NaN included.
constexpr int kNumMagnitudesE4M3 = 128;
MPK_INLINE uint16_t magnitude_e4m3(int m) {
  const float value = m < 8 ? m * 0x1p-9f : as_float((static_cast<uint32_t>(m) << 20) + (120u << 23));
  return m == kNumMagnitudesE4M3 - 1 ? 0x7fc0 : static_cast<uint16_t>(as_bits(value) >> 16);
}

// e4m3 by a table of its magnitudes. Arithmetic would produce denormals, which some processors handle a hundred times
// more slowly.
struct WeightsE4M3 {
  static constexpr float kScale = 1;
  static constexpr int kPacked = 1;  // weights to a byte
  __m512i table[4];

  MPK_INLINE explicit WeightsE4M3(const float*) {
    alignas(64) uint16_t magnitudes[kNumMagnitudesE4M3];
    for (int m = 0; m < kNumMagnitudesE4M3; m++) magnitudes[m] = magnitude_e4m3(m);
    for (int i = 0; i < 4; i++) table[i] = _mm512_load_si512(magnitudes + 32 * i);
  }
  MPK_INLINE void load(const uint8_t* p, vf (&out)[2]) const {
    const __m512i w = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i magnitude = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(w, _mm512_set1_epi16(0x40)),
                                                      _mm512_permutex2var_epi16(table[0], w, table[1]),
                                                      _mm512_permutex2var_epi16(table[2], w, table[3]));
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(w, _mm512_set1_epi16(0x80)), 8);
    const __m512i numbers = _mm512_or_si512(magnitude, sign);  // of bfloat16
    out[0] = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(numbers)), 16);
    out[1] = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(numbers, 1)), 16);
  }
  MPK_INLINE bool has_nan(const uint8_t*) const { return false; }  // it is among the numbers
};
#else
struct WeightsE4M3 {
  static constexpr int kPacked = 1;
  MPK_INLINE explicit WeightsE4M3(const float*) {}
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
  MPK_INLINE void load(const uint8_t* p, vf (&out)[2]) const {
    for (int v = 0; v < 2; v++) out[v] = load_vector(p + v * kLanes);
  }
  // Whether one of kQuantizedStep weights is NaN, which numbers have as 480.
  MPK_INLINE bool has_nan(const uint8_t* p) const {
#if defined(MPK_TIER_AVX2)
    const __m128i most = _mm_set1_epi8(0x7f);
    const __m128i magnitude = _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), most);
    return _mm_movemask_epi8(_mm_cmpeq_epi8(magnitude, most)) != 0;
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
  static constexpr int kPacked = 1;
  MPK_INLINE explicit WeightsI8(const float*) {}

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
  MPK_INLINE void load(const uint8_t* p, vf (&out)[2]) const {
    for (int v = 0; v < 2; v++) out[v] = load_vector(p + v * kLanes);
  }
  MPK_INLINE bool has_nan(const uint8_t*) const { return false; }
};

// Two to a byte, the first in the low bits; in the high ones where they are looked up.
template <WeightCode kCode>
struct Weights4 : Numbers4<kCode> {
  static constexpr float kScale = 1;
  static constexpr int kPacked = 2;
  static constexpr int kFirst = kCode == WeightCode::kTable ? 4 : 0;  // bits below the first of two
  MPK_INLINE explicit Weights4(const float* codebook) : Numbers4<kCode>(codebook) {}

  // The first ones of all pairs, and the second ones: x is arranged in the same way.
  MPK_INLINE void load(const uint8_t* p, vf (&out)[2]) const {
    const vu bytes = this->readable(load_bytes(p));
    out[0] = this->template at<kFirst>(bytes), out[1] = this->template at<4 - kFirst>(bytes);
  }
#if defined(MPK_TIER_AVX512)
  // 32 weights as bfloat16, in their order: the second of a pair moves to the high half of a lane.
  MPK_INLINE __m512i words(const uint8_t* p) const
    requires(kCode != WeightCode::kTable)
  {
    const vu bytes = load_bytes(p);
    return this->template halves<0>((__m512i)(bytes | bytes << 12));
  }
#endif
  MPK_INLINE bool has_nan(const uint8_t*) const { return false; }
};

#if defined(MPK_TIER_AVX512_BF16)
// e4m3 as bfloat16, by a table of the high and one of the low bytes of its 128 magnitudes.
struct PairsE4M3 {
  static constexpr float kScale = 1;
  static constexpr int kPacked = 1;
  __m512i high[2], low[2];

  MPK_INLINE explicit PairsE4M3(const float*) {
    alignas(64) uint8_t bytes[2][kNumMagnitudesE4M3];
    for (int m = 0; m < kNumMagnitudesE4M3; m++) {
      const uint16_t bits = magnitude_e4m3(m);
      bytes[0][m] = static_cast<uint8_t>(bits >> 8), bytes[1][m] = static_cast<uint8_t>(bits);
    }
    for (int i = 0; i < 2; i++)
      high[i] = _mm512_load_si512(bytes[0] + 64 * i), low[i] = _mm512_load_si512(bytes[1] + 64 * i);
  }
  MPK_INLINE __m512i high_bytes(__m512i weights) const {
    constexpr int kOrBoth = 0xf8;  // the first, or both others
    return _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high[0], weights, high[1]), weights,
                                     _mm512_set1_epi8(static_cast<char>(0x80)), kOrBoth);
  }
  MPK_INLINE __m512i low_bytes(__m512i weights) const { return _mm512_permutex2var_epi8(low[0], weights, low[1]); }

  // 64 weights: of each 16, the first eight are in `out[0]`, the others in `out[1]`.
  MPK_INLINE void wide(const uint8_t* p, __m512i (&out)[2]) const {
    const __m512i weights = _mm512_loadu_si512(p), highs = high_bytes(weights), lows = low_bytes(weights);
    out[0] = _mm512_unpacklo_epi8(lows, highs), out[1] = _mm512_unpackhi_epi8(lows, highs);
  }
  // 32 weights in their order.
  MPK_INLINE __m512i words(const uint8_t* p) const {
    const __m512i once = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i twice = _mm512_or_si512(once, _mm512_slli_epi16(once, 8));
    return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaaull, low_bytes(twice), high_bytes(twice));
  }
  MPK_INLINE bool has_nan(const uint8_t*) const { return false; }
};
#endif

int64_t quantized_pitch(int64_t run) { return (run + kQuantizedStep - 1) / kQuantizedStep * kQuantizedStep; }

MPK_INLINE void to_x(float v, float* p) { *p = v; }
MPK_INLINE void to_x(float v, bf16* p) { p->bits = static_cast<uint16_t>(as_bits(v) >> 16); }  // v is such a number

// Moves a chunk of x, kParts * kSize elements: of each kParts * kTogether the first kTogether come first, then the next
// ones of each, and so on.
template <int kParts, int kSize, int kTogether = 1, class T>
MPK_INLINE void arrange_chunk(const float* from, T* to) {
  for (int part = 0; part < kParts; part++)
    for (int i = 0; i < kSize; i++)
      to_x(from[(i / kTogether * kParts + part) * kTogether + i % kTogether], to + part * kSize + i);
}

// Writes a run of x, from element `at` on, and zeros up to its pitch: in chunks of kWide elements and kWideParts parts,
// as long as there are whole ones, and behind these in chunks of kParts * kSize elements.
template <class T, int kParts = 1, int kSize = kQuantizedStep, int kWide = 0, int kWideParts = 0, int kTogether = 1>
void arrange_x(const float* values, int64_t n, void* x, int64_t at) {
  constexpr int kChunk = kParts * kSize;
  auto* to = static_cast<T*>(x) + at;
  const int64_t pitch = quantized_pitch(n);
  int64_t k = 0;
  if constexpr (kWideParts > 0)
    for (; k + kWide <= n; k += kWide) arrange_chunk<kWideParts, kWide / kWideParts, kTogether>(values + k, to + k);
  for (; k + kChunk <= n; k += kChunk) arrange_chunk<kParts, kSize>(values + k, to + k);
  for (; k < pitch; k += kChunk) {
    float rest[kChunk] = {};
    for (int64_t i = k; i < n; i++) rest[i - k] = values[i];
    arrange_chunk<kParts, kSize>(rest, to + k);
  }
}

// How a step of weights is multiplied with x: as floats or, if the processor multiplies them, as pairs of bfloat16.
struct FloatX {
  using T = float;
  template <class W>
  static constexpr int kWideParts = kVecBytes == 64 && W::kPacked == 2 ? 8 : 0;  // that x of a wide step has
  template <class W>
  static constexpr int kTogether = 1;  // neighbours that are in the same part

  template <class W, int kCols>
  static MPK_INLINE void add_wide(const W& w, const uint8_t* from, const T* x, int64_t pitch, vf (&acc)[kCols]) {
    add_parts(w, *reinterpret_cast<const vu_unaligned*>(from), x, pitch, acc, typename MakeSequence<8>::type{});
  }
  template <class W, int kCols, int... part>
  static MPK_INLINE void add_parts(const W& w, vu words, const T* x, int64_t pitch, vf (&acc)[kCols],
                                   Sequence<part...>) {
    (add_part(w.template at<4 * part ^ W::kFirst>(words), x + part * kLanes, pitch, acc), ...);
  }
  template <int kCols>
  static MPK_INLINE void add_part(vf weights, const T* x, int64_t pitch, vf (&acc)[kCols]) {
    for (int j = 0; j < kCols; j++) acc[j] = vec_fma(weights, load_vec(x + j * pitch), acc[j]);
  }

  template <class W, int kCols>
  static MPK_INLINE void add(const W& w, const uint8_t* from, const T* x, int64_t pitch, vf (&acc)[kCols]) {
    vf weights[2];
    w.load(from, weights);
    for (int v = 0; v < 2; v++)
      for (int j = 0; j < kCols; j++) acc[j] = vec_fma(weights[v], load_vec(x + j * pitch + v * kLanes), acc[j]);
  }
};
#if defined(MPK_TIER_AVX512_BF16)
struct PairsX {
  using T = bf16;
  template <class W>
  static constexpr int kWideParts = W::kPacked == 2 ? 4 : 2;
  template <class W>
  static constexpr int kTogether = W::kPacked == 2 ? 1 : 8;

  template <class W, int kCols>
  static MPK_INLINE void add_wide(const W& w, const uint8_t* from, const T* x, int64_t pitch, vf (&acc)[kCols]) {
    const auto add_part = [&](__m512i weights, int part) __attribute__((always_inline)) {
      for (int j = 0; j < kCols; j++)
        acc[j] = (vf)_mm512_dpbf16_ps((__m512)acc[j], (__m512bh)weights,
                                      (__m512bh)_mm512_loadu_si512(x + j * pitch + part * kQuantizedStep));
    };
    if constexpr (W::kPacked == 1) {
      __m512i weights[2];
      w.wide(from, weights);
      add_part(weights[0], 0), add_part(weights[1], 1);
    } else {
      const __m512i bytes = _mm512_loadu_si512(from);
      add_part(w.template halves<0>(bytes), 0), add_part(w.template halves<4>(bytes), 1);
      add_part(w.template halves<8>(bytes), 2), add_part(w.template halves<12>(bytes), 3);
    }
  }
  template <class W, int kCols>
  static MPK_INLINE void add(const W& w, const uint8_t* from, const T* x, int64_t pitch, vf (&acc)[kCols]) {
    const __m512i weights = w.words(from);
    for (int j = 0; j < kCols; j++)
      acc[j] = (vf)_mm512_dpbf16_ps((__m512)acc[j], (__m512bh)weights, (__m512bh)_mm512_loadu_si512(x + j * pitch));
  }
};
#endif

// (GCC's code for an initialiser of many vectors is a loop over words.)
template <int kRows, int kCols>
MPK_INLINE void set_zero(vf (&sums)[kRows][kCols]) {
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kCols; j++) sums[i][j] = vf{};
}

// Adds the offset of each run, which its zero points make, times the sum of its x.
template <int kRows, int kCols>
MPK_INLINE void add_offsets(const QuantizedArgs& a, const int64_t* rows, int64_t first_col, vf (&total)[kRows][kCols]) {
  for (int64_t run = 0; run < a.num_blocks; run += kLanes) {
    const auto load = [&](const float* p) __attribute__((always_inline)) {
      return run + kLanes <= a.num_blocks ? load_vec(p + run) : load_vec_partial(p + run, a.num_blocks - run);
    };
    vf sums[kCols];
    for (int j = 0; j < kCols; j++) sums[j] = load(a.x_sums + (first_col + j) * a.num_blocks);
    for (int i = 0; i < kRows; i++) {
      const vf offsets = load(a.offsets + rows[i] * a.factors_stride);
      for (int j = 0; j < kCols; j++) total[i][j] = vec_fma(offsets, sums[j], total[i][j]);
    }
  }
}

// As many numbers as there are parts of a vector, each in all lanes of its part.
MPK_INLINE vf repeat(const float* values, int64_t parts) {
  vf lanes;
#if defined(MPK_TIER_AVX512)
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int shift = __builtin_ctzll(kLanes / parts);
  lanes = (vf)_mm512_permutexvar_ps((__m512i)(lane >> shift), (__m512)load_vec_partial(values, parts));
#else
  for (int i = 0; i < kLanes; i++) lanes[i] = values[i * parts / kLanes];
#endif
  return lanes;
}

// kRows weight rows times kCols rows of x.
template <class W, class X, int kRows, int kCols>
MPK_INLINE void quantized_rows(const QuantizedArgs& a, const W& w, const int64_t* rows, int64_t first_col) {
  const int64_t runs = (a.k + a.run - 1) / a.run, pitch = quantized_pitch(a.run);
  const int64_t parts = X::template kWideParts<W> > 0 ? a.num_blocks / runs : 1;  // of a run, with factors of their own
  const uint8_t* weights[kRows];
  const float* factors[kRows];
  vf total[kRows][kCols];
  set_zero(total);
  bool nan[kRows] = {};
  for (int i = 0; i < kRows; i++)
    weights[i] = a.weight + rows[i] * a.weight_stride, factors[i] = a.factors + rows[i] * a.factors_stride;
  for (int64_t run = 0; run < runs; run++) {
    const auto* x = static_cast<const typename X::T*>(a.x) + (first_col * runs + run) * pitch;
    const int64_t size = a.k - run * a.run < a.run ? a.k - run * a.run : a.run;
    vf acc[kRows][kCols];
    set_zero(acc);
    int64_t k = 0;
    if constexpr (X::template kWideParts<W> > 0)
      for (; k + kWideBytes * W::kPacked <= size; k += kWideBytes * W::kPacked)
        for (int i = 0; i < kRows; i++) {
          const uint8_t* from = weights[i] + (run * a.run + k) / W::kPacked;
          __builtin_prefetch(from + kPrefetchBytes);
          X::add_wide(w, from, x + k, runs * pitch, acc[i]);
        }
    for (; k + kQuantizedStep <= size; k += kQuantizedStep)
      for (int i = 0; i < kRows; i++) {
        const uint8_t* from = weights[i] + (run * a.run + k) / W::kPacked;
        if (k % (64 * W::kPacked) == 0) __builtin_prefetch(from + kPrefetchBytes);
        nan[i] |= w.has_nan(from);
        X::add(w, from, x + k, runs * pitch, acc[i]);
      }
    if (k < size)
      for (int i = 0; i < kRows; i++) {
        uint8_t whole[kQuantizedStep] = {};
        __builtin_memcpy(whole, weights[i] + (run * a.run + k) / W::kPacked, (size - k) / W::kPacked);
        nan[i] |= w.has_nan(whole);
        X::add(w, whole, x + k, runs * pitch, acc[i]);
      }
    if (a.x_factors != nullptr)
      for (int i = 0; i < kRows; i++)
        for (int j = 0; j < kCols; j++) acc[i][j] *= a.x_factors[(first_col + j) * runs + run];
    for (int i = 0; i < kRows; i++) {
      const vf factor = parts == 1 ? splat(factors[i][run] * W::kScale) : repeat(factors[i] + run * parts, parts);
      for (int j = 0; j < kCols; j++) total[i][j] = vec_fma(acc[i][j], factor, total[i][j]);
    }
  }
  if (a.offsets != nullptr) add_offsets<kRows, kCols>(a, rows, first_col, total);
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kCols; j++)
      a.sums[(first_col + j - a.begin) * a.num_weight_rows + rows[i]] =
          nan[i] ? __builtin_nanf("") : sum_lanes(total[i][j]);
}

template <class W, class X, int kRows, int kCols>
MPK_INLINE void quantized_cols(const QuantizedArgs& a, const W& w, const int64_t* rows, int64_t first_col) {
  for (; first_col + kCols <= a.end; first_col += kCols) quantized_rows<W, X, kRows, kCols>(a, w, rows, first_col);
  if constexpr (kCols > 1) {
    if (first_col < a.end) quantized_cols<W, X, kRows, kCols - 1>(a, w, rows, first_col);
  }
}

template <class W, class X, int kRows, int kCols>
MPK_INLINE void quantized_by(const QuantizedArgs& a) {
  const W w(a.codebook);
  const int64_t length = a.num_weight_rows / kRows;
  for (int64_t n = 0; n < length; n++) {
    int64_t rows[kRows];
    for (int i = 0; i < kRows; i++) rows[i] = i * length + n;
    quantized_cols<W, X, kRows, kCols>(a, w, rows, a.begin);
  }
  for (int64_t n = kRows * length; n < a.num_weight_rows; n++) quantized_cols<W, X, 1, kCols>(a, w, &n, a.begin);
}

// Registers suffice for the sums of a run, and for all of them, of as many rows of weights as this times rows of x.
template <class W, class X>
void quantized(const QuantizedArgs& a) {
  constexpr int kCols = kMaxCols / 2;
  a.end - a.begin > kCols ? quantized_by<W, X, kRowStreams / 2, kMaxCols>(a)
                          : quantized_by<W, X, kRowStreams, kCols>(a);
}

// The largest magnitude, or NaN where there is one: bits of magnitudes are in the order of magnitudes.
float largest_magnitude(const float* values, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = as_bits(values[i]) & 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  return as_float(largest);
}

float sum_of(const float* values, int64_t n) {
  vf sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int v = 0; v < 4; v++) sums[v] += load_vec(values + i + v * kLanes);
  const vf lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float sum = 0;
  for (int lane = 0; lane < kLanes; lane++) sum += lanes[lane];
  for (; i < n; i++) sum += values[i];
  return sum;
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
