// Polled vectors: how a small vector travels from one phase to the next without a completed event (Schedule::polled).
//
// Whoever needs an element polls it: it then has it after one trip to L2 behind its maker's store, where an event takes
// a fence, a signal, a poll, a barrier and a load. Elements have 16 bits. In memory they stand complemented, and 0 is
// an element that has not come. The one element whose complement is 0, a NaN, travels as another NaN. Launches of even
// and of odd epochs have places of their own: a launch clears those of the next one, in which nobody reads or writes
// meanwhile, and finds its own cleared by the launch before it, or zeroed as the workspace was made.
//
// Elements are read and written with relaxed operations, which go to L2; an element orders nothing but itself. Readers
// take several at a time: the hardware never splits 16 bits, in accesses that are aligned as these are.
#pragma once

#include "torch_mpk/device/row.cuh"
#include "torch_mpk/device/tagged.cuh"

namespace mpk {

inline constexpr uint32_t kAbsent = 0;

MPK_DEVICE uint32_t two_as_stored(uint32_t elements) { return __vmaxu2(~elements, 0x00010001u); }

template <class T>
MPK_DEVICE void store_element(uint16_t* p, T v) {
  static_assert(sizeof(T) == 2);
  const uint32_t bits = *reinterpret_cast<const uint16_t*>(&v);
  ptx::store_relaxed_gpu(p, static_cast<uint16_t>(max(bits ^ 0xffffu, 1u)));
}

// Elements that stand side by side, from an address that is a multiple of their size.
template <class T, int N>
MPK_DEVICE void store_elements(uint16_t* p, const Vec<T, N>& v) {
  static_assert(sizeof(T) == 2);
  if constexpr (N == 1) {
    store_element(p, v.v[0]);
  } else if constexpr (N == 2) {
    const uint32_t two = reinterpret_cast<const uint32_t&>(v);
    ptx::store_relaxed_gpu(reinterpret_cast<uint32_t*>(p), two_as_stored(two));
  } else if constexpr (N == 4) {
    const uint2 four = reinterpret_cast<const uint2&>(v);
    ptx::store_relaxed_gpu(reinterpret_cast<uint2*>(p), make_uint2(two_as_stored(four.x), two_as_stored(four.y)));
  } else {
    static_assert(N == 8);
    const uint4 eight = reinterpret_cast<const uint4&>(v);
    ptx::store_relaxed_gpu(reinterpret_cast<uint4*>(p), make_uint4(two_as_stored(eight.x), two_as_stored(eight.y),
                                                                   two_as_stored(eight.z), two_as_stored(eight.w)));
  }
}

// The element at p once it has come, as it is stored, or kAbsent when the launch was given up.
__device__ __noinline__ uint32_t wait_element(const Watchdog& dog, const uint16_t* p, uint32_t phase) {
  uint32_t stored = kAbsent;
  spin(dog, [&] { return (stored = ptx::load_relaxed_gpu(p)) != kAbsent; }, [&] { return polling(phase); });
  return stored;
}

// The element at p, which has been read already as it is stored, though perhaps too early.
template <class T, class C>
MPK_DEVICE T element_of(C& c, uint32_t stored, const uint16_t* p) {
  if (stored == kAbsent) {
    stored = wait_element(c.shared.watchdog, p, c.phase);
    if (stored == kAbsent) c.failed = true;
  }
  const uint16_t bits = static_cast<uint16_t>(~stored);
  return *reinterpret_cast<const T*>(&bits);
}

// Has one of kAbsentBits when an element of two, as they are stored, is absent; the other bits say nothing. (S. E.
// Anderson, Bit Twiddling Hacks: "Determine if a word has a zero byte".)
inline constexpr uint32_t kAbsentBits = 0x80008000u;
MPK_DEVICE uint32_t absent(uint32_t two) { return (two - 0x00010001u) & ~two; }
MPK_DEVICE uint32_t absent(const uint2& four) { return absent(four.x) | absent(four.y); }
MPK_DEVICE uint32_t absent(const uint4& eight) {
  return absent(eight.x) | absent(eight.y) | absent(eight.z) | absent(eight.w);
}

// Pieces of 16 bytes of a polled vector, at piece(0) to piece(kSteps - 1); where that is null, unspecified. False when
// the launch was given up. A thread has all its loads in flight before it looks at the first element.
template <int kSteps, class Piece>
MPK_DEVICE bool poll_each(uint4 (&to)[kSteps], Piece piece, const Watchdog& dog, uint32_t phase) {
  const uint4 nothing = make_uint4(~0u, ~0u, ~0u, ~0u);
  const bool are_there = poll(dog, phase, [&] {
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const uint4* at = piece(s);
      to[s] = at != nullptr ? ptx::load_relaxed_gpu(at) : nothing;
    }
    uint32_t missing = 0;
#pragma unroll
    for (int s = 0; s < kSteps; s++) missing |= absent(to[s]);
    return missing & kAbsentBits;
  });
  if (!are_there) return false;
#pragma unroll
  for (int s = 0; s < kSteps; s++) to[s] = make_uint4(~to[s].x, ~to[s].y, ~to[s].z, ~to[s].w);
  return true;
}

