// rms_norm: y = x / sqrt(mean(x^2) + eps), times the weight in one of three styles (see docs/architecture.md).
#pragma once

#include "torch_mpk/device/row.cuh"

namespace mpk::rms_norm {

enum class Style { kLlama, kTorch, kGemma };

// V: T, Weight (element types), kSize, kEps, kStyle, kHasWeight, kVectorized; weight(job).
template <class V, class Group>
struct Task {
  using T = typename V::T;
  using Weight = typename V::Weight;
  static constexpr int kWidth = V::kVectorized ? kRowWidth<T, V::kSize> : 1;  // elements of one access
  static constexpr int kSteps = (V::kSize / kWidth + Group::kSize - 1) / Group::kSize;
  static constexpr bool kSameTypes = kSame<T, Weight>;
  static constexpr bool kKeepWeight = V::kHasWeight && kSteps <= 4;

  const Weight* weight = nullptr;
  // Always given a value: what is set in some threads only stays in a register from one job to the next.
  Vec<Weight, kWidth> kept[kKeepWeight ? kSteps : 1] = {};

  MPK_DEVICE Task(const Group& group, const Job& job, uint32_t) {
    if constexpr (V::kHasWeight) weight = V::weight(job);
    if constexpr (kKeepWeight) {
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        const int i = s * Group::kSize + group.rank;
        if (i < V::kSize / kWidth) kept[s] = reinterpret_cast<const Vec<Weight, kWidth>*>(weight)[i];
      }
    }
  }

  MPK_DEVICE void apply(Group& group, T* row) {
    Vec<T, kWidth>* pieces = reinterpret_cast<Vec<T, kWidth>*>(row);
    float sum = 0;
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const int i = s * Group::kSize + group.rank;
      if (i < V::kSize / kWidth) {
        const Vec<T, kWidth> x = pieces[i];
#pragma unroll
        for (int e = 0; e < kWidth; e++) sum = fmaf(to_float(x.v[e]), to_float(x.v[e]), sum);
      }
    }
    const float scale = rsqrtf(group.sum(sum) * (1.0f / V::kSize) + V::kEps);
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const int i = s * Group::kSize + group.rank;
      if (i < V::kSize / kWidth) {
        const Vec<T, kWidth> x = pieces[i];
        Vec<Weight, kWidth> w = kept[kKeepWeight ? s : 0];
        if constexpr (V::kHasWeight && !kKeepWeight) w = reinterpret_cast<const Vec<Weight, kWidth>*>(weight)[i];
        float n[kWidth];
#pragma unroll
        for (int e = 0; e < kWidth; e++) {
          n[e] = __fmul_rn(to_float(x.v[e]), scale);
          if constexpr (V::kHasWeight && V::kStyle == Style::kLlama && !kSameTypes)
            n[e] = __fmul_rn(to_float(cast<T>(n[e])), to_float(w.v[e]));
          else if constexpr (V::kHasWeight && V::kStyle == Style::kTorch)
            n[e] = __fmul_rn(n[e], to_float(w.v[e]));
          else if constexpr (V::kHasWeight && V::kStyle == Style::kGemma)
            n[e] = __fmul_rn(n[e], __fadd_rn(1.0f, to_float(w.v[e])));
        }
        pieces[i] = round_to<T>(n);
        if constexpr (V::kHasWeight && V::kStyle == Style::kLlama && kSameTypes) pieces[i] = multiply(pieces[i], w);
      }
    }
  }
};

}  // namespace mpk::rms_norm
