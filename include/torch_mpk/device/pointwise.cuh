// The vocabulary of generated elementwise code: conversions, the operations of pointwise_ops.h, memory accesses. Every
// operation rounds where the eager graph rounds, whatever it is fused with: sums and products are never contracted.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "torch_mpk/abi/pointwise_ops.h"
#include "torch_mpk/device/ptx.cuh"

namespace mpk {

// ---- conversions

template <class T>
MPK_DEVICE float to_float(T v) {
  return static_cast<float>(v);
}
template <>
MPK_DEVICE float to_float(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
template <>
MPK_DEVICE float to_float(__half v) {
  return __half2float(v);
}

template <class T>
inline constexpr bool kIsReduced = false;
template <>
inline constexpr bool kIsReduced<__nv_bfloat16> = true;
template <>
inline constexpr bool kIsReduced<__half> = true;

// PyTorch's conversion from any element type to any other: reduced floats go through float, everything nonzero is true.
template <class To, class From>
struct Convert {
  static MPK_DEVICE To apply(From v) {
    if constexpr (kIsReduced<From>)
      return Convert<To, float>::apply(to_float(v));
    else
      return static_cast<To>(v);
  }
};
template <class T>
struct Convert<T, T> {
  static MPK_DEVICE T apply(T v) { return v; }
};
template <class From>
struct Convert<__nv_bfloat16, From> {
  static MPK_DEVICE __nv_bfloat16 apply(From v) { return __float2bfloat16_rn(to_float(v)); }
};
template <>
struct Convert<__nv_bfloat16, __nv_bfloat16> {
  static MPK_DEVICE __nv_bfloat16 apply(__nv_bfloat16 v) { return v; }
};
template <class From>
struct Convert<__half, From> {
  static MPK_DEVICE __half apply(From v) { return __float2half_rn(to_float(v)); }
};
template <>
struct Convert<__half, __half> {
  static MPK_DEVICE __half apply(__half v) { return v; }
};
// The integer part's lowest byte. In C++, converting a negative float to an unsigned integer is undefined.
template <class From>
struct Convert<uint8_t, From> {
  static MPK_DEVICE uint8_t apply(From v) { return static_cast<uint8_t>(Convert<int64_t, From>::apply(v)); }
};
template <>
struct Convert<uint8_t, uint8_t> {
  static MPK_DEVICE uint8_t apply(uint8_t v) { return v; }
};

template <class To, class From>
MPK_DEVICE To cast(From v) {
  return Convert<To, From>::apply(v);
}

// The type an operation on T computes in.
template <class T>
struct ComputeType {
  using type = T;
};
template <>
struct ComputeType<__nv_bfloat16> {
  using type = float;
};
template <>
struct ComputeType<__half> {
  using type = float;
};
template <class T>
using Compute = typename ComputeType<T>::type;

// ---- operations

namespace math {
#define MPK_MATH_1(name)                                  \
  MPK_DEVICE float name(float a) { return ::name##f(a); } \
  MPK_DEVICE double name(double a) { return ::name(a); }
#define MPK_MATH_2(name)                                              \
  MPK_DEVICE float name(float a, float b) { return ::name##f(a, b); } \
  MPK_DEVICE double name(double a, double b) { return ::name(a, b); }
#define MPK_MATH(name, arity, expression) MPK_MATH_##arity(name)
MPK_POINTWISE_MATH(MPK_MATH)
MPK_MATH_1(exp)
MPK_MATH_1(rint)
#undef MPK_MATH
#undef MPK_MATH_1
#undef MPK_MATH_2
}  // namespace math

// ops::name<T>(arguments of compute type T)
namespace ops {
#define MPK_PARAMETERS_1 T a
#define MPK_PARAMETERS_2 T a, T b
#define MPK_OPERATION(name, arity, expression) \
  template <class T>                           \
  MPK_DEVICE T name(MPK_PARAMETERS_##arity) {  \
    return static_cast<T>(expression);         \
  }
#define MPK_COMPARISON(name, arity, expression)  \
  template <class T>                             \
  MPK_DEVICE bool name(MPK_PARAMETERS_##arity) { \
    return expression;                           \
  }
MPK_POINTWISE_ARITHMETIC(MPK_OPERATION)
template <>
MPK_DEVICE float add(float a, float b) {
  return __fadd_rn(a, b);
}
template <>
MPK_DEVICE float sub(float a, float b) {
  return __fsub_rn(a, b);
}
template <>
MPK_DEVICE double add(double a, double b) {
  return __dadd_rn(a, b);
}
template <>
MPK_DEVICE double sub(double a, double b) {
  return __dsub_rn(a, b);
}
MPK_POINTWISE_FLOAT(MPK_OPERATION)
// Within two units of the last place before the final rounding, without the branch of a correctly rounded quotient.
template <>
MPK_DEVICE float sigmoid(float a) {
  return __fdividef(1.0f, 1.0f + math::exp(-a));
}
template <>
MPK_DEVICE float silu(float a) {
  return __fdividef(a, 1.0f + math::exp(-a));
}
MPK_POINTWISE_INTEGER(MPK_OPERATION)
MPK_POINTWISE_COMPARE(MPK_COMPARISON)
#undef MPK_PARAMETERS_1
#undef MPK_PARAMETERS_2
#undef MPK_OPERATION
#undef MPK_COMPARISON
}  // namespace ops

// ---- memory

// Loads a value that this launch does not write, possibly through the read-only cache.
template <class T>
MPK_DEVICE T load_constant(const T* p) {
  if constexpr (sizeof(T) == 1) {
    const unsigned char v = __ldg(reinterpret_cast<const unsigned char*>(p));
    return *reinterpret_cast<const T*>(&v);
  } else {
    return __ldg(p);
  }
}
template <>
MPK_DEVICE bool load_constant(const bool* p) {
  return __ldg(reinterpret_cast<const unsigned char*>(p)) != 0;
}
template <>
MPK_DEVICE int64_t load_constant(const int64_t* p) {
  return __ldg(reinterpret_cast<const long long*>(p));
}

MPK_DEVICE float infinity() { return __int_as_float(0x7f800000); }

// N elements moved as one access of at most 16 bytes.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T v[N];
};

template <class T>
inline constexpr int kVecSize = 16 / sizeof(T);

// Calls f(0), f(1), ... and returns their values.
template <int N, class F>
MPK_DEVICE void for_each(F f) {
#pragma unroll
  for (int i = 0; i < N; i++) f(i);
}
template <class T, int N, class F>
MPK_DEVICE Vec<T, N> each(F f) {
  Vec<T, N> values;
#pragma unroll
  for (int i = 0; i < N; i++) values.v[i] = f(i);
  return values;
}

// Moves neighbouring elements in one access if they are aligned to their total size, else one by one.
template <class T, int N>
MPK_DEVICE bool begins_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(Vec<T, N>) == 0;
}
template <class T, int N>
MPK_DEVICE Vec<T, N> load_together(const T* p) {
  if (begins_aligned<T, N>(p)) return *reinterpret_cast<const Vec<T, N>*>(p);
  return each<T, N>([&](int i) { return p[i]; });
}
template <class T, int N>
MPK_DEVICE void store_together(T* p, const Vec<T, N>& values) {
  if (begins_aligned<T, N>(p))
    *reinterpret_cast<Vec<T, N>*>(p) = values;
  else
    for_each<N>([&](int i) { p[i] = values.v[i]; });
}

// Loads an element of at most four bytes as a word. In a register of its own, a load is not awaited before its value is
// needed.
template <class T>
MPK_DEVICE uint32_t to_word(const T& v) {
  if constexpr (sizeof(T) == 1) return *reinterpret_cast<const uint8_t*>(&v);
  if constexpr (sizeof(T) == 2) return *reinterpret_cast<const uint16_t*>(&v);
  if constexpr (sizeof(T) == 4) return *reinterpret_cast<const uint32_t*>(&v);
}
template <class T>
MPK_DEVICE T from_word(uint32_t word) {
  static_assert(sizeof(T) <= sizeof(word));
  return *reinterpret_cast<const T*>(&word);
}

template <class T, int N>
MPK_DEVICE void to_floats(const Vec<T, N>& v, float (&f)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) f[i] = to_float(v.v[i]);
}
// A bf16 is the upper half of a float. The compiler would take two instructions for every other element.
template <int N>
MPK_DEVICE void to_floats(const Vec<__nv_bfloat16, N>& v, float (&f)[N]) {
  static_assert(N % 2 == 0 || N == 1);
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    const uint32_t pair = reinterpret_cast<const uint32_t*>(&v)[i];
    f[2 * i] = __uint_as_float(pair << 16);
    f[2 * i + 1] = __uint_as_float(pair & 0xffff0000);
  }
  if constexpr (N == 1) f[0] = to_float(v.v[0]);
}

