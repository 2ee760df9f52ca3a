// The scalar operations of programs, one loop each over a block of values.
#pragma once

namespace math {

// exp within about one unit in the last place, without branches, so that the compiler can vectorise a loop over it.
// exp(x) = 2^n * exp(r), |r| <= ln(2) / 2, exp(r) by its Taylor series; 2^n in two factors, so that results may be
// denormal and overflow becomes infinity.
MPK_INLINE float exp(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;         // a NaN passes both
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float shifted = x * 1.44269504f + kRound;
  const int32_t n = static_cast<int32_t>(as_bits(shifted)) - static_cast<int32_t>(as_bits(kRound));
  const float whole = shifted - kRound;
  const float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln(2) in two parts, the first exact times n
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = (p * r) * r + r + 1.0f;
  const int32_t half = n >> 1;
  return p * as_float(static_cast<uint32_t>(half + 127) << 23) * as_float(static_cast<uint32_t>(n - half + 127) << 23);
}
MPK_INLINE double exp(double x) { return __builtin_exp(x); }

#define MPK_MATH_1(name)                                            \
  MPK_INLINE float name(float x) { return __builtin_##name##f(x); } \
  MPK_INLINE double name(double x) { return __builtin_##name(x); }
#define MPK_MATH_2(name)                                                        \
  MPK_INLINE float name(float x, float y) { return __builtin_##name##f(x, y); } \
  MPK_INLINE double name(double x, double y) { return __builtin_##name(x, y); }
#define X(name, arity, expression) MPK_MATH_##arity(name)
MPK_POINTWISE_MATH(X)
MPK_MATH_1(rint)
#undef X
#undef MPK_MATH_1
#undef MPK_MATH_2

}  // namespace math

// One struct per operation: eval<T>(a, b).
#define X(name, arity, expression)                                            \
  struct Op_##name {                                                          \
    static constexpr int kArity = arity;                                      \
    template <class T>                                                        \
    static MPK_INLINE auto eval([[maybe_unused]] T a, [[maybe_unused]] T b) { \
      return expression;                                                      \
    }                                                                         \
  };
MPK_POINTWISE_ARITHMETIC(X)
MPK_POINTWISE_FLOAT(X)
MPK_POINTWISE_INTEGER(X)
MPK_POINTWISE_COMPARE(X)
#undef X

template <class O, ValueClass c, bool kCompare>
void arith_values(const void* a, const void* b, void* result, int n) {
  using V = typename ValueType<c>::type;
  using R = std::conditional_t<kCompare, uint8_t, V>;
  const V* __restrict x = static_cast<const V*>(a);
  const V* __restrict y = static_cast<const V*>(b);
  R* __restrict out = static_cast<R*>(result);
  for (int i = 0; i < n; i++) {
    const auto value = O::template eval<V>(x[i], O::kArity > 1 ? y[i] : V(0));
    if constexpr (kCompare || c == kTruth) {
      out[i] = value != 0;
    } else {
      out[i] = value;
    }
  }
}

template <class V>
void where_values(const uint8_t* condition, const void* a, const void* b, void* result, int n) {
  const V* __restrict x = static_cast<const V*>(a);
  const V* __restrict y = static_cast<const V*>(b);
  V* __restrict out = static_cast<V*>(result);
  for (int i = 0; i < n; i++) out[i] = condition[i] ? x[i] : y[i];
}

template <Reduction r, class V>
MPK_INLINE V reduce_pair(V a, V b) {
  if constexpr (r == Reduction::kSum) return Op_add::eval(a, b);
  if constexpr (r == Reduction::kProd) return Op_mul::eval(a, b);
  if constexpr (r == Reduction::kMax) return (b != b || b > a) ? b : a;  // a NaN stays
  if constexpr (r == Reduction::kMin) return (b != b || b < a) ? b : a;
}

template <Reduction r, class V>
void reduce_values(void* lanes, const void* values, int n) {
  V* __restrict acc = static_cast<V*>(lanes);
  const V* __restrict in = static_cast<const V*>(values);
  int i = 0;
  for (; i + kReduceLanes <= n; i += kReduceLanes)
    for (int j = 0; j < kReduceLanes; j++) acc[j] = reduce_pair<r>(acc[j], in[i + j]);
  for (int j = 0; i < n; i++, j++) acc[j] = reduce_pair<r>(acc[j], in[i]);
}
