// Attention of many query rows that share one key head, by tiles of keys: two products and an online softmax between.
#pragma once

// Scratch of one call, each part aligned to 64 bytes.
template <class T>
struct PrefillScratch {
  using C = typename Packed<T>::C;
  T *q, *p;
  uint8_t *k, *v, *listed;
  C *scores, *mask, *acc, *max, *sum;
  int rows;                   // padded
  int64_t depth, acc_stride;  // of q's rows and of acc's, in elements

  static constexpr int64_t kKeyDepth = kPrefillKeys;  // a whole packed depth in every tier

  PrefillScratch(uint8_t* base, int num_rows, int64_t head_dim, int64_t value_dim) {
    rows = static_cast<int>(multiple(num_rows, kTileRows));
    depth = packed_depth<T>(head_dim);
    acc_stride = multiple(value_dim, kPanel);
    uint8_t* at = base;
    const auto take = [&](int64_t bytes) {
      uint8_t* part = at;
      at += multiple(bytes, 64);
      return part;
    };
    q = reinterpret_cast<T*>(take(rows * depth * sizeof(T)));
    p = reinterpret_cast<T*>(take(rows * kPrefillKeys * sizeof(T)));
    k = take(kPrefillKeys / kPanel * panel_bytes<T>(head_dim));
    v = take(acc_stride / kPanel * panel_bytes<T>(kKeyDepth));
    listed = take(kPrefillKeys * (head_dim > value_dim ? head_dim : value_dim) * sizeof(T));
    scores = reinterpret_cast<C*>(take(rows * kPrefillKeys * sizeof(C)));
    mask = reinterpret_cast<C*>(take(rows * kPrefillKeys * sizeof(C)));
    acc = reinterpret_cast<C*>(take(rows * acc_stride * sizeof(C)));
    max = reinterpret_cast<C*>(take(rows * sizeof(C)));
    sum = reinterpret_cast<C*>(take(rows * sizeof(C)));
    bytes = at - base;
  }
  int64_t bytes;
};

// The mask of keys [first, first + count) as numbers to add; returns whether any row attends to any of them.
template <class C>
MPK_INLINE bool load_prefill_mask(const PrefillArgs& a, int64_t first, int count, C* out) {
  constexpr C kNever = -std::numeric_limits<C>::infinity();
  bool is_live = false;
  alignas(64) uint8_t raw[kPrefillKeys * 8];
  for (int r = 0; r < a.num_rows; r++, out += kPrefillKeys) {
    if (r > 0 && a.mask[r] == a.mask[r - 1]) {  // heads that share one
      __builtin_memcpy(out, out - kPrefillKeys, count * sizeof(C));
      continue;
    }
    a.load_mask(a.mask[r] + first * a.mask_stride * a.mask_bytes, a.mask_stride, raw, count);
    bool any = false;
    for (int i = 0; i < count; i++) {
      if (a.mask_class == kTruth)
        out[i] = raw[i] ? C(0) : kNever;
      else if (a.mask_class == kDouble)
        out[i] = static_cast<C>(reinterpret_cast<const double*>(raw)[i]);
      else
        out[i] = static_cast<C>(reinterpret_cast<const float*>(raw)[i]);
      any |= out[i] != kNever;
    }
    is_live |= any;
  }
  return is_live;
}

// Rows of keys or values, `stride` apart.
struct PrefillRows {
  const uint8_t* first;
  int64_t stride;
};

// The rows of positions [first, first + count): in place, or gathered in `to` if positions are listed.
MPK_INLINE PrefillRows prefill_rows(const PrefillArgs& a, const PrefillRows& cache, const PrefillRows& fresh,
                                    int64_t first, int count, int64_t bytes, uint8_t* to) {
  if (a.list == nullptr) return {cache.first + first * cache.stride, cache.stride};
  for (int i = 0; i < count; i++) {
    const int64_t position = first + i, last = a.cache_rows - 1;
    const uint8_t* from = fresh.first + (position - a.num_listed) * fresh.stride;
    if (position < a.num_listed) {
      const int64_t row = a.list[position];
      from = cache.first + (row < 0 ? 0 : row > last ? last : row) * cache.stride;
    }
    __builtin_memcpy(to + i * bytes, from, bytes);
  }
  return {to, bytes};
}

