// quantise_rows: each block of x is divided by its scale and rounded to e4m3.
#pragma once

#include "torch_mpk/device/quantized.cuh"
#include "torch_mpk/device/tile.cuh"

namespace mpk::tasks::quantise_rows {

template <class V>
inline constexpr int kSharedBytes = 0;

// How lanes share a block: as many accesses as it has, of eight elements if rows are aligned for them.
template <class V>
struct Shape {
  using T = typename V::X::T;
  static constexpr bool kIsWide = sizeof(T) == 2 && V::kC % 8 == 0 && V::X::kAlignment == 16 &&
                                  V::X::stride(0) % 8 == 0 && V::Numbers::kAlignment == 16;
  static constexpr int kWidth = kIsWide ? 8 : 1, kAccesses = V::kC / kWidth;
  static constexpr int kLanes = kAccesses <= 16 ? 16 : 32, kSteps = (kAccesses + kLanes - 1) / kLanes;
  static constexpr bool kKeeps = kSteps <= 4;  // a block in registers
  // Blocks of a lane that are loaded at a time.
  static constexpr int kAtOnce = kSteps == 1 && kIsWide ? 4 : 1;
  using Access = Vec<T, kWidth>;
};

// A block, by some lanes of a warp. All lanes of the warp call it, some of them for a block that others have, too.
template <class V>
struct Block {
  using S = Shape<V>;
  using T = typename S::T;
  const T* x;
  int lane;
  typename S::Access kept[S::kKeeps ? S::kSteps : 1];

  MPK_DEVICE typename S::Access load(int step) const {
    const int i = step * S::kLanes + lane;
    return i < S::kAccesses ? reinterpret_cast<const typename S::Access*>(x)[i] : typename S::Access{};
  }
  MPK_DEVICE Block(const T* x, int lane) : x(x), lane(lane) {
    if constexpr (S::kKeeps) {
#pragma unroll
      for (int s = 0; s < S::kSteps; s++) kept[s] = load(s);
    }
  }
  template <class F>
  MPK_DEVICE void for_accesses(F f) const {
    if constexpr (S::kKeeps) {
#pragma unroll
      for (int s = 0; s < S::kSteps; s++) f(s * S::kLanes + lane, kept[s]);
    } else {
#pragma unroll 4
      for (int s = 0; s < S::kSteps; s++) f(s * S::kLanes + lane, load(s));
    }
  }
  MPK_DEVICE float scale() const {
    float most = 0;
    for_accesses([&](int, const typename S::Access& access) {
#pragma unroll
      for (const T& v : access.v) most = fmaxf(most, fabsf(to_float(v)));
    });
#pragma unroll
    for (int o = S::kLanes / 2; o > 0; o /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
    return e4m3_scale(most);
  }
  MPK_DEVICE void store(float scale, E4M3* numbers) const {
    const float inverse = 1 / scale;
    for_accesses([&](int i, const typename S::Access& access) {
      if (i >= S::kAccesses) return;
      if constexpr (S::kIsWide) {
        uint16_t pairs[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
          pairs[e] = e4m3_pair(divide_rounded<true>(to_float(access.v[2 * e]), scale, inverse),
                               divide_rounded<true>(to_float(access.v[2 * e + 1]), scale, inverse));
        reinterpret_cast<uint2*>(numbers)[i] = {pairs[0] | uint32_t(pairs[1]) << 16, pairs[2] | uint32_t(pairs[3])
                                                                                                    << 16};
      } else {
        numbers[i].bits =
            static_cast<uint8_t>(e4m3_pair(divide_rounded<true>(to_float(access.v[0]), scale, inverse), 0));
      }
    });
  }
};

template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile& tile, uint8_t*, const T* x,
                        const typename V::Scale::T* given, E4M3* numbers, float* scales) {
  using S = Shape<V>;
  constexpr int kGroups = Threads::kSize / S::kLanes;
  const int group = threads.rank / S::kLanes, lane = threads.rank % S::kLanes;
  const int columns = static_cast<int>(tile.S.size), count = static_cast<int>(tile.R.size) * columns;
  for (int first = 0; first < count; first += kGroups * S::kAtOnce) {
    const auto number = [&](int i) { return min(first + i * kGroups + group, count - 1); };
    const auto at = [&](int i, auto operand) {
      using Operand = decltype(operand);
      return number(i) / columns * Operand::stride(0) + number(i) % columns * Operand::stride(1);
    };
    const auto block = [&](int i) { return Block<V>(x + at(i, typename V::X{}), lane); };
    const auto finish = [&](int i, const Block<V>& own) {
      const float scale = V::Scale::kPresent ? to_float(*given) : own.scale();
      if (first + i * kGroups + group >= count) return;
      own.store(scale, numbers + at(i, typename V::Numbers{}));
      if (lane == 0) scales[at(i, typename V::Scales{})] = scale;
    };
    if constexpr (S::kAtOnce == 4) {
      const Block<V> blocks[4] = {block(0), block(1), block(2), block(3)};
#pragma unroll
      for (int i = 0; i < 4; i++) finish(i, blocks[i]);
    } else {
      finish(0, block(0));
    }
  }
}

}  // namespace mpk::tasks::quantise_rows
