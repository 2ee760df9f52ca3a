// Blocks of rows that tile tasks prepare for linears: each is read once, by some lanes of a warp.
#pragma once

#include "torch_mpk/device/tile.cuh"

namespace mpk::row_blocks {

// How lanes share a block of x: as many accesses as it has, of eight elements if its rows and those of `Made`, the
// result of the same size, are aligned for them.
template <class V, class Made>
struct Shape {
  using T = typename V::X::T;
  static constexpr bool kIsWide =
      sizeof(T) == 2 && V::kC % 8 == 0 && V::X::kAlignment == 16 && V::X::stride(0) % 8 == 0 && Made::kAlignment == 16;
  static constexpr int kWidth = kIsWide ? 8 : 1, kAccesses = V::kC / kWidth;
  static constexpr int kLanes = kAccesses <= 16 ? 16 : 32, kSteps = (kAccesses + kLanes - 1) / kLanes;
  static constexpr bool kKeeps = kSteps <= 4;  // a block in registers
  // Blocks of a lane that are loaded at a time.
  static constexpr int kAtOnce = kSteps == 1 && kIsWide ? 4 : 1;
  using Access = Vec<T, kWidth>;
};

// A block, by some lanes of a warp. All lanes of the warp have one, some of them a block that others have, too.
template <class V, class Made>
struct Block {
  using S = Shape<V, Made>;
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
  // Calls f(number, access). Accesses behind a block's last are zero.
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
  // Combines 0 and all elements: first those of each lane, then the lanes'.
  template <class F>
  MPK_DEVICE float fold(F combine) const {
    float all = 0;
    for_accesses([&](int, const typename S::Access& access) {
#pragma unroll
      for (const T& v : access.v) all = combine(all, to_float(v));
    });
#pragma unroll
    for (int o = S::kLanes / 2; o > 0; o /= 2) all = combine(all, __shfl_xor_sync(~0u, all, o));
    return all;
  }
};

// Calls finish(block, place, is_own) for each block of a tile. place(operand) is the block's first element in an
// operand that has rows and blocks first; without `is_own` a lane only takes part in exchanges.
template <class V, class Made, class Threads, class T, class Finish>
MPK_DEVICE void for_blocks(Threads& threads, const typename V::Tile& tile, const T* x, Finish finish) {
  using S = Shape<V, Made>;
  constexpr int kGroups = Threads::kSize / S::kLanes;
  const int group = threads.rank / S::kLanes, lane = threads.rank % S::kLanes;
  const int columns = static_cast<int>(tile.S.size), count = static_cast<int>(tile.R.size) * columns;
  for (int first = 0; first < count; first += kGroups * S::kAtOnce) {
    const auto number = [&](int i) { return min(first + i * kGroups + group, count - 1); };
    const auto at = [&](int i, auto operand) {
      using Operand = decltype(operand);
      return number(i) / columns * Operand::stride(0) + number(i) % columns * Operand::stride(1);
    };
    const auto block = [&](int i) { return Block<V, Made>(x + at(i, typename V::X{}), lane); };
    const auto finish_block = [&](int i, const Block<V, Made>& own) {
      finish(own, [&](auto operand) { return at(i, operand); }, first + i * kGroups + group < count);
    };
    if constexpr (S::kAtOnce == 4) {
      const Block<V, Made> blocks[4] = {block(0), block(1), block(2), block(3)};
#pragma unroll
      for (int i = 0; i < 4; i++) finish_block(i, blocks[i]);
    } else {
      finish_block(0, block(0));
    }
  }
}

}  // namespace mpk::row_blocks
