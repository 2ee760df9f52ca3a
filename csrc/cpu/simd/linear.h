// Matrix times few vectors: every weight row is read from memory once, and multiplied with all rows of x.
//
// The order of an output element's sum depends only on K: neither on the rows computed beside it nor on the thread.
#pragma once

// How a vector register of weights is multiplied with x. `X`: the type of x's copy, which is expanded once, and
// zero-padded to whole chunks.
struct ChunkF32 {
  using T = float;
  static constexpr int kElems = kLanes;
  struct W {
    vf w;
  };
  using X = W;
  static MPK_INLINE W load(const uint8_t* p) { return {load_vec(reinterpret_cast<const float*>(p))}; }
  static MPK_INLINE X expand(const uint8_t* p) { return load(p); }
  static MPK_INLINE vf fma(vf acc, const W& w, const X& x) { return vec_fma(w.w, x.w, acc); }
};

struct ChunkF16 {
  using T = f16;
  static constexpr int kElems = 2 * kLanes;
  struct W {
    vf low, high;
  };
  using X = W;
  static MPK_INLINE W load(const uint8_t* p) {
    return {load_vec(reinterpret_cast<const f16*>(p)), load_vec(reinterpret_cast<const f16*>(p) + kLanes)};
  }
  static MPK_INLINE X expand(const uint8_t* p) { return load(p); }
  static MPK_INLINE vf fma(vf acc, const W& w, const X& x) {
    return vec_fma(w.high, x.high, vec_fma(w.low, x.low, acc));
  }
};

#if defined(MPK_TIER_AVX512_BF16)
struct ChunkBF16 {
  using T = bf16;
  static constexpr int kElems = 2 * kLanes;
  struct W {
    __m512i pairs;
  };
  using X = W;
  static MPK_INLINE W load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
  static MPK_INLINE X expand(const uint8_t* p) { return load(p); }
  static MPK_INLINE vf fma(vf acc, const W& w, const X& x) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w.pairs, (__m512bh)x.pairs);
  }
};
#else
// A 32-bit lane holds two elements. A shift or a mask makes each a float, so x is kept as even and odd elements, too.
struct ChunkBF16 {
  using T = bf16;
  static constexpr int kElems = 2 * kLanes;
  struct W {
    vf even, odd;
  };
  using X = W;
  static MPK_INLINE W load(const uint8_t* p) {
    const vu pairs = *reinterpret_cast<const vu_unaligned*>(p);
    return {(vf)(pairs << 16), (vf)(pairs & 0xffff0000u)};
  }
  static MPK_INLINE X expand(const uint8_t* p) { return load(p); }
  static MPK_INLINE vf fma(vf acc, const W& w, const X& x) {
    return vec_fma(w.odd, x.odd, vec_fma(w.even, x.even, acc));
  }
};
#endif

constexpr int kRowStreams = 4;                     // weight rows read at a time
constexpr int kMaxCols = kVecBytes == 64 ? 4 : 2;  // rows of x per pass over them, limited by registers
constexpr int64_t kPrefetchBytes = 1024;           // ahead in each stream

MPK_INLINE float from_storage(float v) { return v; }
MPK_INLINE float from_storage(bf16 v) { return bf16_to_float(v); }
MPK_INLINE float from_storage(f16 v) { return f16_to_float(v); }
MPK_INLINE void to_storage(float v, float* p) { *p = v; }
MPK_INLINE void to_storage(float v, bf16* p) { *p = float_to_bf16(v); }
MPK_INLINE void to_storage(float v, f16* p) { *p = float_to_f16(v); }

// kRows weight rows times kCols rows of x.
template <class C, int kRows, int kCols>
MPK_INLINE void dot_rows(const LinearArgs& a, const int64_t* rows, const typename C::X* x, int64_t x_chunks,
                         int64_t first_col) {
  using T = typename C::T;
  const int64_t chunks = a.k / C::kElems, tail = a.k % C::kElems;
  const uint8_t* w[kRows];
  vf acc[kRows][kCols];
  for (int i = 0; i < kRows; i++) {
    w[i] = a.weight + rows[i] * a.weight_stride;
    for (int j = 0; j < kCols; j++) acc[i][j] = vf{};
  }
  for (int64_t c = 0; c < chunks; c++) {
    if (c % (64 / kVecBytes) == 0)
      for (int i = 0; i < kRows; i++) __builtin_prefetch(w[i] + c * kVecBytes + kPrefetchBytes);
    for (int i = 0; i < kRows; i++) {
      const typename C::W chunk = C::load(w[i] + c * kVecBytes);
      for (int j = 0; j < kCols; j++) acc[i][j] = C::fma(acc[i][j], chunk, x[j * x_chunks + c]);
    }
  }
  if (tail != 0)
    for (int i = 0; i < kRows; i++) {
      uint8_t whole[kVecBytes] = {};
      __builtin_memcpy(whole, w[i] + chunks * kVecBytes, tail * sizeof(T));
      const typename C::W chunk = C::load(whole);
      for (int j = 0; j < kCols; j++) acc[i][j] = C::fma(acc[i][j], chunk, x[j * x_chunks + chunks]);
    }
  for (int i = 0; i < kRows; i++) {
    const float bias = a.bias == nullptr ? 0.0f : from_storage(reinterpret_cast<const T*>(a.bias)[rows[i]]);
    for (int j = 0; j < kCols; j++) {
      const float sum = sum_lanes(acc[i][j]);
      T* y = reinterpret_cast<T*>(a.y + (first_col + j) * a.y_stride) + rows[i];
      to_storage(a.bias == nullptr ? sum : sum + bias, y);
    }
  }
}

