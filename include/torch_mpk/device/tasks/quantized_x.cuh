// How x becomes float16 for products with quantised weights: the e4m3 numbers that it is quantised to, or its own
// numbers over a power of two. Both factors are exact. With weights of 4 bits x is kept, unless it is quantised, and
// there are only sums of its columns to find.
//
// Columns stand in the order in which a lane has weights, see quantized_weights.cuh: of each 16, words 0, 2, 4, 6, 1,
// 3, 5, 7; or, with weights of 4 bits, of each 32 first columns 0 and 4 of all eights, then 1 and 5, 2 and 6, 3 and 7.
#pragma once

#include "torch_mpk/device/fragment.cuh"
#include "torch_mpk/device/tasks/quantized_weights.cuh"

namespace mpk::linear {

template <class V>
struct XSteps {
  static constexpr int kStep = 128;  // columns of x that have a factor
  // Columns whose sums are scaled together.
  static constexpr int kGroup = V::kScaleColumns > 0 && V::kScaleColumns < kStep ? V::kScaleColumns : kStep;
  static_assert(kGroup % 32 == 0 && V::kScaleColumns % kGroup == 0);
  static_assert(V::kXScaleColumns == 0 || V::kXScaleColumns == kStep || V::kXScaleColumns == V::kSize);
  static constexpr bool kScalesRowsOfX = V::kGivenXScale || V::kXScaleColumns > kStep;
  static constexpr bool kKeepsX = V::kWeightBits == 4 && V::kXScaleColumns == 0;
  static constexpr int kFactorRows = (V::kXRows + 7) / 8 * 8;  // of x, as many as are multiplied
  // A step has the factors of all rows, unless x is kept; then, where they are needed, the sums of each group.
  static constexpr int kFirstSums = kKeepsX ? 0 : kFactorRows;
  static constexpr int kStepFloats = kFirstSums + (kKeepsX || V::kZero != kNoZero ? kStep / kGroup * kFactorRows : 0);
};

// An x that is kept. `rows`: its first row, the next rows `pitch` bytes behind.
template <class V>
struct KeptX {
  using Q = XSteps<V>;
  using T = typename V::T;

  // Where a lane has eight neighbours of 32 columns.
  MPK_DEVICE static int place_of(int pitch, int row, int i, int lane) { return row * pitch + i * 64 + lane % 4 * 16; }
  // The same for two products, of columns that `prepare_step` has put in order. Missing rows repeat the last.
  MPK_DEVICE static void load(const uint8_t* rows, int pitch, int i, int n, int lane, ptx::Pair (&pairs)[2]) {
    const int row = min(8 * n + lane / 4, V::kBatch - 1);
    const uint4 words = *reinterpret_cast<const uint4*>(rows + place_of(pitch, row, i, lane));
    pairs[0] = {words.x, words.y}, pairs[1] = {words.z, words.w};
  }
  // Finds the sums of a step's groups for eight rows, as products with ones, and puts their columns in the order of
  // weights.
  MPK_DEVICE static void prepare_step(uint8_t* rows, int pitch, int n, int lane, float* to) {
    constexpr uint32_t kOnes = FourBits<T>::kOnes;
    constexpr int kSlices = Q::kGroup / 32;
    const int row = 8 * n + lane / 4;
#pragma unroll
    for (int group = 0; group < Q::kStep / Q::kGroup; group++) {
      SumFragment sums[2] = {};
#pragma unroll
      for (int i = 0; i < kSlices; i++) {
        uint4 words{};
        uint4* place = reinterpret_cast<uint4*>(rows + place_of(pitch, row, group * kSlices + i, lane));
        if (row < V::kBatch) words = *place;
        ptx::mma<T>(sums[0], {kOnes, kOnes, kOnes, kOnes}, {words.x, words.y});
        ptx::mma<T>(sums[1], {kOnes, kOnes, kOnes, kOnes}, {words.z, words.w});
        if (row < V::kBatch) *place = in_order_of_words(words);
      }
      float2* place = reinterpret_cast<float2*>(to + group * Q::kFactorRows + 8 * n);
      if (lane < 4) place[lane] = {sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]};
    }
  }
};