// ---- several elements of a row at once: for 16 bits, two take one instruction

template <class T>
struct PairOf;
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static MPK_DEVICE type round(float a, float b) { return __floats2bfloat162_rn(a, b); }
};
template <>
struct PairOf<__half> {
  using type = __half2;
  static MPK_DEVICE type round(float a, float b) { return __floats2half2_rn(a, b); }
};

// Two elements as a word.
template <class T>
MPK_DEVICE uint32_t round_pair(float a, float b) {
  return to_word(PairOf<T>::round(a, b));
}

// For 16-bit elements, such as those of caches: without a branch, so that of many stores none waits for another.
template <class T>
MPK_DEVICE void store_if(bool condition, T* p, const T& v) {
  if constexpr (sizeof(T) == 2) {
    ptx::store_if(condition, reinterpret_cast<uint16_t*>(p), static_cast<uint16_t>(to_word(v)));
  } else {
    if (condition) *p = v;
  }
}

template <class T, int N>
MPK_DEVICE Vec<T, N> round_to(const float (&v)[N]) {
  Vec<T, N> r;
#pragma unroll
  for (int i = 0; i < N; i++) {
    if constexpr (kIsReduced<T> && N % 2 == 0) {
      if (i % 2 == 0) reinterpret_cast<typename PairOf<T>::type*>(&r)[i / 2] = PairOf<T>::round(v[i], v[i + 1]);
    } else {
      r.v[i] = cast<T>(v[i]);
    }
  }
  return r;
}

