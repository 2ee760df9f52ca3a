// Products of matrices with many rows each: c[n, m] = sum_k a[n, k] * b[m, k]. Rows of `a` are read in place. Rows of
// `b` are packed once into panels of kPanel, which all rows of `a` use.
//
// The order of an element's sum depends only on K: neither on what is computed beside it nor on the thread.
#pragma once

constexpr int kPanel = 16;          // rows of b side by side
constexpr int kTileRows = 16;       // rows of a that a tile register holds
constexpr int kBlock2D = 32;        // rows of a, and of b, whose products are accumulated at a time
constexpr int kExpandedDepth = 64;  // elements of a row of `a` that are expanded to floats at a time

// The layout of a panel of storage type T: [depth / kPairs][kPanel][kPairs] elements E, zeros up to a multiple of
// kDepth.
template <class T>
struct Packed {
  using E = float;
  using C = float;
  static constexpr int kPairs = 1, kDepth = 1;
};
template <>
struct Packed<double> {
  using E = double;
  using C = double;
  static constexpr int kPairs = 1, kDepth = 1;
};
#if defined(MPK_TIER_AVX512_BF16)
template <>
struct Packed<bf16> {
  using E = bf16;
  using C = float;
#if defined(MPK_TIER_AMX)
  static constexpr int kPairs = 2, kDepth = 32;
#else
  static constexpr int kPairs = 2, kDepth = 2;
#endif
};
#endif

MPK_INLINE int64_t multiple(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

template <class T>
MPK_INLINE int64_t packed_depth(int64_t k) {
  return multiple(k, Packed<T>::kDepth);
}
template <class T>
MPK_INLINE int64_t panel_bytes(int64_t k) {
  return packed_depth<T>(k) * kPanel * static_cast<int64_t>(sizeof(typename Packed<T>::E));
}

MPK_INLINE double from_storage(double v) { return v; }
MPK_INLINE void to_storage(double v, double* p) { *p = v; }
template <class T>
MPK_INLINE typename Packed<T>::E to_packed(T v) {
  if constexpr (std::is_same_v<typename Packed<T>::E, T>)
    return v;
  else
    return from_storage(v);
}

// to[j][i] = from[i][j] for 16 x 16 words; strides in words.
MPK_INLINE void transpose_words(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
#if defined(MPK_TIER_AVX512)
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + i * from_stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
    }
  for (int half = 0; half < 16; half += 8)
    for (int j = 0; j < 4; j++) {
      b[half + j] = _mm512_shuffle_i32x4(a[half + j], a[half + j + 4], 0x88);
      b[half + j + 4] = _mm512_shuffle_i32x4(a[half + j], a[half + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; j++) {
    _mm512_storeu_si512(to + j * to_stride, _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88));
    _mm512_storeu_si512(to + (j + 8) * to_stride, _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd));
  }
#else
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) to[j * to_stride + i] = from[i * from_stride + j];
#endif
}

// Packs up to kPanel rows of b as the columns of a panel.
template <class T>
MPK_INLINE void pack_panel(const uint8_t* rows, int64_t stride, int num_rows, int64_t k, uint8_t* panel) {
  using P = Packed<T>;
  auto* out = reinterpret_cast<typename P::E*>(panel);
  int64_t done = 0;
  if constexpr (sizeof(T) * P::kPairs == 4 && std::is_same_v<T, typename P::E>) {
    constexpr int kStep = kPanel * P::kPairs;
    if (num_rows == kPanel && stride % 4 == 0)  // rows of whole words
      for (; done + kStep <= k; done += kStep)
        transpose_words(reinterpret_cast<const uint32_t*>(rows + done * sizeof(T)), stride / 4,
                        reinterpret_cast<uint32_t*>(out + done * kPanel), kPanel);
  }
  const int64_t depth = packed_depth<T>(k);
  for (int r = 0; r < kPanel; r++) {
    const T* row = reinterpret_cast<const T*>(rows + r * stride);
    for (int64_t i = done; i < depth; i++)
      out[(i / P::kPairs * kPanel + r) * P::kPairs + i % P::kPairs] =
          r < num_rows && i < k ? to_packed(row[i]) : typename P::E{};
  }
}

// Packs `num_rows` rows of b. Returns the number of panels.
template <class T>
MPK_INLINE int pack_rows(const uint8_t* rows, int64_t stride, int64_t num_rows, int64_t k, uint8_t* packed) {
  int panels = 0;
  for (int64_t first = 0; first < num_rows; first += kPanel, panels++)
    pack_panel<T>(rows + first * stride, stride,
                  static_cast<int>(num_rows - first < kPanel ? num_rows - first : kPanel), k,
                  packed + panels * panel_bytes<T>(k));
  return panels;
}

