// Matrix times few vectors, with weights in words of eight numbers of 4 bits. Lines of words go along the rows of
// weights, as GPTQ and AWQ have them, so a lane is a row or eight of them, and nothing has to be transposed.
//
// A tile is eight vectors of words: eight columns of 8 * kLanes rows. The order of an output element's sum depends on K
// and on the runs alone.
#pragma once

constexpr int kTile = 8, kPanelRows = kTile * kLanes;
constexpr int kMaxTileCols = kVecBytes == 64 ? 3 : 1;  // rows of x per pass over a tile, limited by registers
constexpr int64_t kPrefetchColumns = 64;               // ahead
constexpr int64_t kMostColumns = 256;                  // that are summed up one by one

// Where the words of a tile stand: vectors are `step` bytes apart.
struct TileWords {
  const uint8_t* first;
  int64_t step;
  MPK_INLINE vu operator[](int v) const { return *reinterpret_cast<const vu_unaligned*>(first + v * step); }
};

// A word is eight columns of one row. Number `place` of a word in vector v belongs to slot `slot` of eight, which is a
// vector of rows, and to a column of the tile.
struct ColumnWords {
  static constexpr int kLineColumns = 8, kWordRows = 1;
  static constexpr int slot(int v, int /*place*/) { return v; }
  static constexpr int column(int /*v*/, int place) { return place; }
  static constexpr int row(int slot, int lane) { return slot * kLanes + lane; }
  // Pairs of bfloat16: columns i and i + 4 stand in the same place of a word's halves.
  static constexpr int pair(int /*v*/, int place) { return place; }
  static MPK_INLINE vu pairs_of(const TileWords& words, int v) { return words[v]; }
};

// A word is eight rows of one column, in the order of WeightFormat::place.
struct RowWords {
  static constexpr int kLineColumns = 1, kWordRows = 8;
  static constexpr int slot(int /*v*/, int place) { return place; }
  static constexpr int column(int v, int /*place*/) { return v; }
  static constexpr int row(int slot, int lane) { return lane * 8 + slot % 4 * 2 + slot / 4; }
  // Words of two columns exchange halves, so that a word is two columns of four rows.
  static constexpr int pair(int v, int /*place*/) { return v / 2; }
  static MPK_INLINE vu pairs_of(const TileWords& words, int v) {
    const vu first = words[v / 2 * 2], second = words[v / 2 * 2 + 1];
    return v % 2 == 0 ? (first & 0xffffu) | second << 16 : first >> 16 | (second & 0xffff0000u);
  }
};

using Numbers = Numbers4<WeightCode::kU4>;

// How a tile is multiplied with x. With kIsGrouped a column's scales are those of its group.
template <bool kIsGrouped>
struct FloatTile {
  using T = float;
  static constexpr bool kHasGroups = kIsGrouped;

  template <class L, int kCols, int... i>
  static MPK_INLINE void add(const Numbers& numbers, const TileWords& words, const float* const* scales, const T* x,
                             int64_t pitch, vf (&acc)[kCols][kTile], Sequence<i...>) {
    (add_numbers<L, i / kTile, i % kTile>(numbers, words, scales, x, pitch, acc), ...);
  }
  template <class L, int v, int place, int kCols>
  static MPK_INLINE void add_numbers(const Numbers& numbers, const TileWords& words, const float* const* scales,
                                     const T* x, int64_t pitch, vf (&acc)[kCols][kTile]) {
    constexpr int kSlot = L::slot(v, place), kColumn = L::column(v, place);
    vf number = numbers.template at<4 * place>(numbers.readable(words[v]));
    if constexpr (kIsGrouped) number *= load_vec(scales[kColumn] + kSlot * kLanes);
    for (int j = 0; j < kCols; j++) acc[j][kSlot] = vec_fma(number, splat(x[j * pitch + kColumn]), acc[j][kSlot]);
  }
};
#if defined(MPK_TIER_AVX512_BF16)
struct PairsTile {
  using T = bf16;
  static constexpr bool kHasGroups = false;

