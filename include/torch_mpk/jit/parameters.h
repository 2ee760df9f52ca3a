// For the unit that torch_mpk.jit compiles around a kernel: compares the kernel's parameters with a call's arguments.
// Plain C++17 without a standard library, as NVRTC has none.
#pragma once

#include <cstdint>

namespace mpk::jit {

// The argument of a parameter.
template <class T>
struct Read {};  // the address of elements that are only read
template <class T>
struct Write {};
template <class T>
struct Either {};   // the address of elements that another launch of the call may write
struct Integer {};  // a size, a stride, an int or a bool
struct Float {};

// A float of Python as a template argument, for a parameter that is a float or a double.
struct Number {
  double value;
  constexpr operator float() const { return static_cast<float>(value); }
  constexpr operator double() const { return value; }
};

// A struct that is filled field by field, at their offsets.
template <class T>
inline constexpr bool is_struct = __is_class(T) && __is_standard_layout(T) && __is_trivially_copyable(T);

// For decltype only: an object, and a value's type without const and __restrict__.
template <class T>
T& lvalue();
template <class T>
T by_value(T);

template <class Passed, class Parameter>
inline constexpr bool accepts = false;
template <class T>
inline constexpr bool accepts<Read<T>, const T*> = true;
template <class T>
inline constexpr bool accepts<Read<T>, const void*> = true;
template <class T>
inline constexpr bool accepts<Write<T>, T*> = true;
template <class T>
inline constexpr bool accepts<Write<T>, void*> = true;
template <class T, class Parameter>
inline constexpr bool accepts<Either<T>, Parameter> = accepts<Read<T>, Parameter> || accepts<Write<T>, Parameter>;
template <>
inline constexpr bool accepts<Float, float> = true;
template <>
inline constexpr bool accepts<Float, double> = true;
template <>
inline constexpr bool accepts<Integer, bool> = true;
// An integer's bits, negative if it is signed.
template <class T>
inline constexpr int integer_bits = 0;
template <>
inline constexpr int integer_bits<bool> = 1;
#define MPK_INTEGER(T)                              \
  template <>                                       \
  inline constexpr bool accepts<Integer, T> = true; \
  template <>                                       \
  inline constexpr int integer_bits<T> =            \
      (static_cast<T>(-1) > static_cast<T>(0) ? 8 : -8) * static_cast<int>(sizeof(T));
MPK_INTEGER(int)
MPK_INTEGER(unsigned)
MPK_INTEGER(long)
MPK_INTEGER(unsigned long)
MPK_INTEGER(long long)
MPK_INTEGER(unsigned long long)
#undef MPK_INTEGER

// Places of arguments: offset, bytes and bits of each.
template <int... places>
inline constexpr bool has_unsigned = false;
template <int offset, int bytes, int bits, int... rest>
inline constexpr bool has_unsigned<offset, bytes, bits, rest...> = bits > 0 || has_unsigned<rest...>;

template <int i, class First, class... Rest>
struct At : At<i - 1, Rest...> {};
template <class First, class... Rest>
struct At<0, First, Rest...> {
  using type = First;
};

template <class Function>
struct Parameters;
template <class... P>
struct Parameters<void (*)(P...)> {
  static constexpr int count = sizeof...(P);
  template <int i>
  using at = typename At<i, P...>::type;
};
template <class... P>
struct Parameters<void (*)(P...) noexcept> : Parameters<void (*)(P...)> {};

}  // namespace mpk::jit