// Pieces rank, rank + stride, ... of `pieces` in all, at most kSteps for a thread.
template <int kSteps>
MPK_DEVICE bool poll_pieces(uint4 (&to)[kSteps], const uint16_t* src, int rank, int stride, int pieces,
                            const Watchdog& dog, uint32_t phase) {
  __builtin_assume(__isGlobal(src));
  const auto piece = [&](int s) {
    const int i = s * stride + rank;
    return i < pieces ? reinterpret_cast<const uint4*>(src) + i : nullptr;
  };
  return poll_each<kSteps>(to, piece, dog, phase);
}

// The same, to shared memory. Out of line: jobs share it.
template <int kSteps>
__device__ __noinline__ bool copy_pieces(uint4* dst, const uint16_t* src, int rank, int stride, int pieces,
                                         const Watchdog& dog, uint32_t phase) {
  __builtin_assume(__isShared(dst));
  uint4 polled[kSteps];
  if (!poll_pieces(polled, src, rank, stride, pieces, dog, phase)) return false;
#pragma unroll
  for (int s = 0; s < kSteps; s++)
    if (const int i = s * stride + rank; i < pieces) dst[i] = polled[s];
  return true;
}

// Four elements once they have come, as they are stored; some are absent when the launch was given up.
__device__ __noinline__ uint2 wait_four(const Watchdog& dog, const uint2* p, uint32_t phase) {
  uint2 four{};
  spin(
      dog, [&] { return (absent(four = ptx::load_relaxed_gpu(p)) & kAbsentBits) == 0; },
      [&] { return polling(phase); });
  return four;
}

// copy_row from a polled vector.
template <class T, int N, bool vectorized, class Group>
MPK_DEVICE void copy_polled_row(Group& group, T* dst, const uint16_t* src) {
  static_assert(sizeof(T) == 2);
  const Watchdog& dog = group.c.shared.watchdog;
  if constexpr (vectorized && kRowWidth<T, N, Group> == 4) {
    if (group.rank >= N / 4) return;
    const uint2 four = wait_four(dog, reinterpret_cast<const uint2*>(src) + group.rank, group.c.phase);
    if ((absent(four) & kAbsentBits) != 0) group.c.failed = true;
    reinterpret_cast<uint2*>(dst)[group.rank] = make_uint2(~four.x, ~four.y);
  } else if constexpr (vectorized) {
    constexpr int kPieces = N / kVecSize<T>, kSteps = (kPieces + Group::kSize - 1) / Group::kSize;
    if (!copy_pieces<kSteps>(reinterpret_cast<uint4*>(dst), src, group.rank, Group::kSize, kPieces, dog, group.c.phase))
      group.c.failed = true;
  } else {
    for (int i = group.rank; i < N; i += Group::kSize) dst[i] = element_of<T>(group.c, kAbsent, src + i);
  }
}

}  // namespace mpk