  template <class L, int kCols, int... i>
  static MPK_INLINE void add(const Numbers& numbers, const TileWords& words, const float* const*, const T* x,
                             int64_t pitch, vf (&acc)[kCols][kTile], Sequence<i...>) {
    (add_pairs<L, i / kTile, i % kTile>(numbers, words, x, pitch, acc), ...);
  }
  template <class L, int v, int place, int kCols>
  static MPK_INLINE void add_pairs(const Numbers& numbers, const TileWords& words, const T* x, int64_t pitch,
                                   vf (&acc)[kCols][kTile]) {
    if constexpr (place < kTile / 2) {
      constexpr int kSlot = L::kWordRows == 1 ? v : v % 2 * 4 + place;
      const __m512i pairs = numbers.template halves<4 * place>((__m512i)L::pairs_of(words, v));
      for (int j = 0; j < kCols; j++) {
        int32_t pair;
        __builtin_memcpy(&pair, x + j * pitch + 2 * L::pair(v, place), sizeof pair);
        acc[j][kSlot] = (vf)_mm512_dpbf16_ps((__m512)acc[j][kSlot], (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(pair));
      }
    }
  }
};
#endif

// Finds the words of columns from k on, of which those before `end` are there. Where some are not, those that are move
// to `copy`, among zeros.
template <class L>
MPK_INLINE TileWords find_tile(const QuantizedArgs& a, int64_t row, int64_t k, int64_t end,
                               uint32_t (&copy)[kTile][kLanes]) {
  const auto line = [&](int64_t first_row, int64_t column) {
    return a.weight + column / L::kLineColumns * a.weight_stride + first_row / L::kWordRows * 4;
  };
  const TileWords words = {line(row, k), L::kWordRows == 1 ? kVecBytes : a.weight_stride};
  const bool is_last = k + kPrefetchColumns >= a.k;  // of these rows
  const uint8_t* ahead = is_last ? line(row + kPanelRows, k + kPrefetchColumns - a.k) : line(row, k + kPrefetchColumns);
  for (int v = 0; v < kTile; v++) __builtin_prefetch(ahead + v * words.step, 0, 2);
  if (row + kPanelRows <= a.num_weight_rows && k + kTile <= end) return words;
  const int64_t rows = a.num_weight_rows - row;
  for (int v = 0; v < kTile; v++) {
    const int64_t count = L::kWordRows == 1 ? rows - v * kLanes : k + v < end ? rows / 8 : 0;
    for (int lane = 0; lane < kLanes; lane++) copy[v][lane] = 0;
    if (count > 0) __builtin_memcpy(copy[v], words.first + v * words.step, (count < kLanes ? count : kLanes) * 4);
  }
  return {reinterpret_cast<const uint8_t*>(copy), kVecBytes};
}

// kPanelRows rows of weights times kCols rows of x.
template <class L, class X, int kCols>
MPK_INLINE void words_rows(const QuantizedArgs& a, const Numbers& numbers, int64_t row, int64_t first_col) {
  const int64_t runs = (a.k + a.run - 1) / a.run, pitch = quantized_pitch(a.run);
  vf total[kCols][kTile];
  set_zero(total);
  for (int64_t run = 0; run < runs; run++) {
    const auto* x = static_cast<const typename X::T*>(a.x) + (first_col * runs + run) * pitch;
    const int64_t begin = run * a.run, end = a.k - begin < a.run ? a.k : begin + a.run;
    for (int64_t first = begin; first < end; first += kMostColumns) {
      vf acc[kCols][kTile];
      set_zero(acc);
      const int64_t last = end - first < kMostColumns ? end : first + kMostColumns;
      for (int64_t k = first; k < last; k += kTile) {
        uint32_t copy[kTile][kLanes];
        const TileWords words = find_tile<L>(a, row, k, last, copy);
        const float* scales[kTile];
        if constexpr (X::kHasGroups)
          for (int i = 0; i < kTile; i++) {
            const uint32_t group = k + i < last ? a.groups[k + i] : 0;
            scales[i] = a.factors + (group < a.num_blocks ? group : a.num_blocks) * a.factors_stride + row;
          }
        X::template add<L>(numbers, words, scales, x + k - begin, runs * pitch, acc,
                           typename MakeSequence<kTile * kTile>::type{});
      }
      for (int j = 0; j < kCols; j++)
        for (int s = 0; s < kTile; s++) {
          if (a.x_factors != nullptr) acc[j][s] *= a.x_factors[(first_col + j) * runs + run];
          if constexpr (X::kHasGroups)
            total[j][s] += acc[j][s];
          else
            total[j][s] =
                vec_fma(acc[j][s], load_vec(a.factors + run * a.factors_stride + row + s * kLanes), total[j][s]);
        }
    }
  }
  for (int64_t block = 0; a.offsets != nullptr && block < a.num_blocks; block++)
    for (int s = 0; s < kTile; s++) {
      const vf offsets = load_vec(a.offsets + block * a.factors_stride + row + s * kLanes);
      for (int j = 0; j < kCols; j++)
        total[j][s] = vec_fma(offsets, splat(a.x_sums[(first_col + j) * a.num_blocks + block]), total[j][s]);
    }
  for (int j = 0; j < kCols; j++)
    for (int s = 0; s < kTile; s++)
      for (int lane = 0; lane < kLanes; lane++)
        if (const int64_t own = row + L::row(s, lane); own < a.num_weight_rows)
          a.sums[(first_col + j - a.begin) * a.num_weight_rows + own] = total[j][s][lane];
}

template <class L, class X, int kCols = kMaxTileCols>
MPK_INLINE void words_cols(const QuantizedArgs& a, const Numbers& numbers, int64_t row, int64_t first_col) {
  for (; first_col + kCols <= a.end; first_col += kCols) words_rows<L, X, kCols>(a, numbers, row, first_col);
  if constexpr (kCols > 1) {
    if (first_col < a.end) words_cols<L, X, kCols - 1>(a, numbers, row, first_col);
  }
}

// Brings the values of rows into the order of slots, tile by tile.
template <class L>
void to_slots(float* values, int64_t count, int64_t stride, int64_t num_rows) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t row = 0; row < num_rows; row += kPanelRows) {
      float* own = values + i * stride + row;
      float given[kPanelRows];
      __builtin_memcpy(given, own, sizeof given);
      for (int s = 0; s < kTile; s++)
        for (int lane = 0; lane < kLanes; lane++) own[s * kLanes + lane] = given[L::row(s, lane)];
    }
}

template <class L, class X>
void quantized_words(const QuantizedArgs& a) {
  if constexpr (!X::kHasGroups)
    if (a.groups != nullptr) return quantized_words<L, FloatTile<true>>(a);
  if constexpr (L::kWordRows > 1) {
    to_slots<L>(a.factors, a.num_blocks, a.factors_stride, a.num_weight_rows);
    if (a.offsets != nullptr) to_slots<L>(a.offsets, a.num_blocks, a.factors_stride, a.num_weight_rows);
  }
  const Numbers numbers(nullptr);
  for (int64_t row = 0; row < a.num_weight_rows; row += kPanelRows) words_cols<L, X>(a, numbers, row, a.begin);
}

// The zero points of words, a line of eight to each: of four bits, the first in the low ones, or in the order of
// WeightFormat::place.
void zero_points(const uint32_t* words, int64_t n, bool in_row_order, float* points) {
  for (int64_t i = 0; i < n; i++)
    for (int row = 0; row < 8; row++) {
      const int place = in_row_order ? row / 2 + row % 2 * 4 : row;
      points[i * 8 + row] = static_cast<float>(words[i] >> place * 4 & 15);
    }
}
