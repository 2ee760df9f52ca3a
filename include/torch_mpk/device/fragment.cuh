// Operands of tensor cores, as warps hold them: sums[16][8] += rows[16][16] * columns[16][8].
//
// Lanes 4 g to 4 g + 3 hold rows g and g + 8 of the first factor and of the sums, and column g of the second. The order
// of elements along the summed dimension is free, as long as both factors agree. So lanes read 16 bytes of two rows and
// of a column, which serve two products.
#pragma once

#include "torch_mpk/device/ptx.cuh"

namespace mpk {

template <class T>
inline constexpr bool kHasFragments = sizeof(T) == 2;

// A lane's elements of two rows.
struct RowFragment {
  uint4 upper, lower;

  MPK_DEVICE ptx::Quad first() const { return {upper.x, lower.x, upper.y, lower.y}; }
  MPK_DEVICE ptx::Quad second() const { return {upper.z, lower.z, upper.w, lower.w}; }
};

// A lane's elements of a column.
struct ColumnFragment {
  uint4 data;

  MPK_DEVICE ptx::Pair first() const { return {data.x, data.y}; }
  MPK_DEVICE ptx::Pair second() const { return {data.z, data.w}; }
};

// A lane's sums: columns 2 (lane % 4) and the next, of the upper row, then of the lower.
using SumFragment = float[4];

// Adds the products of the fragments' first halves and of their second halves. The second may have sums of their own,
// which keeps chains of dependent products short.
template <class T>
MPK_DEVICE void multiply_fragments(SumFragment& first, SumFragment& second, const RowFragment& rows,
                                   const ColumnFragment& column) {
  static_assert(kHasFragments<T>);
  ptx::mma<T>(first, rows.first(), column.first());
  ptx::mma<T>(second, rows.second(), column.second());
}

}  // namespace mpk