// Packs b from its `k` columns of `size` elements, up to `depth` with zeros.
template <class T>
MPK_INLINE int pack_columns(const uint8_t* columns, int64_t stride, int k, int depth, int64_t size, uint8_t* packed) {
  using P = Packed<T>;
  using E = typename P::E;
  int panels = 0;
  for (int64_t first = 0; first < size; first += kPanel, panels++) {
    E* out = reinterpret_cast<E*>(packed + panels * panel_bytes<T>(depth));
    const int count = static_cast<int>(size - first < kPanel ? size - first : kPanel);
    for (int i = 0; i < depth; i += P::kPairs, out += kPanel * P::kPairs) {
      T column[P::kPairs][kPanel] = {};
      for (int pair = 0; pair < P::kPairs; pair++)
        if (i + pair < k)
          __builtin_memcpy(column[pair], columns + (i + pair) * stride + first * sizeof(T), count * sizeof(T));
      for (int j = 0; j < kPanel; j++)
        for (int pair = 0; pair < P::kPairs; pair++) out[j * P::kPairs + pair] = to_packed(column[pair][j]);
    }
  }
  return panels;
}

// kRows rows of a times kPanels panels, added to c or stored there.
template <class T, int kRows, int kPanels>
MPK_INLINE void product_rows(const uint8_t* a, int64_t a_stride, const uint8_t* b, int64_t k, float* c,
                             int64_t c_stride, bool adds) {
  using P = Packed<T>;
  constexpr int kVecs = kPanel / kLanes * kPanels, kVecsOfPanel = kPanel / kLanes;
  const int64_t bytes = panel_bytes<T>(k);
  vf acc[kRows][kVecs] = {};
  const auto load_b = [&](int64_t step, vf* out) {
    for (int v = 0; v < kVecs; v++)
      out[v] = load_vec(reinterpret_cast<const float*>(b + v / kVecsOfPanel * bytes) + step * kPanel +
                        v % kVecsOfPanel * kLanes);
  };
  const auto store_c = [&](bool onto) {
    for (int i = 0; i < kRows; i++)
      for (int v = 0; v < kVecs; v++) {
        float* to = c + i * c_stride + v * kLanes;
        *reinterpret_cast<vf_unaligned*>(to) = onto ? load_vec(to) + acc[i][v] : acc[i][v];
      }
  };
  if constexpr (P::kPairs == 2) {
#if defined(MPK_TIER_AVX512_BF16)
    for (int64_t pair = 0; pair < k / 2; pair++) {
      vf column[kVecs];
      load_b(pair, column);
      for (int i = 0; i < kRows; i++) {
        int word;
        __builtin_memcpy(&word, a + i * a_stride + pair * 4, 4);
        for (int v = 0; v < kVecs; v++)
          acc[i][v] = (vf)_mm512_dpbf16_ps((__m512)acc[i][v], (__m512bh)_mm512_set1_epi32(word), (__m512bh)column[v]);
      }
    }
    store_c(adds);
#endif
  } else {
    float expanded[kRows][kExpandedDepth];
    for (int64_t first = 0; first < k; first += kExpandedDepth) {  // sums of few, and their sum: more exact than one
      const int count = static_cast<int>(k - first < kExpandedDepth ? k - first : kExpandedDepth);
      for (int i = 0; i < kRows; i++) {
        const T* row = reinterpret_cast<const T*>(a + i * a_stride) + first;
        if (count == kExpandedDepth)
          for (int j = 0; j < kExpandedDepth; j += kLanes)
            *reinterpret_cast<vf_unaligned*>(expanded[i] + j) = load_vec(row + j);
        else
          for (int j = 0; j < count; j++) expanded[i][j] = from_storage(row[j]);
      }
      for (int j = 0; j < count; j++) {
        vf column[kVecs];
        load_b(first + j, column);
        for (int i = 0; i < kRows; i++)
          for (int v = 0; v < kVecs; v++) acc[i][v] = vec_fma(vf{} + expanded[i][j], column[v], acc[i][v]);
      }
      store_c(adds || first > 0);
      for (int i = 0; i < kRows; i++)
        for (int v = 0; v < kVecs; v++) acc[i][v] = vf{};
    }
  }
}

#if defined(MPK_TIER_AMX)
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Configures the tile registers for products while it lives. Libraries on this thread may have configured them, too.
class Tiles {
 public:
  Tiles() {
    _tile_storeconfig(&before_);
    const TileConfig ours;
    _tile_loadconfig(&ours);
  }
  ~Tiles() {
    if (before_.palette != 0)
      _tile_loadconfig(&before_);
    else
      _tile_release();
  }
  Tiles(const Tiles&) = delete;

