// rms_norm: y = x / sqrt(mean(x^2) + eps), times the weight in one of three styles (see docs/internals/tasks.md).
#pragma once

#include "torch_mpk/device/polled.cuh"

namespace mpk::rms_norm {

enum class Style { kLlama, kTorch, kGemma };

// One element, normalised.
template <class T, Style style, class Weight>
MPK_DEVICE T normalised(float x, float scale, const Weight* weight) {
  const float n = __fmul_rn(x, scale);
  if (weight == nullptr) return cast<T>(n);
  if (style == Style::kLlama) return cast<T>(__fmul_rn(to_float(cast<T>(n)), to_float(*weight)));
  return cast<T>(__fmul_rn(n, style == Style::kTorch ? to_float(*weight) : __fadd_rn(1.0f, to_float(*weight))));
}

// Several elements.
template <class T, Style style, bool has_weight, class Weight, int N>
MPK_DEVICE Vec<T, N> normalised(const Vec<T, N>& x, float scale, const Vec<Weight, N>& weight) {
  float n[N];
  to_floats(x, n);
  if constexpr (has_weight && style == Style::kLlama && kSame<T, Weight>) {
#pragma unroll
    for (int e = 0; e < N; e++) n[e] = __fmul_rn(n[e], scale);
    return multiply(round_to<T>(n), weight);
  } else {
    Vec<T, N> y;
#pragma unroll
    for (int e = 0; e < N; e++) y.v[e] = normalised<T, style>(n[e], scale, has_weight ? &weight.v[e] : nullptr);
    return y;
  }
}

// A polled row, and what polling it takes.
struct Polled {
  const uint16_t* src;
  uint32_t phase;
  const Watchdog* dog;
};

// Normalises a row of `accesses` accesses, by neighbouring warps: all of the CTA, or of a WarpGroup. The row is polled
// and then written if it is a polled vector. Weights have the row's dtype. False when the launch was aborted. Out of
// line, since jobs share it. It fetches the weights itself, because a call waits for loads in flight.
template <class T, Style style, bool has_weight, bool is_polled, int kSteps, int warps>
MPK_OUT_OF_LINE bool normalise(uint4* row, const uint4* weights, int accesses, float inverse_size, float eps,
                               float* partials, bool failed, Polled polled) {
  __builtin_assume(__isShared(row));
  __builtin_assume(__isShared(partials));
  constexpr int kWidth = kVecSize<T>, kThreads = 32 * warps;
  using Access = Vec<T, kWidth>;
  const int rank = warps == kConsumerWarps ? ptx::thread_index() : ptx::thread_index() % kThreads;
  // A polled row is in registers anyway. Another row is kept in registers only if it is short, so that callers keep
  // theirs.
  constexpr bool kKeeps = is_polled || kSteps <= 4;
  uint4 kept[kKeeps ? kSteps : 1], factors[kSteps] = {};
  const auto access = [&](int s) -> const Access& {
    return reinterpret_cast<const Access&>(kKeeps ? kept[kKeeps ? s : 0] : row[s * kThreads + rank]);
  };
  if constexpr (has_weight) {
    __builtin_assume(__isGlobal(weights));
#pragma unroll
    for (int s = 0; s < kSteps; s++)
      if (const int i = s * kThreads + rank; i < accesses) factors[s] = weights[i];
  }
  if constexpr (is_polled) {
    failed |= !poll_accesses(kept, polled.src, rank, kThreads, accesses, *polled.dog, polled.phase);
  } else if constexpr (kKeeps) {
#pragma unroll
    for (int s = 0; s < kSteps; s++)
      if (const int i = s * kThreads + rank; i < accesses) kept[s] = row[i];
  }
  float sum = 0, x[kWidth];
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    if (s * kThreads + rank >= accesses) break;
    to_floats(access(s), x);
#pragma unroll
    for (int e = 0; e < kWidth; e++) sum = fmaf(x[e], x[e], sum);
  }
  if constexpr (warps == kConsumerWarps) {
    sum = warp_sum(sum);
    if (rank % 32 == 0) partials[rank / 32] = sum;
    if (ptx::barrier_or<kConsumerThreads>(failed)) return false;
    sum = sum_partials(partials);
  } else {
    sum = sum_over<warps>(sum, partials);
    if (failed) return false;
  }
  const float scale = rsqrtf(sum * inverse_size + eps);
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    const int i = s * kThreads + rank;
    if (i >= accesses) break;
    reinterpret_cast<Access*>(row)[i] =
        normalised<T, style, has_weight>(access(s), scale, reinterpret_cast<const Access&>(factors[s]));
  }
  return true;
}

template <class V>
concept Weighted = requires(const Job& job) {
  { V::weight(job) } -> Same<const typename V::Weight*>;
};

