// Tagged words: how a small vector travels from one phase to the next without a completed event (Schedule::tagged).
//
// A word holds an element of 16 bits and, above it, the tag of the launch and phase that wrote it. Whoever needs an
// element polls its word: it then has the element after one trip to L2 behind its maker's store, where an event takes a
// fence, a signal, a poll, a barrier and a load. Words are read and written with relaxed operations, which go to L2; a
// word orders nothing but itself. Tags are never 0, so zeroed memory holds no element, and neighbouring launches share
// none.
#pragma once

#include "torch_mpk/device/row.cuh"

namespace mpk {

template <class T>
MPK_DEVICE void store_word(uint32_t* p, T v, uint32_t tag) {
  static_assert(sizeof(T) == 2);
  ptx::store_relaxed_gpu(p, tag << 16 | *reinterpret_cast<const uint16_t*>(&v));
}

template <class T, int N>
MPK_DEVICE void store_words(uint32_t* p, const Vec<T, N>& v, uint32_t tag) {
  if constexpr (N % 4 == 0) {
    const uint2* pairs = reinterpret_cast<const uint2*>(&v);
    const uint32_t high = tag << 16;
#pragma unroll
    for (int i = 0; i < N / 4; i++)
      ptx::store_relaxed_gpu_v4(p + 4 * i,
                                make_uint4(ptx::low_halves(pairs[i].x, tag), ptx::high_halves(pairs[i].x, high),
                                           ptx::low_halves(pairs[i].y, tag), ptx::high_halves(pairs[i].y, high)));
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) store_word(p + i, v.v[i], tag);
  }
}

// keep_waiting, for words of a phase.
MPK_DEVICE uint64_t keep_polling(const Watchdog& dog, uint32_t phase, uint32_t seen, uint32_t tag, uint64_t since) {
  return keep_waiting(dog, stall(phase, WarpRole::kConsumer, Waiting::kWord, phase, seen, tag, 0), since);
}

// The word at p once it has the tag, or another when the launch was given up.
__device__ __noinline__ uint32_t wait_word(const Watchdog& dog, const uint32_t* p, uint32_t tag, uint32_t phase) {
  uint32_t word = 0;
  spin(
      dog, [&] { return (word = ptx::load_relaxed_gpu(p)) >> 16 == tag; },
      [&] { return stall(phase, WarpRole::kConsumer, Waiting::kWord, phase, word >> 16, tag, 0); });
  return word;
}

// The element at p, whose word has been read already, though perhaps too early.
template <class T, class C>
MPK_DEVICE T element_of(C& c, uint32_t word, const uint32_t* p, uint32_t tag) {
  if (word >> 16 != tag) {
    word = wait_word(c.shared.watchdog, p, tag, c.phase);
    if (word >> 16 != tag) c.failed = true;
  }
  const uint16_t bits = static_cast<uint16_t>(word);
  return *reinterpret_cast<const T*>(&bits);
}

MPK_DEVICE uint32_t differing(const uint4& words, uint32_t tags) {
  return ((words.x ^ tags) | (words.y ^ tags) | (words.z ^ tags) | (words.w ^ tags)) >> 16;
}

// Four words once they all have the tag, or others when the launch was given up.
__device__ __noinline__ uint4 wait_words(const Watchdog& dog, const uint32_t* p, uint32_t tag, uint32_t phase) {
  uint4 words{};
  spin(
      dog, [&] { return differing(words = ptx::load_relaxed_gpu_v4(p), tag << 16) == 0; },
      [&] { return stall(phase, WarpRole::kConsumer, Waiting::kWord, phase, words.x >> 16, tag, 0); });
  return words;
}

