// Polled vectors: a small vector travels from one phase to the next without a completed event (Schedule::polled).
//
// Readers poll the elements that they need. They get an element one trip to L2 after its store; an event takes a fence,
// a signal, a poll, a barrier and a load. Elements have 16 bits, and are stored complemented; 0 marks an absent
// element. One NaN has 0 as its complement, and travels as another NaN. Launches of even and odd epochs use separate
// places. Each launch clears the next one's place, which nobody uses meanwhile, and finds its own cleared by the launch
// before, or zeroed with the workspace.
//
// Elements are read and written with relaxed operations, which go to L2. An element orders nothing but itself. Readers
// take several at a time: the hardware never splits 16 bits in such aligned accesses.
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

// N neighbouring elements, aligned to their total size.
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

// Waits for the element at p, and returns it as stored, or kAbsent when the launch was aborted.
__device__ __noinline__ uint32_t wait_element(const Watchdog& dog, const uint16_t* p, uint32_t phase) {
  uint32_t stored = kAbsent;
  spin(dog, [&] { return (stored = ptx::load_relaxed_gpu(p)) != kAbsent; }, [&] { return polling(phase); });
  return stored;
}

// The element at p, of which `stored` was read earlier, perhaps too early.
template <class T, class C>
MPK_DEVICE T element_of(C& c, uint32_t stored, const uint16_t* p) {
  if (stored == kAbsent) {
    stored = wait_element(c.shared.watchdog, p, c.phase);
    if (stored == kAbsent) c.failed = true;
  }
  const uint16_t bits = static_cast<uint16_t>(~stored);
  return *reinterpret_cast<const T*>(&bits);
}

// Has one of kAbsentBits set if one of two stored elements is absent. Other bits mean nothing. (S. E. Anderson, Bit
// Twiddling Hacks: "Determine if a word has a zero byte".)
inline constexpr uint32_t kAbsentBits = 0x80008000u;
MPK_DEVICE uint32_t absent(uint32_t two) { return (two - 0x00010001u) & ~two; }
MPK_DEVICE uint32_t absent(const uint2& four) { return absent(four.x) | absent(four.y); }
MPK_DEVICE uint32_t absent(const uint4& eight) {
  return absent(eight.x) | absent(eight.y) | absent(eight.z) | absent(eight.w);
}

// Polls the 16-byte accesses access(0) to access(kSteps - 1) of a polled vector; null ones are left unspecified. False
// when the launch was aborted. A thread has all its loads in flight before it checks the first element.
template <int kSteps, class Access>
MPK_DEVICE bool poll_each(uint4 (&to)[kSteps], Access access, const Watchdog& dog, uint32_t phase) {
  const uint4 nothing = make_uint4(~0u, ~0u, ~0u, ~0u);
  const bool are_there = poll(dog, phase, [&] {
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const uint4* at = access(s);
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

// Polls accesses rank, rank + stride, ... of `accesses` in all, at most kSteps for a thread.
template <int kSteps>
MPK_DEVICE bool poll_accesses(uint4 (&to)[kSteps], const uint16_t* src, int rank, int stride, int accesses,
                              const Watchdog& dog, uint32_t phase) {
  __builtin_assume(__isGlobal(src));
  const auto access = [&](int s) {
    const int i = s * stride + rank;
    return i < accesses ? reinterpret_cast<const uint4*>(src) + i : nullptr;
  };
  return poll_each<kSteps>(to, access, dog, phase);
}

// The same, and copies them to shared memory. Out of line: jobs share it.
template <int kSteps>
__device__ __noinline__ bool copy_polled(uint4* dst, const uint16_t* src, int rank, int stride, int accesses,
                                         const Watchdog& dog, uint32_t phase) {
  __builtin_assume(__isShared(dst));
  uint4 polled[kSteps];
  if (!poll_accesses(polled, src, rank, stride, accesses, dog, phase)) return false;
#pragma unroll
  for (int s = 0; s < kSteps; s++)
    if (const int i = s * stride + rank; i < accesses) dst[i] = polled[s];
  return true;
}

// Waits for four elements, and returns them as stored. Some are absent when the launch was aborted.
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
    constexpr int kAccesses = N / kVecSize<T>, kSteps = (kAccesses + Group::kSize - 1) / Group::kSize;
    if (!copy_polled<kSteps>(reinterpret_cast<uint4*>(dst), src, group.rank, Group::kSize, kAccesses, dog,
                             group.c.phase))
      group.c.failed = true;
  } else {
    for (int i = group.rank; i < N; i += Group::kSize) dst[i] = element_of<T>(group.c, kAbsent, src + i);
  }
}

}  // namespace mpk
