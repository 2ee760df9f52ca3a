// For the unit that torch_mpk.jit compiles around a kernel: compares the kernel's parameters with what a call passes.
// Plain C++17 without a standard library, as NVRTC has none.
#pragma once

#include <cstdint>

namespace mpk::jit {

// What is passed for one parameter.
template <class T>
struct Read {};  // the address of elements that are only read
template <class T>
struct Write {};
struct Integer {};  // a size, a stride, an int or a bool
struct Float {};

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
template <>
inline constexpr bool accepts<Float, float> = true;
template <>
inline constexpr bool accepts<Float, double> = true;
#define MPK_INTEGER(T) \
  template <>          \
  inline constexpr bool accepts<Integer, T> = true;
MPK_INTEGER(bool)
MPK_INTEGER(int)
MPK_INTEGER(unsigned)
MPK_INTEGER(long)
MPK_INTEGER(unsigned long)
MPK_INTEGER(long long)
MPK_INTEGER(unsigned long long)
#undef MPK_INTEGER

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
