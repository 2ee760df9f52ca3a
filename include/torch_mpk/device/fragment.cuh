// Tensor cores' operands, as warps hold them: sums += factor times factor, 16 x 8 += 16 x 16 times 16 x 8 elements.
//
// Lanes 4 g to 4 g + 3 hold rows g and g + 8 of the first factor and of the sums, and column g of the second. Which
// element stands where along the summed dimension is free as long as both factors agree; so lanes read pieces of 16
// bytes, of two rows and of a column, which serve two products.
#pragma once

#include "torch_mpk/device/ptx.cuh"

namespace mpk {

template <class T>
inline constexpr bool kHasFragments = sizeof(T) == 2;

// A lane's pieces of two rows.
struct RowPieces {
  uint4 upper, lower;

  MPK_DEVICE ptx::Quad first() const { return {upper.x, lower.x, upper.y, lower.y}; }
  MPK_DEVICE ptx::Quad second() const { return {upper.z, lower.z, upper.w, lower.w}; }
};

// A lane's piece of a column.
struct ColumnPiece {
  uint4 piece;

  MPK_DEVICE ptx::Pair first() const { return {piece.x, piece.y}; }
  MPK_DEVICE ptx::Pair second() const { return {piece.z, piece.w}; }
};

// A lane's sums: of two neighbouring columns, from 2 (lane % 4) on, in the upper row, then in the lower.
using SumFragment = float[4];

// Adds the products of the pieces' first halves, and of their second, which may have sums of their own: chains of
// products that wait for each other are to be short.
template <class T>
MPK_DEVICE void multiply_pieces(SumFragment& first, SumFragment& second, const RowPieces& rows,
                                const ColumnPiece& column) {
  static_assert(kHasFragments<T>);
  ptx::mma<T>(first, rows.first(), column.first());
  ptx::mma<T>(second, rows.second(), column.second());
}

}  // namespace mpk
