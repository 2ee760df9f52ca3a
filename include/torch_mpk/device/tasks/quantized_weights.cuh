// Quantised weights as tensor cores take them, from boxes in shared memory.
//
// A lane loads four neighbouring bytes of a row of weights. If they are four weights, it multiplies them as the
// elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of 16 columns. Eight weights are four pairs of neighbours at a distance of
// four, since the low and the high half of a register are converted together. They are elements 2 t and 2 t + 1, 2 t +
// 8 and 2 t + 9, of two products.
#pragma once

#include "torch_mpk/device/tasks/quantized_format.cuh"

namespace mpk::linear {

// Eight numbers of e2m1 in the order of to_halves: sign, exponent and mantissa in a half's places give 2^-14 of each,
// denormals included.
MPK_DEVICE void halves_of_e2m1(uint32_t word, uint32_t (&pairs)[4]) {
  const __half2 scale = __float2half2_rn(0x1p14f);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t codes = word << (12 - 4 * i);  // in the highest bits of both halves
    const uint32_t bits = (codes & 0x80008000u) | (codes >> 3 & 0x0e000e00u);
    const __half2 pair = __hmul2_rn(reinterpret_cast<const __half2&>(bits), scale);
    pairs[i] = reinterpret_cast<const uint32_t&>(pair);
  }
}

// Eight weights of 4 bits as four pairs of float16: of columns 0 and 4, 1 and 5, 2 and 6, 3 and 7.
template <class V>
MPK_DEVICE void to_halves(uint32_t word, uint32_t (&pairs)[4]) {
  if constexpr (V::kIsE2M1) return halves_of_e2m1(word, pairs);
  const uint32_t codes = V::kHasMiddle ? word : word ^ 0x88888888;
  // They are the last bits of numbers from 1024 on, or those before, which makes them 16 times as large.
  const __half2 low = __float2half2_rn(-1032), high = __float2half2_rn(-72), sixteenth = __float2half2_rn(0.0625f);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t bits = (codes >> i / 2 * 8 & (i % 2 == 0 ? 0x000f000fu : 0x00f000f0u)) | 0x64006400u;
    const __half2 number = reinterpret_cast<const __half2&>(bits);
    const __half2 pair = i % 2 == 0 ? __hadd2_rn(number, low) : ptx::fma_halves(number, sixteenth, high);
    pairs[i] = reinterpret_cast<const uint32_t&>(pair);
  }
}

// The same as numbers of x's type above a power of two that has room for 4 bits in its last places: one instruction for
// two. What they are above is taken from sums, times the sums of x's columns.
template <class T>
struct FourBits {
  static constexpr bool kIsHalf = kSame<T, __half>;
  static constexpr uint32_t kBase = kIsHalf ? 0x64006400 : 0x43004300, kOnes = kIsHalf ? 0x3c003c00 : 0x3f803f80;
  static constexpr float kAbove = (kIsHalf ? 1024 : 128) + 8;

  template <class V>
  MPK_DEVICE static void widen(uint32_t word, uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      pairs[i] = ptx::mask_and_flip(word >> 4 * i, 0x000f000f, V::kHasMiddle ? kBase : kBase ^ 0x00080008);
  }
};

// Four weights of 8 bits as two pairs of float16.
template <class V>
MPK_DEVICE void to_halves(uint32_t word, uint32_t& first, uint32_t& second) {
  if constexpr (V::kIsE4M3) {
    first = ptx::halves_of_e4m3(static_cast<uint16_t>(word));
    second = ptx::halves_of_e4m3(static_cast<uint16_t>(word >> 16));
  } else {
    // Adding 128 makes them the low bits of numbers from 1024 on.
    const uint32_t bytes = word ^ 0x80808080;
    const __half2 offset = __float2half2_rn(1152);
    const auto half = [&](uint32_t which) {
      const uint32_t bits = ptx::choose_bytes(bytes, 0x64646464, which);
      const __half2 value = __hsub2_rn(reinterpret_cast<const __half2&>(bits), offset);
      return reinterpret_cast<const uint32_t&>(value);
    };
    first = half(0x4140);
    second = half(0x4342);
  }
}

// Weights of some blocks, 32 columns at a time; of 4 bits, as float16 or above what FourBits says.
template <class V, int count, bool are_above = false>
struct BlockWeights {
  static constexpr bool kIsPacked = V::kWeightBits == 4;
  ptx::SharedAddress lines[count];  // where a lane's part of 128 bytes of each row begins
  ptx::Quad bytes[count];           // 32 bytes of it

  MPK_DEVICE BlockWeights(const uint8_t* const (&upper)[count], const uint8_t* const (&lower)[count], int lane) {
    const uint32_t row = lane % 8, matrix = lane / 8;
#pragma unroll
    for (int j = 0; j < count; j++)
      lines[j] = ptx::smem_addr(matrix % 2 == 0 ? upper[j] : lower[j]) + row * 128 + (matrix / 2 ^ row) * 16;
  }
  // The 32 columns with number `i` of a step, which is even or odd: first factors of two products.
  MPK_DEVICE void load(int i, int is_odd, int j, ptx::Quad (&halves)[2]) {
    if constexpr (kIsPacked) {
      if (!is_odd) bytes[j] = ptx::load_matrices(lines[j] ^ 32 * (i / 2));
      convert(bytes[j].v[is_odd * 2], bytes[j].v[is_odd * 2 + 1], halves);
    } else {
      const ptx::Quad own = ptx::load_matrices(lines[j] ^ 32 * i);
#pragma unroll
      for (int m = 0; m < 4; m++) to_halves<V>(own.v[m], halves[m / 2].v[m % 2], halves[m / 2].v[m % 2 + 2]);
    }
  }
  // The same of a lane's words of 32 columns of 4 bits, of its upper and its lower row.
  MPK_DEVICE static void convert(uint32_t upper, uint32_t lower, ptx::Quad (&halves)[2]) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
      uint32_t pairs[4];
      if constexpr (are_above)
        FourBits<typename V::T>::template widen<V>(m == 0 ? upper : lower, pairs);
      else
        to_halves<V>(m == 0 ? upper : lower, pairs);
#pragma unroll
      for (int p = 0; p < 4; p++) halves[p / 2].v[m + p % 2 * 2] = pairs[p];
    }
  }
  // To the step behind number `step` of a chunk, of which a line has one or two.
  MPK_DEVICE void advance(int step) {
#pragma unroll
    for (int j = 0; j < count; j++)
      lines[j] = kIsPacked ? (lines[j] ^ 64) + step % 2 * (V::kBoxRows * 128) : lines[j] + V::kBoxRows * 128;
  }
};

}  // namespace mpk::linear