// Each result is rounded once, whether computed in T or in float, since float has more than twice as many bits.
template <class T, int N, class Pairs, class Singles>
MPK_DEVICE Vec<T, N> elementwise(const Vec<T, N>& a, const Vec<T, N>& b, Pairs pairs, Singles singles) {
  Vec<T, N> r;
  if constexpr (kIsReduced<T> && N % 2 == 0) {
    using Pair = typename PairOf<T>::type;
#pragma unroll
    for (int i = 0; i < N / 2; i++)
      reinterpret_cast<Pair*>(&r)[i] =
          pairs(reinterpret_cast<const Pair*>(&a)[i], reinterpret_cast<const Pair*>(&b)[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) r.v[i] = cast<T>(singles(to_float(a.v[i]), to_float(b.v[i])));
  }
  return r;
}
template <class T, int N>
MPK_DEVICE Vec<T, N> multiply(const Vec<T, N>& a, const Vec<T, N>& b) {
  return elementwise(
      a, b, [](auto x, auto y) { return __hmul2_rn(x, y); }, [](float x, float y) { return __fmul_rn(x, y); });
}
template <class T, int N>
MPK_DEVICE Vec<T, N> add(const Vec<T, N>& a, const Vec<T, N>& b) {
  return elementwise(
      a, b, [](auto x, auto y) { return __hadd2_rn(x, y); }, [](float x, float y) { return __fadd_rn(x, y); });
}
template <class T, int N>
MPK_DEVICE Vec<T, N> subtract(const Vec<T, N>& a, const Vec<T, N>& b) {
  return elementwise(
      a, b, [](auto x, auto y) { return __hsub2_rn(x, y); }, [](float x, float y) { return __fsub_rn(x, y); });
}

}  // namespace mpk
