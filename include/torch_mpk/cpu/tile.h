// The vocabulary of device/tile.cuh for the CPU: a tile is computed by a group of one thread.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "torch_mpk/tile.h"

#define MPK_DEVICE inline

namespace mpk {

template <class To, class From>
To bit_cast(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &v, sizeof(to));
  return to;
}

// Conversions round to nearest, ties to even; a NaN stays a NaN.
struct BFloat16 {
  uint16_t bits;

  explicit operator float() const { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
  static BFloat16 of(float value) {
    const uint32_t wide = bit_cast<uint32_t>(value);
    const uint32_t rounded = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
    return {static_cast<uint16_t>((wide & 0x7fffffff) > 0x7f800000 ? wide >> 16 | 0x40 : rounded)};
  }
};

struct Float16 {
  uint16_t bits;

  // A multiplication corrects the exponent's bias, and normalises denormals.
  explicit operator float() const {
    const uint32_t magnitude = (bits & 0x7fffu) << 13;
    const uint32_t scaled = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);
    const uint32_t wide = magnitude >= 0x7c00u << 13 ? magnitude | 0x7f800000u : scaled;
    return bit_cast<float>(wide | (bits & 0x8000u) << 16);
  }
  // Below the smallest normal number the sum with 0.5 does the rounding.
  static Float16 of(float value) {
    const uint32_t wide = bit_cast<uint32_t>(value), sign = wide >> 16 & 0x8000u, magnitude = wide & 0x7fffffffu;
    uint32_t half = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    if (magnitude < 0x38800000u) half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    if (magnitude >= 0x477ff000u) half = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return {static_cast<uint16_t>(half | sign)};
  }
};

template <class T>
inline constexpr bool kIsReduced = std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>;

template <class T>
float to_float(T v) {
  return static_cast<float>(v);
}

template <class To, class From>
To cast(From v) {
  if constexpr (std::is_same_v<To, From>)
    return v;
  else if constexpr (kIsReduced<To>)
    return To::of(to_float(v));
  else if constexpr (kIsReduced<From>)
    return static_cast<To>(to_float(v));
  else
    return static_cast<To>(v);
}

template <class T>
using Compute = std::conditional_t<kIsReduced<T>, float, T>;

inline float infinity() { return std::numeric_limits<float>::infinity(); }

struct OneThread {
  static constexpr int kSize = 1, rank = 0;
  float sum(float v) { return v; }
  float max(float v) { return v; }
  void sync() {}
};

// The addresses of a node's operands, as generated code sees them.
struct Job {
  uint8_t* const* operands;
  template <class T>
  T* pointer(int i) const {
    return reinterpret_cast<T*>(operands[i]);
  }
};

// One compiled kind of tile.
struct TileCode {
  void (*run)(uint8_t* const* operands, uint32_t begin, uint32_t end, uint8_t* shared);
  int64_t shared_bytes;
};

template <class V>
void run_tiles(uint8_t* const* operands, uint32_t begin, uint32_t end, uint8_t* shared) {
  OneThread threads;
  const Job job{operands};
  for (uint32_t number = begin; number < end; number++) V::template compute<V>(threads, job, number, shared);
}

template <class V>
inline constexpr TileCode kTileCode = {run_tiles<V>, V::template shared_bytes<V>()};

}  // namespace mpk