// Pieces rank, rank + stride, ... of 16 bytes, `pieces` in all and at most kSteps for a thread, from tagged words;
// those behind the last are unspecified. False when the launch was given up. A thread has all its loads in flight
// before it looks at the first tag.
template <int kSteps>
MPK_DEVICE bool poll_pieces(uint4 (&to)[kSteps], const uint32_t* src, uint32_t tag, int rank, int stride, int pieces,
                            const Watchdog& dog, uint32_t phase) {
  __builtin_assume(__isGlobal(src));
  const uint32_t tags = tag << 16;
  const uint4 nothing = make_uint4(tags, tags, tags, tags);
  uint4 words[kSteps][2];
  uint64_t since = 0;
  for (uint32_t polls = 1;; polls++) {
    uint32_t missing = 0;
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const int i = s * stride + rank;
#pragma unroll
      for (int half = 0; half < 2; half++)
        words[s][half] = i < pieces ? ptx::load_relaxed_gpu_v4(src + i * 8 + half * 4) : nothing;
    }
#pragma unroll
    for (int s = 0; s < kSteps; s++) missing |= differing(words[s][0], tags) | differing(words[s][1], tags);
    if (missing == 0) break;
    if ((polls & 4095) == 0 && (since = keep_polling(dog, phase, words[0][0].x >> 16, tag, since)) == 0) return false;
  }
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    const uint4 a = words[s][0], b = words[s][1];
    to[s] = make_uint4(ptx::low_halves(a.x, a.y), ptx::low_halves(a.z, a.w), ptx::low_halves(b.x, b.y),
                       ptx::low_halves(b.z, b.w));
  }
  return true;
}

// The same, to shared memory. Out of line: jobs share it.
template <int kSteps>
__device__ __noinline__ bool copy_words(uint4* dst, const uint32_t* src, uint32_t tag, int rank, int stride, int pieces,
                                        const Watchdog& dog, uint32_t phase) {
  __builtin_assume(__isShared(dst));
  uint4 polled[kSteps];
  if (!poll_pieces(polled, src, tag, rank, stride, pieces, dog, phase)) return false;
#pragma unroll
  for (int s = 0; s < kSteps; s++)
    if (const int i = s * stride + rank; i < pieces) dst[i] = polled[s];
  return true;
}

// Two floats, each with a tag of 32 bits above it.
MPK_DEVICE ulonglong2 tagged_floats(float a, float b, uint32_t tag) {
  const uint64_t high = uint64_t(tag) << 32;
  return {high | __float_as_uint(a), high | __float_as_uint(b)};
}
MPK_DEVICE uint32_t differing(const ulonglong2& words, uint32_t tag) {
  return (static_cast<uint32_t>(words.x >> 32) ^ tag) | (static_cast<uint32_t>(words.y >> 32) ^ tag);
}
MPK_DEVICE float float_of(uint64_t word) { return __uint_as_float(static_cast<uint32_t>(word)); }

// copy_row from tagged words.
template <class T, int N, bool vectorized, class Group>
MPK_DEVICE void copy_tagged_row(Group& group, T* dst, const uint32_t* src, uint32_t tag) {
  if constexpr (vectorized && kRowWidth<T, N> == 4 && sizeof(T) == 2) {
    if (group.rank >= N / 4) return;
    const uint4 words = wait_words(group.c.shared.watchdog, src + 4 * group.rank, tag, group.c.phase);
    if (differing(words, tag << 16) != 0) group.c.failed = true;
    reinterpret_cast<uint2*>(dst)[group.rank] =
        make_uint2(ptx::low_halves(words.x, words.y), ptx::low_halves(words.z, words.w));
  } else if constexpr (vectorized) {
    constexpr int kPieces = N / kVecSize<T>, kSteps = (kPieces + Group::kSize - 1) / Group::kSize;
    if (!copy_words<kSteps>(reinterpret_cast<uint4*>(dst), src, tag, group.rank, Group::kSize, kPieces,
                            group.c.shared.watchdog, group.c.phase))
      group.c.failed = true;
  } else {
    for (int i = group.rank; i < N; i += Group::kSize) dst[i] = element_of<T>(group.c, 0, src + i, tag);
  }
}

}  // namespace mpk
