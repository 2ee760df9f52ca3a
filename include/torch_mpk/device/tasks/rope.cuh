// rope: y = x * cos + rotate_half(x) * sin, each product and the sum rounded as in the eager graph.
#pragma once

#include "torch_mpk/device/row.cuh"

namespace mpk::rope {

// V: T, kSize (the head size); cos(job, angle), sin(job, angle): rows of the table.
template <class V, class Group>
struct Task {
  using T = typename V::T;
  static constexpr int kHalf = V::kSize / 2;
  static constexpr int kSteps = (kHalf + Group::kSize - 1) / Group::kSize;

  T cos[kSteps][2] = {}, sin[kSteps][2] = {};  // of elements i and i + kHalf

  MPK_DEVICE Task(const Group& group, const Job& job, uint32_t angle) {
    const T* cos_row = V::cos(job, angle);
    const T* sin_row = V::sin(job, angle);
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const int i = s * Group::kSize + group.rank;
      if (i < kHalf) {
        cos[s][0] = cos_row[i];
        cos[s][1] = cos_row[i + kHalf];
        sin[s][0] = sin_row[i];
        sin[s][1] = sin_row[i + kHalf];
      }
    }
  }

  static MPK_DEVICE T combine(float x, T cos, float rotated, T sin) {
    const T a = cast<T>(__fmul_rn(x, to_float(cos)));
    const T b = cast<T>(__fmul_rn(rotated, to_float(sin)));
    return cast<T>(__fadd_rn(to_float(a), to_float(b)));
  }

  MPK_DEVICE void apply(Group& group, T* row) {
    group.sync();  // pairs cross the threads that wrote them
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const int i = s * Group::kSize + group.rank;
      if (i < kHalf) {
        const float low = to_float(row[i]), high = to_float(row[i + kHalf]);
        row[i] = combine(low, cos[s][0], -high, sin[s][0]);
        row[i + kHalf] = combine(high, cos[s][1], low, sin[s][1]);
      }
    }
    group.sync();
  }
};

}  // namespace mpk::rope
