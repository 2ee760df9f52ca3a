// Moves between memory and the values of a program: load, store, gather, scatter, cast, round.
#pragma once

template <ValueClass c>
struct ValueType;
template <>
struct ValueType<kFloat> {
  using type = float;
};
template <>
struct ValueType<kDouble> {
  using type = double;
};
template <>
struct ValueType<kInt> {
  using type = int64_t;
};
template <>
struct ValueType<kTruth> {
  using type = uint8_t;
};

// The storage type of each dtype, its class, and the way in and out. `from_value` takes a value already rounded.
template <DType t>
struct Storage;
#define MPK_STORAGE(dtype, storage, value_class, to_value, from_value) \
  template <>                                                          \
  struct Storage<dtype> {                                              \
    using T = storage;                                                 \
    static constexpr ValueClass kClass = value_class;                  \
    using V = ValueType<kClass>::type;                                 \
    static MPK_INLINE V to(T s) { return to_value; }                   \
    static MPK_INLINE T from(V v) { return from_value; }               \
  };
MPK_STORAGE(DType::kBool, uint8_t, kTruth, s != 0, v)
MPK_STORAGE(DType::kU8, uint8_t, kInt, s, static_cast<uint8_t>(v))
MPK_STORAGE(DType::kI8, int8_t, kInt, s, static_cast<int8_t>(v))
MPK_STORAGE(DType::kI16, int16_t, kInt, s, static_cast<int16_t>(v))
MPK_STORAGE(DType::kI32, int32_t, kInt, s, static_cast<int32_t>(v))
MPK_STORAGE(DType::kI64, int64_t, kInt, s, v)
MPK_STORAGE(DType::kF16, f16, kFloat, f16_to_float(s), float_to_f16(v))
MPK_STORAGE(DType::kBF16, bf16, kFloat, bf16_to_float(s), float_to_bf16(v))
MPK_STORAGE(DType::kF32, float, kFloat, s, v)
MPK_STORAGE(DType::kF64, double, kDouble, s, v)
#undef MPK_STORAGE

template <DType t>
void load_values(const void* from, int64_t stride, void* values, int n) {
  using S = Storage<t>;
  const auto* p = static_cast<const typename S::T*>(from);
  auto* out = static_cast<typename S::V*>(values);
  if (stride == 1) {
    int i = 0;
    if constexpr (t == DType::kF16)  // the compiler does not find the conversion instruction by itself
      for (; i + kLanes <= n; i += kLanes) *reinterpret_cast<vf_unaligned*>(out + i) = load_vec(p + i);
    for (; i < n; i++) out[i] = S::to(p[i]);
  } else if (stride == 0) {
    const typename S::V value = S::to(*p);
    for (int i = 0; i < n; i++) out[i] = value;
  } else {
    for (int i = 0; i < n; i++) out[i] = S::to(p[i * stride]);
  }
}

#if defined(MPK_TIER_AVX512)
MPK_INLINE void store_halves(f16* p, vf v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(MPK_TIER_AVX2)
MPK_INLINE void store_halves(f16* p, vf v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
MPK_INLINE void store_halves(f16* p, vf v) {
  for (int i = 0; i < kLanes; i++) p[i] = float_to_f16(v[i]);
}
#endif

template <DType t>
void store_values(const void* values, void* to, int64_t stride, int n) {
  using S = Storage<t>;
  const auto* in = static_cast<const typename S::V*>(values);
  auto* p = static_cast<typename S::T*>(to);
  if (stride == 1) {
    int i = 0;
    if constexpr (t == DType::kF16)
      for (; i + kLanes <= n; i += kLanes) store_halves(p + i, *reinterpret_cast<const vf_unaligned*>(in + i));
    for (; i < n; i++) p[i] = S::from(in[i]);
  } else {
    for (int i = 0; i < n; i++) p[i * stride] = S::from(in[i]);
  }
}

template <DType t>
void gather_values(const void* from, int64_t stride, const int64_t* offsets, const uint8_t* predicate, void* values,
                   int n) {
  using S = Storage<t>;
  const auto* p = static_cast<const typename S::T*>(from);
  auto* out = static_cast<typename S::V*>(values);
  for (int i = 0; i < n; i++) {
    if (predicate != nullptr && !predicate[i]) {
      out[i] = 0;
    } else {
      out[i] = S::to(p[i * stride + (offsets == nullptr ? 0 : offsets[i])]);
    }
  }
}

template <DType t>
void scatter_values(const void* values, void* to, int64_t stride, const int64_t* offsets, const uint8_t* predicate,
                    int n) {
  using S = Storage<t>;
  const auto* in = static_cast<const typename S::V*>(values);
  auto* p = static_cast<typename S::T*>(to);
  for (int i = 0; i < n; i++)
    if (predicate == nullptr || predicate[i]) p[i * stride + (offsets == nullptr ? 0 : offsets[i])] = S::from(in[i]);
}

// A float outside the integer's range (or a NaN) becomes the result of the processor's conversion, as in PyTorch: the
// smallest int64, or int32. Narrow types keep the low bits of an int32 or int64.
template <class F>
MPK_INLINE int64_t to_int64(F v) {
  return v >= F(-0x1p63) && v < F(0x1p63) ? static_cast<int64_t>(v) : INT64_MIN;
}
template <class F>
MPK_INLINE int64_t to_int32(F v) {
  return v > F(-0x1p31) - 1 && v < F(0x1p31) ? static_cast<int32_t>(v) : INT32_MIN;
}

template <ValueClass from, DType to>
void cast_values(const void* values, void* result, int n) {
  using V = typename ValueType<from>::type;
  using S = Storage<to>;
  const V* in = static_cast<const V*>(values);
  auto* out = static_cast<typename S::V*>(result);
  for (int i = 0; i < n; i++) {
    if constexpr (S::kClass == kTruth) {
      out[i] = in[i] != V(0);
    } else if constexpr (S::kClass == kInt && (from == kFloat || from == kDouble)) {
      constexpr bool narrow = to == DType::kI32 || to == DType::kI16 || to == DType::kI8;
      const int64_t whole = narrow ? to_int32(in[i]) : to_int64(in[i]);
      out[i] = S::to(S::from(whole));
    } else if constexpr (S::kClass == kInt && from == kInt) {
      out[i] = S::to(S::from(in[i]));
    } else if constexpr (to == DType::kBF16 || to == DType::kF16) {
      out[i] = S::to(S::from(static_cast<float>(in[i])));
    } else {
      out[i] = static_cast<typename S::V>(in[i]);
    }
  }
}

template <DType t>
void round_values(void* values, int n) {
  using S = Storage<t>;
  auto* v = static_cast<typename S::V*>(values);
  int i = 0;
#if defined(MPK_TIER_AVX512) || defined(MPK_TIER_AVX2)
  if constexpr (t == DType::kF16)
    for (; i + kLanes <= n; i += kLanes) {
      f16 halves[kLanes];
      store_halves(halves, *reinterpret_cast<vf_unaligned*>(v + i));
      *reinterpret_cast<vf_unaligned*>(v + i) = load_vec(halves);
    }
#endif
  for (; i < n; i++) v[i] = S::to(S::from(v[i]));
}