 private:
  TileConfig before_;
};

// 16 * kRowTiles rows of a times kPanels panels. With `next`, prefetches the next rows.
template <int kRowTiles, int kPanels>
MPK_INLINE void product_tiles(const uint8_t* a, int64_t a_stride, const uint8_t* next, const uint8_t* b, int64_t k,
                              float* c, int64_t c_stride, bool adds) {
  const int64_t bytes = panel_bytes<bf16>(k), row_bytes = c_stride * 4;
  float *c1 = c + kPanel, *c2 = c + kTileRows * c_stride, *c3 = c2 + kPanel;
  if (adds) {
    _tile_loadd(0, c, row_bytes);
    if constexpr (kPanels > 1) _tile_loadd(1, c1, row_bytes);
    if constexpr (kRowTiles > 1) _tile_loadd(2, c2, row_bytes);
    if constexpr (kRowTiles > 1 && kPanels > 1) _tile_loadd(3, c3, row_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < k / 32; step++) {
    const uint8_t *rows = a + step * 64, *columns = b + step * 1024;
    if (next != nullptr)
      for (int i = 0; i < kTileRows * kRowTiles; i++) __builtin_prefetch(next + i * a_stride + step * 64, 0, 2);
    _tile_loadd(4, rows, a_stride);
    _tile_loadd(6, columns, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kPanels > 1) {
      _tile_loadd(7, columns + bytes, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRowTiles > 1) {
      _tile_loadd(5, rows + kTileRows * a_stride, a_stride);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kPanels > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, row_bytes);
  if constexpr (kPanels > 1) _tile_stored(1, c1, row_bytes);
  if constexpr (kRowTiles > 1) _tile_stored(2, c2, row_bytes);
  if constexpr (kRowTiles > 1 && kPanels > 1) _tile_stored(3, c3, row_bytes);
}
#else
struct Tiles {
  Tiles() {}  // so that objects count as used
};
#endif

template <class T>
constexpr bool kHasTiles = Packed<T>::kDepth == 32;
template <class T>
constexpr int kRowGranularity = kHasTiles<T> ? kTileRows : 1;  // `a` must have whole multiples of it

// Up to kBlock2D rows of a times one or two panels; k is a whole packed depth.
template <class T, int kPanels>
MPK_INLINE void product_block(const uint8_t* a, int64_t a_stride, int num_rows, [[maybe_unused]] const uint8_t* next,
                              const uint8_t* b, int64_t k, typename Packed<T>::C* c, int64_t c_stride, bool adds) {
  if constexpr (std::is_same_v<T, double>) {
    for (int i = 0; i < num_rows; i++)
      for (int j = 0; j < kPanels * kPanel; j++) {
        const double* row = reinterpret_cast<const double*>(a + i * a_stride);
        const double* column = reinterpret_cast<const double*>(b + j / kPanel * panel_bytes<T>(k)) + j % kPanel;
        double sum = adds ? c[i * c_stride + j] : 0;
        for (int64_t step = 0; step < k; step++) sum += row[step] * column[step * kPanel];
        c[i * c_stride + j] = sum;
      }
#if defined(MPK_TIER_AMX)
  } else if constexpr (kHasTiles<T>) {
    if (num_rows > kTileRows)
      product_tiles<2, kPanels>(a, a_stride, next, b, k, c, c_stride, adds);
    else
      product_tiles<1, kPanels>(a, a_stride, next, b, k, c, c_stride, adds);
#endif
  } else {
    constexpr int kRows = kVecBytes == 64 ? 8 : kVecBytes == 32 ? 4 : 2;
    constexpr int kAtOnce = kVecBytes == 64 ? kPanels : 1;  // limited by registers
    for (int panel = 0; panel < kPanels; panel += kAtOnce) {
      const uint8_t* columns = b + panel * panel_bytes<T>(k);
      int i = 0;
      for (; i + kRows <= num_rows; i += kRows)
        product_rows<T, kRows, kAtOnce>(a + i * a_stride, a_stride, columns, k, c + i * c_stride + panel * kPanel,
                                        c_stride, adds);
      for (; i < num_rows; i++)
        product_rows<T, 1, kAtOnce>(a + i * a_stride, a_stride, columns, k, c + i * c_stride + panel * kPanel, c_stride,
                                    adds);
    }
  }
}

// The whole product: `a` has a multiple of kRowGranularity rows, and k elements of a whole packed depth.
template <class T>
void product(const uint8_t* a, int64_t a_stride, int num_rows, const uint8_t* b, int panels, int64_t k,
             typename Packed<T>::C* c, int64_t c_stride, bool adds) {
  for (int first = 0; first < num_rows; first += kBlock2D) {
    const int rows = num_rows - first < kBlock2D ? num_rows - first : kBlock2D;
    const uint8_t* from = a + first * a_stride;
    for (int panel = 0; panel < panels; panel += 2) {
      const uint8_t* columns = b + panel * panel_bytes<T>(k);
      auto* to = c + first * c_stride + panel * kPanel;
      if (panel + 1 < panels)
        product_block<T, 2>(from, a_stride, rows, nullptr, columns, k, to, c_stride, adds);
      else
        product_block<T, 1>(from, a_stride, rows, nullptr, columns, k, to, c_stride, adds);
    }
  }
}

// Stores y of `count` rows of x from the products [rows of weight][kBlock2D].
template <class T>
MPK_INLINE void store_products(const LinearArgs& a, const float* c, int64_t n, int rows, int64_t first_col, int count) {
  alignas(64) float bias[kBlock2D] = {}, turned[kBlock2D][kBlock2D];
  if (a.bias != nullptr)
    for (int i = 0; i < rows; i++) bias[i] = from_storage(reinterpret_cast<const T*>(a.bias)[n + i]);
  for (int i = 0; i < kBlock2D; i += 16)
    for (int j = 0; j < count; j += 16)
      transpose_words(reinterpret_cast<const uint32_t*>(c + i * kBlock2D + j), kBlock2D,
                      reinterpret_cast<uint32_t*>(&turned[j][i]), kBlock2D);
  for (int j = 0; j < count; j++) {
    T* y = reinterpret_cast<T*>(a.y + (first_col + j) * a.y_stride) + n;
    if (a.bias != nullptr)
      for (int i = 0; i < kBlock2D; i++) turned[j][i] += bias[i];
    if (rows == kBlock2D)
      for (int i = 0; i < kBlock2D; i++) to_storage(turned[j][i], y + i);
    else
      for (int i = 0; i < rows; i++) to_storage(turned[j][i], y + i);
  }
}

// Linear with more rows of x than kLinearRowBlock: x is packed, and each block of weight rows is multiplied with all of
// it.
template <class T>
void linear_many(const LinearArgs& a) {
  const int64_t depth = packed_depth<T>(a.k), bytes = panel_bytes<T>(a.k);
  const Tiles tiles;
  uint8_t* padded = a.scratch;  // weight rows that are not whole
  uint8_t* x = a.scratch + kBlock2D * depth * static_cast<int64_t>(sizeof(T));
  const int panels = pack_rows<T>(a.x, a.x_stride, a.num_rows, a.k, x);
  alignas(64) float c[kBlock2D * kBlock2D] = {};
  for (int64_t n = a.begin; n < a.end; n += kBlock2D) {
    const int rows = static_cast<int>(a.end - n < kBlock2D ? a.end - n : kBlock2D);
    const uint8_t* weight = a.weight + n * a.weight_stride;
    int64_t stride = a.weight_stride;
    int whole = rows;
    if (depth != a.k || rows % kRowGranularity<T> != 0) {
      stride = depth * static_cast<int64_t>(sizeof(T));
      whole = kBlock2D;
      __builtin_memset(padded, 0, kBlock2D * stride);
      for (int i = 0; i < rows; i++)
        __builtin_memcpy(padded + i * stride, weight + i * a.weight_stride, a.k * sizeof(T));
      weight = padded;
    }
    const uint8_t* next = n + 2 * kBlock2D <= a.end ? a.weight + (n + kBlock2D) * a.weight_stride : nullptr;
    for (int panel = 0; panel < panels; panel += 2) {
      const int64_t left = a.num_rows - panel * kPanel;
      const uint8_t* fetched = panel == 0 && weight != padded ? next : nullptr;
      if (panel + 1 < panels)
        product_block<T, 2>(weight, stride, whole, fetched, x + panel * bytes, depth, c, kBlock2D, false);
      else
        product_block<T, 1>(weight, stride, whole, fetched, x + panel * bytes, depth, c, kBlock2D, false);
      store_products<T>(a, c, n, rows, panel * kPanel, static_cast<int>(left < kBlock2D ? left : kBlock2D));
    }
  }
}

template <class T>
int64_t linear_many_scratch_bytes(int64_t num_rows, int64_t k) {
  return kBlock2D * packed_depth<T>(k) * static_cast<int64_t>(sizeof(T)) +
         multiple(num_rows, kPanel) / kPanel * panel_bytes<T>(k);
}