// What a variant declares of a row.
template <class V>
concept Traits = requires {
  typename V::T;
  typename V::Weight;
  requires Constants<int, V::kSize> && Constants<Style, V::kStyle>;
  { V::kEps } -> Same<const float&>;
  // Rows, and the weight, are read and written several elements at a time.
  requires Constants<bool, V::kHasWeight, V::kVectorized>;
} && (!V::kHasWeight || Weighted<V>);

template <Traits V, class Group>
struct Task {
  using T = typename V::T;
  using Weight = typename V::Weight;
  static constexpr int kWidth = V::kVectorized ? kRowWidth<T, V::kSize, Group> : 1;  // elements of one access
  static constexpr int kAccesses = V::kSize / kWidth;
  static constexpr int kSteps = (kAccesses + Group::kSize - 1) / Group::kSize;
  static constexpr bool kKeeps = V::kVectorized && kSteps <= 4 && sizeof(Weight) == sizeof(T);
  // Weights fetched at a time, where they are not kept.
  static constexpr int kAhead = kSteps < 16 ? kSteps : 16;
  static constexpr bool kOutOfLine = V::kVectorized && kSame<T, Weight> && kWidth == kVecSize<T> && Group::kSize > 32 &&
                                     kSteps <= (Group::kSize == kConsumerThreads ? 4 : 8);
  using Weights = Vec<Weight, kWidth>;

  const Weight* weight = nullptr;
  Weights kept[kKeeps ? kSteps : 1] = {};

  MPK_DEVICE Task(const Group& group, const Job& job, uint32_t) {
    if constexpr (V::kHasWeight) weight = V::weight(job);
    if constexpr (V::kHasWeight && kKeeps && !kOutOfLine) {
#pragma unroll
      for (int s = 0; s < kSteps; s++)
        if (const int i = s * Group::kSize + group.rank; i < kAccesses)
          kept[s] = reinterpret_cast<const Weights*>(weight)[i];
    }
  }

  // The row is a polled vector.
  MPK_DEVICE void apply_to_polled(Group& group, T* row, const uint16_t* src) {
    if constexpr (kOutOfLine) {
      call<true>(group, row, {src, group.c.phase, &group.c.shared.watchdog});
    } else {
      copy_polled_row<T, V::kSize, V::kVectorized>(group, row, src);
      if constexpr (!V::kVectorized) group.sync();
      apply(group, row);
    }
  }

  MPK_DEVICE void apply(Group& group, T* row) {
    if constexpr (kOutOfLine) {
      call<false>(group, row, {});
    } else {
      Vec<T, kWidth>* accesses = reinterpret_cast<Vec<T, kWidth>*>(row);
      Weights fetched[kKeeps ? 1 : kAhead];
      if constexpr (!kKeeps) fetch(fetched, 0, group.rank);
      float sum = 0;
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        const int i = s * Group::kSize + group.rank;
        if (kAccesses % Group::kSize != 0 && i >= kAccesses) break;
        float x[kWidth];
        to_floats(accesses[i], x);
#pragma unroll
        for (int e = 0; e < kWidth; e++) sum = fmaf(x[e], x[e], sum);
      }
      const float scale = rsqrtf(group.sum(sum) * (1.0f / V::kSize) + V::kEps);
#pragma unroll
      for (int first = 0; first < kSteps; first += kAhead) {
        if (!kKeeps && first > 0) fetch(fetched, first, group.rank);
#pragma unroll
        for (int s = 0; s < kAhead && first + s < kSteps; s++) {
          const int i = (first + s) * Group::kSize + group.rank;
          if (kAccesses % Group::kSize != 0 && i >= kAccesses) break;
          const Weights w = kKeeps ? kept[kKeeps ? s : 0] : fetched[kKeeps ? 0 : s];
          accesses[i] = normalised<T, V::kStyle, V::kHasWeight>(accesses[i], scale, w);
        }
      }
    }
  }

 private:
  template <int N>
  MPK_DEVICE void fetch(Weights (&to)[N], int first, int rank) const {
#pragma unroll
    for (int s = 0; s < N; s++) {
      to[s] = {};
      const int i = (first + s) * Group::kSize + rank;
      if (V::kHasWeight && first + s < kSteps && i < kAccesses) to[s] = reinterpret_cast<const Weights*>(weight)[i];
    }
  }

  template <bool is_polled>
  MPK_DEVICE void call(Group& group, T* row, Polled polled) {
    if (!group.c.alive) return;
    group.settle(normalise<T, V::kStyle, V::kHasWeight, is_polled, kSteps, Group::kSize / 32>(
        reinterpret_cast<uint4*>(row), reinterpret_cast<const uint4*>(weight), kAccesses, 1.0f / V::kSize, V::kEps,
        group.partials(), group.c.failed, polled));
  }
};

}  // namespace mpk::rms_norm