// Converts two floats to float16, rounded to e4m3 if x is quantised.
template <class V>
MPK_DEVICE uint32_t x_pair(float low, float high) {
  if constexpr (V::kXScaleColumns > 0) {
    return ptx::halves_of_e4m3(e4m3_pair(low, high));
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// The divisor of 128 columns, or of a row. Where x is not quantised, a power of two that brings the largest magnitude
// below 2^15.
struct XScale {
  float scale, inverse;

  template <class V>
  MPK_DEVICE float divide(float v) const {
    return V::kXScaleColumns > 0 ? divide_rounded<V::kGivenXScale>(v, scale, inverse) : v * inverse;
  }
};
template <class V>
MPK_DEVICE XScale x_scale_of(float most) {
  if constexpr (V::kXScaleColumns > 0) {
    const float scale = e4m3_scale(most);
    return {scale, 1 / scale};
  } else {
    const uint32_t exponent = max(__float_as_uint(most) >> 23, 20u);
    return {__uint_as_float((exponent - 14) << 23), __uint_as_float((268 - exponent) << 23)};
  }
}

// A step of a row, and the place of its factor.
struct XStep {
  uint8_t* at;
  float* factor;
};

// Eight columns of x, a access, as float16 in the order that they stand in.
template <class V>
MPK_DEVICE void convert_access(const XScale& scale, const float (&v)[8], uint32_t (&words)[4]) {
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const int low = V::kWeightBits == 4 ? e : 2 * e, high = V::kWeightBits == 4 ? e + 4 : 2 * e + 1;
    words[e] = x_pair<V>(scale.template divide<V>(v[low]), scale.template divide<V>(v[high]));
  }
}
template <class V>
MPK_DEVICE void store_access(uint8_t* step, int access, const uint32_t (&words)[4]) {
  if constexpr (V::kWeightBits == 4) {
    uint8_t* to = step + access / 4 * 64 + access % 4 * 4;  // of 32 columns
#pragma unroll
    for (int e = 0; e < 4; e++) *reinterpret_cast<uint32_t*>(to + 16 * e) = words[e];
  } else {
    uint8_t* to = step + access / 2 * 32 + access % 2 * 8;  // of 16 columns, of which the access is one half
    *reinterpret_cast<uint2*>(to) = {words[0], words[2]};
    *reinterpret_cast<uint2*>(to + 16) = {words[1], words[3]};
  }
}
// The sum of some accesses, as many neighbouring lanes have.
template <int accesses>
MPK_DEVICE float sum_accesses(const uint32_t (&words)[4]) {
  float sum = 0;
#pragma unroll
  for (uint32_t word : words) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word));
    sum += pair.x + pair.y;
  }
#pragma unroll
  for (int o = accesses / 2; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  return sum;
}

// Steps of x become float16 where they stand, half a warp's each: those from number `first` on, 2 kAtOnce of every
// `stride`, of `count`. They are converted together, since each waits for shared memory and for its half of the warp.
template <class V, int kAtOnce, class Step, class Scale>
MPK_DEVICE void convert_steps(int first, int count, int stride, int lane, Step step_of, Scale scale_of) {
  const int half = lane / 16, access = lane % 16;
  constexpr int kAccesses = XSteps<V>::kGroup / 8;  // of a group
#pragma unroll 1
  for (; first < count; first += stride) {
    float v[kAtOnce][8], sums[kAtOnce];
    uint32_t words[kAtOnce][4];
    XScale scales[kAtOnce];
    XStep steps[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int number = min(first + 2 * i + half, count - 1);
      steps[i] = step_of(number);
      unpack<typename V::T>(*reinterpret_cast<const uint4*>(steps[i].at + access * 16), v[i]);
      scales[i] = scale_of(number, v[i]);
      convert_access<V>(scales[i], v[i], words[i]);
      if constexpr (V::kZero != kNoZero) sums[i] = sum_accesses<kAccesses>(words[i]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      if (first + 2 * i + half >= count) continue;
      store_access<V>(steps[i].at, access, words[i]);
      if (access == 0) *steps[i].factor = scales[i].scale;
      if constexpr (V::kZero != kNoZero)
        if (access % kAccesses == 0) steps[i].factor[(1 + access / kAccesses) * XSteps<V>::kFactorRows] = sums[i];
    }
  }
}

MPK_DEVICE float largest(const float (&v)[8]) {
  float most = 0;
#pragma unroll
  for (float each : v) most = fmaxf(most, fabsf(each));
  return most;
}

// Finds the scale of a step from its own elements, by half a warp.
template <class V>
MPK_DEVICE XScale scale_of_step(const float (&v)[8]) {
  float most = largest(v);
#pragma unroll
  for (int o = 8; o > 0; o /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
  return x_scale_of<V>(most);
}

// Finds the scale of a whole row, by a warp.
template <class V>
MPK_DEVICE XScale scale_of_row(const Job& job, const uint8_t* row, int lane) {
  if constexpr (V::kGivenXScale) {
    const float scale = V::x_scale(job);
    return {scale, 1 / scale};
  } else {
    float most = 0;
#pragma unroll 4
    for (int i = lane; i < V::kSize / 8; i += 32) {
      float v[8];
      unpack<typename V::T>(reinterpret_cast<const uint4*>(row)[i], v);
      most = fmaxf(most, largest(v));
    }
    return x_scale_of<V>(warp_max(most));
  }
}

}  // namespace mpk::linear