// Turns a row's scores of a tile into weights. Returns the factor for the row's sums so far.
template <class T, class C>
MPK_INLINE C prefill_softmax(C* scores, const C* mask, int begin, int live, C scale, double softcap, C* max, C* sum,
                             T* p) {
  constexpr C kNever = -std::numeric_limits<C>::infinity();
  constexpr int kLanesOf = 16;
  for (int i = 0; i < kPrefillKeys; i++) scores[i] *= scale;
  if (softcap > 0) cap_scores(scores, kPrefillKeys, softcap);
  for (int i = 0; i < kPrefillKeys; i++) scores[i] = begin <= i && i < live ? scores[i] : kNever;
  if (mask != nullptr)
    for (int i = 0; i < live; i++) scores[i] += mask[i];
  C lanes[kLanesOf];
  for (int i = 0; i < kLanesOf; i++) lanes[i] = *max;
  for (int first = 0; first < kPrefillKeys; first += kLanesOf)
    for (int i = 0; i < kLanesOf; i++) lanes[i] = scores[first + i] > lanes[i] ? scores[first + i] : lanes[i];
  C new_max = lanes[0];
  for (int i = 1; i < kLanesOf; i++) new_max = lanes[i] > new_max ? lanes[i] : new_max;
  const C base = new_max == kNever ? C(0) : new_max;  // the maximum ignores a NaN; the sum keeps it
  for (int i = 0; i < kPrefillKeys; i++) scores[i] = math::exp(scores[i] - base);
  for (int i = 0; i < kLanesOf; i++) lanes[i] = 0;
  for (int first = 0; first < kPrefillKeys; first += kLanesOf)
    for (int i = 0; i < kLanesOf; i++) lanes[i] += scores[first + i];
  C total = 0;
  for (int i = 0; i < kLanesOf; i++) total += lanes[i];
  for (int i = 0; i < kPrefillKeys; i++) to_storage(scores[i], p + i);
  const C factor = math::exp(*max - base);
  *sum = *sum * factor + total;
  *max = new_max;
  return factor;
}

template <class T>
void prefill_attention(const PrefillArgs& a) {
  using C = typename Packed<T>::C;
  const PrefillScratch<T> s(a.scratch, a.num_rows, a.head_dim, a.value_dim);
  const Tiles tiles;
  __builtin_memset(s.q, 0, s.rows * s.depth * sizeof(T));
  __builtin_memset(s.p, 0, s.rows * kPrefillKeys * sizeof(T));
  __builtin_memset(s.acc, 0, s.rows * s.acc_stride * sizeof(C));
  int64_t begin = a.starts == nullptr ? 0 : a.starts[0], end = 0;
  for (int r = 0; r < a.num_rows; r++) {
    __builtin_memcpy(s.q + r * s.depth, a.q[r], a.head_dim * sizeof(T));
    s.max[r] = -std::numeric_limits<C>::infinity();
    s.sum[r] = 0;
    if (a.starts != nullptr) begin = a.starts[r] < begin ? a.starts[r] : begin;
    end = a.limits[r] > end ? a.limits[r] : end;
  }
  begin -= begin % kPrefillKeys;  // a row's sums cover the same tiles beside any other rows
  const PrefillRows k{a.k, a.k_stride}, v{a.v, a.v_stride}, k_new{a.k_new, a.k_new_stride},
      v_new{a.v_new, a.v_new_stride};
  const int64_t row_bytes = a.head_dim * sizeof(T), value_bytes = a.value_dim * sizeof(T);
  const int value_panels = static_cast<int>(s.acc_stride / kPanel);
  for (int64_t first = begin; first < end; first += kPrefillKeys) {
    const int count = static_cast<int>(end - first < kPrefillKeys ? end - first : kPrefillKeys);
    if (a.mask != nullptr && !load_prefill_mask<C>(a, first, count, s.mask)) continue;
    const PrefillRows keys = prefill_rows(a, k, k_new, first, count, row_bytes, s.listed);
    const int key_panels = pack_rows<T>(keys.first, keys.stride, count, a.head_dim, s.k);
    product<T>(reinterpret_cast<const uint8_t*>(s.q), s.depth * sizeof(T), s.rows, s.k, key_panels, s.depth, s.scores,
               kPrefillKeys, false);
    for (int r = 0; r < a.num_rows; r++) {
      const auto in_tile = [&](int64_t position) {
        const int64_t n = position - first;
        return static_cast<int>(n < 0 ? 0 : n < count ? n : count);
      };
      const int unseen = a.starts == nullptr ? 0 : in_tile(a.starts[r]);
      const C factor = prefill_softmax<T, C>(
          s.scores + r * kPrefillKeys, a.mask == nullptr ? nullptr : s.mask + r * kPrefillKeys, unseen,
          in_tile(a.limits[r]), static_cast<C>(a.scale), a.softcap, s.max + r, s.sum + r, s.p + r * kPrefillKeys);
      if (factor != 1)
        for (int64_t d = 0; d < s.acc_stride; d++) s.acc[r * s.acc_stride + d] *= factor;
    }
    const PrefillRows values = prefill_rows(a, v, v_new, first, count, value_bytes, s.listed);
    pack_columns<T>(values.first, values.stride, count, kPrefillKeys, a.value_dim, s.v);
    product<T>(reinterpret_cast<const uint8_t*>(s.p), kPrefillKeys * sizeof(T), s.rows, s.v, value_panels, s.kKeyDepth,
               s.acc, s.acc_stride, true);
  }
  for (int r = 0; r < a.num_rows; r++) {
    const C* acc = s.acc + r * s.acc_stride;
    T* y = reinterpret_cast<T*>(a.y[r]);
    C kept = 1, sum = s.sum[r];
    if (a.sinks != nullptr) kept = add_sink(static_cast<C>(a.sinks[r]), s.max[r], sum);
    const bool is_empty = sum == 0;
    for (int64_t d = 0; d < a.value_dim; d++)
      to_storage(is_empty ? static_cast<C>(a.without_keys) : acc[d] * kept / sum, y + d);
  }
}

template <class T>
int64_t prefill_scratch_bytes(int num_rows, int64_t head_dim, int64_t value_dim) {
  return PrefillScratch<T>(nullptr, num_rows, head_dim, value_dim).bytes;
}
