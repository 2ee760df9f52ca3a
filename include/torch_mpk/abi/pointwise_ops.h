// The scalar operations of pointwise programs, stated once.
//
// X(name, number of arguments, expression). The expression is valid in C++ and in CUDA; `a`, `b`, `c` are the arguments
// after conversion to the operation's compute type T (float for bf16, fp16 and fp32; double for fp64; the type itself
// for integers and bool), and the result is rounded to the instruction's dtype. `math::` is cmath on the host and
// CUDA's accurate functions on the device. The CPU interpreter, the CUDA code generator and the list Python sees are
// all made from this table.
#pragma once

#include <cstdint>

namespace mpk {

// The type that T's sums and products are computed in. Integers wrap, but in C++ only unsigned ones do: the overflow of
// a signed one is undefined. Types narrower than int are computed as int, which has room for every result.
template <class T>
struct WrappingType {
  using type = T;
};
template <>
struct WrappingType<int32_t> {
  using type = uint32_t;
};
template <>
struct WrappingType<int64_t> {
  using type = uint64_t;
};
template <class T>
using Wrapping = typename WrappingType<T>::type;

}  // namespace mpk

// Result type: the instruction's dtype.
#define MPK_POINTWISE_ARITHMETIC(X)                                \
  X(add, 2, T(Wrapping<T>(a) + Wrapping<T>(b)))                    \
  X(sub, 2, T(Wrapping<T>(a) - Wrapping<T>(b)))                    \
  X(mul, 2, T(Wrapping<T>(a) * Wrapping<T>(b)))                    \
  X(neg, 1, T(-Wrapping<T>(a)))                                    \
  X(abs, 1, a <= T(0) ? T(Wrapping<T>(T(0)) - Wrapping<T>(a)) : a) \
  X(maximum, 2, (a != a || a > b) ? a : b)                         \
  X(minimum, 2, (a != a || a < b) ? a : b)

// Floating types only: what the C library has, by its name there.
#define MPK_POINTWISE_MATH(X)    \
  X(sqrt, 1, math::sqrt(a))      \
  X(log, 1, math::log(a))        \
  X(log2, 1, math::log2(a))      \
  X(log10, 1, math::log10(a))    \
  X(log1p, 1, math::log1p(a))    \
  X(exp2, 1, math::exp2(a))      \
  X(expm1, 1, math::expm1(a))    \
  X(sin, 1, math::sin(a))        \
  X(cos, 1, math::cos(a))        \
  X(tan, 1, math::tan(a))        \
  X(asin, 1, math::asin(a))      \
  X(acos, 1, math::acos(a))      \
  X(atan, 1, math::atan(a))      \
  X(sinh, 1, math::sinh(a))      \
  X(cosh, 1, math::cosh(a))      \
  X(tanh, 1, math::tanh(a))      \
  X(asinh, 1, math::asinh(a))    \
  X(acosh, 1, math::acosh(a))    \
  X(atanh, 1, math::atanh(a))    \
  X(erf, 1, math::erf(a))        \
  X(floor, 1, math::floor(a))    \
  X(ceil, 1, math::ceil(a))      \
  X(trunc, 1, math::trunc(a))    \
  X(pow, 2, math::pow(a, b))     \
  X(atan2, 2, math::atan2(a, b)) \
  X(fmod, 2, math::fmod(a, b))

// Floating types only.
#define MPK_POINTWISE_FLOAT(X)                                                                                \
  MPK_POINTWISE_MATH(X)                                                                                       \
  X(div, 2, a / b)                                                                                            \
  X(square, 1, a* a)                                                                                          \
  X(reciprocal, 1, T(1) / a)                                                                                  \
  X(rsqrt, 1, T(1) / math::sqrt(a))                                                                           \
  X(exp, 1, math::exp(a))                                                                                     \
  X(sigmoid, 1, T(1) / (T(1) + math::exp(-a)))                                                                \
  X(silu, 1, a / (T(1) + math::exp(-a)))                                                                      \
  X(gelu, 1, a* T(0.5) * (T(1) + math::erf(a * T(0.70710678118654752440))))                                   \
  X(gelu_tanh, 1, a* T(0.5) * (T(1) + math::tanh(T(0.79788456080286535588) * (a + T(0.044715) * a * a * a)))) \
  X(relu, 1, (a != a || a > T(0)) ? a : T(0))                                                                 \
  X(softplus, 1, a > T(20) ? a : math::log1p(math::exp(a)))                                                   \
  X(round, 1, math::rint(a))

// Integer types only. `floordiv` and `remainder` round toward minus infinity, as PyTorch's floor_divide and remainder
// do, `truncdiv` toward zero. By zero they give 0; the CPU's runtime looks for such divisors and raises an error.
// Dividing by -1 is negation, because x86 traps where the smallest integer is divided by it. A shift by a negative
// count, or by one that leaves no bit, gives what the largest shift does.
#define MPK_POINTWISE_INTEGER(X)                                                                                    \
  X(floordiv, 2,                                                                                                    \
    b == T(0)                  ? T(0)                                                                               \
    : (b < T(0) && b == T(-1)) ? T(-Wrapping<T>(a))                                                                 \
                               : T(a / b - ((a % b != T(0)) && ((a < T(0)) != (b < T(0))) ? 1 : 0)))                \
  X(truncdiv, 2, b == T(0) ? T(0) : (b < T(0) && b == T(-1)) ? T(-Wrapping<T>(a)) : T(a / b))                       \
  X(remainder, 2,                                                                                                   \
    (b == T(0) || (b < T(0) && b == T(-1))) ? T(0)                                                                  \
                                            : T((a % b != T(0)) && ((a < T(0)) != (b < T(0))) ? a % b + b : a % b)) \
  X(shl, 2, (b < T(0) || b >= T(8 * sizeof(T))) ? T(0) : T(Wrapping<T>(a) << b))                                    \
  X(shr, 2, (b < T(0) || b >= T(8 * sizeof(T))) ? T(a < T(0) ? -1 : 0) : T(a >> b))                                 \
  X(bit_and, 2, a& b)                                                                                               \
  X(bit_or, 2, a | b)                                                                                               \
  X(bit_xor, 2, a ^ b)

// Result bool; the compute type is the arguments'.
#define MPK_POINTWISE_COMPARE(X)            \
  X(eq, 2, a == b)                          \
  X(ne, 2, a != b)                          \
  X(lt, 2, a < b)                           \
  X(le, 2, a <= b)                          \
  X(gt, 2, a > b)                           \
  X(ge, 2, a >= b)                          \
  X(logical_and, 2, a != T(0) && b != T(0)) \
  X(logical_or, 2, a != T(0) || b != T(0))  \
  X(logical_not, 1, a == T(0))              \
  X(isnan, 1, a != a)
