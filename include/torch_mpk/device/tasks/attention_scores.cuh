// Scores, shared by both of attention's loops: split_kv (attention.cuh) and flash (prefill_attention.cuh).
#pragma once

#include "torch_mpk/device/concepts.cuh"
#include "torch_mpk/device/pointwise.cuh"

namespace mpk::attention {

// What a variant declares of scores, the products of queries and keys.
template <class V>
concept Scores = requires {
  { V::kScale } -> Same<const float&>;
  { V::kSoftCap } -> Same<const float&>;  // bounds the scores' magnitude; 0: no bound
  requires Constants<bool, V::kHasMask, V::kHasSinks>;
  // Whether a row without visible keys gives zeros; otherwise it gives NaN.
  requires Constants<bool, V::kZeroWithoutKeys>;
};

// Each head's sink: a score without a key, which takes its share of the weights.
template <class V>
concept HasSinks = requires(const Job& job, uint32_t h) {
  { V::sink(job, h) } -> Same<float>;
};

// The hardware's exponential has a relative error of a millionth, which is enough for results of 16 bits.
template <class T>
MPK_DEVICE float exponential(float x) {
  return sizeof(T) == 2 ? ptx::exp2(x * 1.44269504f) : expf(x);
}

// The number to subtract from scores and from maxima up to `max` before taking exponentials. With it exp(-inf) is 0
// even where no score counts.
MPK_DEVICE float subtrahend(float max) { return max == -infinity() ? 0.0f : max; }

// A product as a score, before a mask: scaled, then capped. tanh(x) = 1 - 2 / (exp(2 x) + 1), to a ten-millionth of the
// cap. Rounding is explicit, so that a row has the same bits wherever the compiler could contract a product and a sum.
template <class V>
MPK_DEVICE float scored(float product) {
  if constexpr (V::kSoftCap > 0) {
    if constexpr (sizeof(typename V::T) == 2) {
      constexpr float kToExponent = 2 * 1.44269504f * V::kScale / V::kSoftCap;
      return fmaf(-2 * V::kSoftCap, __fdividef(1.0f, __fadd_rn(ptx::exp2(__fmul_rn(product, kToExponent)), 1.0f)),
                  V::kSoftCap);
    }
    return __fmul_rn(V::kSoftCap, tanhf(__fmul_rn(product, V::kScale) / V::kSoftCap));
  } else {
    return product * V::kScale;
  }
}

// Adds a sink to a sum of exponentials above `max`. Returns the factor for the results so far.
template <class T>
MPK_DEVICE float add_sink(float sink, float max, float& sum) {
  const float base = subtrahend(fmaxf(max, sink)), kept = exponential<T>(max - base);
  sum = fmaf(sum, kept, exponential<T>(sink - base));
  return kept;
}

}  // namespace mpk::attention
