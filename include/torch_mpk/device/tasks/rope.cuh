// rope: y = x * cos + rotate_half(x) * sin, each product and the sum rounded as in the eager graph.
#pragma once

#include "torch_mpk/device/row.cuh"

namespace mpk::rope {

// What a variant declares of a row.
template <class V>
concept Traits = requires(const Job& job, uint32_t angle) {
  typename V::T;
  // The head size.
  requires Constants<int, V::kSize>;
  // Rows of x are aligned to 16 bytes, and so are those of the tables.
  requires Constants<bool, V::kVectorized, V::kAlignedTables>;
  // Rows of the tables.
  { V::cos(job, angle) } -> Same<const typename V::T*>;
  { V::sin(job, angle) } -> Same<const typename V::T*>;
};

template <Traits V, class Group>
struct Task {
  using T = typename V::T;
  static constexpr int kHalf = V::kSize / 2;
  // Elements of one access: at least two, if possible, since one instruction computes two.
  static constexpr int kLane = lane_width<T>(kHalf, Group::kSize), kLeast = kLane < 2 ? 2 : kLane;
  static constexpr int kWidth = V::kVectorized && kHalf % kLeast == 0 ? kLeast : 1;
  static constexpr int kSteps = (kHalf / kWidth + Group::kSize - 1) / Group::kSize;
  using Access = Vec<T, kWidth>;

  Access cos[kSteps][2] = {}, sin[kSteps][2] = {};  // of accesses i and i + kHalf / kWidth

  MPK_DEVICE Task(const Group& group, const Job& job, uint32_t angle) {
    const T* cos_row = V::cos(job, angle);
    const T* sin_row = V::sin(job, angle);
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const int i = s * Group::kSize + group.rank;
      if (i < kHalf / kWidth) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          cos[s][half] = load(cos_row + half * kHalf + i * kWidth);
          sin[s][half] = load(sin_row + half * kHalf + i * kWidth);
        }
      }
    }
  }

  MPK_DEVICE void apply(Group& group, T* row) {
    group.sync();  // pairs cross the threads that wrote them
    Access* accesses = reinterpret_cast<Access*>(row);
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const int i = s * Group::kSize + group.rank;
      if (i < kHalf / kWidth) {
        const Access low = accesses[i], high = accesses[i + kHalf / kWidth];
        accesses[i] = subtract(multiply(low, cos[s][0]), multiply(high, sin[s][0]));
        accesses[i + kHalf / kWidth] = add(multiply(high, cos[s][1]), multiply(low, sin[s][1]));
      }
    }
    group.sync();
  }

 private:
  static MPK_DEVICE Access load(const T* p) {
    if constexpr (V::kAlignedTables) {
      return *reinterpret_cast<const Access*>(p);
    } else {
      Access access;
#pragma unroll
      for (int e = 0; e < kWidth; e++) access.v[e] = p[e];
      return access;
    }
  }
};

}  // namespace mpk::rope
