// Included in front of every CPU kernel of torch_mpk.jit.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "torch_mpk/jit/parameters.h"

namespace mpk {

#ifdef __FLT16_MAX__
using fp16_t = _Float16;
#endif

struct bf16_t {
  uint16_t bits;

  bf16_t() = default;
  // Rounds to nearest, ties to even.
  bf16_t(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof(word));
    const bool is_nan = (word & 0x7fffffff) > 0x7f800000;
    bits = is_nan ? 0x7fc0 : static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
  operator float() const {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
  }
};

template <class A, class B>
constexpr auto cdiv(A a, B b) {
  return (a + b - 1) / b;
}

namespace jit {

// Calls a function with the addresses of its parameters' values.
template <auto function, class F = decltype(function)>
struct Entry;
template <auto function, class... P>
struct Entry<function, void (*)(P...)> {
  static constexpr int bytes[] = {static_cast<int>(sizeof(P))..., 0};

  static void run(void** parameters) { call(parameters, std::index_sequence_for<P...>()); }

 private:
  template <size_t... i>
  static void call(void** parameters, std::index_sequence<i...>) {
    function(*static_cast<P*>(parameters[i])...);
  }
};
template <auto function, class... P>
struct Entry<function, void (*)(P...) noexcept> : Entry<function, void (*)(P...)> {};

}  // namespace jit
}  // namespace mpk