template <class C, int kRows, int kCols = kMaxCols>
MPK_INLINE void dot_cols(const LinearArgs& a, const int64_t* rows, const typename C::X* x, int64_t x_chunks,
                         int64_t first_col, int64_t num_cols) {
  while (num_cols >= kCols) {
    dot_rows<C, kRows, kCols>(a, rows, x, x_chunks, first_col);
    x += kCols * x_chunks;
    first_col += kCols;
    num_cols -= kCols;
  }
  if constexpr (kCols > 1) {
    if (num_cols > 0) dot_cols<C, kRows, kCols - 1>(a, rows, x, x_chunks, first_col, num_cols);
  }
}

template <class C>
void linear(const LinearArgs& a) {
  const int64_t chunks = a.k / C::kElems, tail = a.k % C::kElems, x_chunks = chunks + (tail != 0);
  auto* x = reinterpret_cast<typename C::X*>(a.scratch);
  for (int64_t first = 0; first < a.num_rows; first += kLinearRowBlock) {
    const int64_t num_cols = a.num_rows - first < kLinearRowBlock ? a.num_rows - first : kLinearRowBlock;
    for (int64_t j = 0; j < num_cols; j++) {
      const uint8_t* row = a.x + (first + j) * a.x_stride;
      for (int64_t c = 0; c < chunks; c++) x[j * x_chunks + c] = C::expand(row + c * kVecBytes);
      if (tail != 0) {
        uint8_t whole[kVecBytes] = {};
        __builtin_memcpy(whole, row + chunks * kVecBytes, tail * sizeof(typename C::T));
        x[j * x_chunks + chunks] = C::expand(whole);
      }
    }
    // Distant streams, each read without gaps, suit prefetchers best.
    const int64_t length = (a.end - a.begin) / kRowStreams;
    for (int64_t n = 0; n < length; n++) {
      int64_t rows[kRowStreams];
      for (int i = 0; i < kRowStreams; i++) rows[i] = a.begin + i * length + n;
      dot_cols<C, kRowStreams>(a, rows, x, x_chunks, first, num_cols);
    }
    for (int64_t n = a.begin + kRowStreams * length; n < a.end; n++)
      dot_cols<C, 1>(a, &n, x, x_chunks, first, num_cols);
  }
}

void linear_f64(const LinearArgs& a) {
  for (int64_t n = a.begin; n < a.end; n++) {
    const double* w = reinterpret_cast<const double*>(a.weight + n * a.weight_stride);
    for (int64_t r = 0; r < a.num_rows; r++) {
      const double* x = reinterpret_cast<const double*>(a.x + r * a.x_stride);
      double lanes[8] = {};
      int64_t k = 0;
      for (; k + 8 <= a.k; k += 8)
        for (int i = 0; i < 8; i++) lanes[i] += w[k + i] * x[k + i];
      for (int i = 0; k < a.k; k++, i++) lanes[i] += w[k] * x[k];
      double sum = 0;
      for (double lane : lanes) sum += lane;
      if (a.bias != nullptr) sum += reinterpret_cast<const double*>(a.bias)[n];
      reinterpret_cast<double*>(a.y + r * a.y_stride)[n] = sum;
    }
  }
}

int64_t linear_scratch_bytes(int64_t num_rows, int64_t k) {
  // At most two vectors of floats per chunk of 16-bit elements, and a partial chunk per row.
  const int64_t rows = num_rows < kLinearRowBlock ? num_rows : kLinearRowBlock;
  return rows * (k * 4 + 2 * kVecBytes);
}

uint64_t read_words(const uint64_t* words, int64_t n) {
  typedef uint64_t vw __attribute__((vector_size(kVecBytes)));
  typedef uint64_t vw_unaligned __attribute__((vector_size(kVecBytes), aligned(1), may_alias));
  constexpr int kWords = kVecBytes / 8;
  const int64_t length = n / kRowStreams / kWords * kWords;
  vw sums[kRowStreams] = {};
  for (int64_t i = 0; i < length; i += kWords)
    for (int s = 0; s < kRowStreams; s++) {
      const uint64_t* p = words + s * length + i;
      __builtin_prefetch(reinterpret_cast<const uint8_t*>(p) + kPrefetchBytes);
      sums[s] += *reinterpret_cast<const vw_unaligned*>(p);
    }
  uint64_t total = 0;
  for (int64_t i = kRowStreams * length; i < n; i++) total += words[i];
  for (const vw& sum : sums)
    for (int i = 0; i < kWords; i++) total += sum[i];
  return total;
}
