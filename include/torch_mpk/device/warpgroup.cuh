// Products of warpgroups: four warps multiply matrices.
#pragma once

#include "torch_mpk/device/consumer.cuh"
#include "torch_mpk/device/wgmma.cuh"

namespace mpk {

// Rows of the first factor that a warpgroup multiplies.
inline constexpr int kWarpgroupRows = kWarpgroupWarps * kWarpRows;
static_assert(kTileXRows == kWarpgroups * kWarpgroupRows);

// A thread's share of the sums of 64 rows by `columns`. Elements 4 j and 4 j + 1 are columns 8 j + 2 (lane % 4) and the
// next of the warp's row lane / 4; elements 4 j + 2 and 4 j + 3 are those of the row 8 below.
template <int columns>
using WarpgroupSums = float[columns / 2];

// Tells the compiler that a value is equal in all lanes: products take addresses from uniform registers.
MPK_DEVICE uint32_t warp_uniform(uint32_t v) { return __shfl_sync(~0u, v, 0); }

// Multiplies 64 columns of both factors, blocks of rows as boxes have them: x [64][64] and weights [columns][64].
// Products are in flight until they are awaited.
template <class T, int columns>
MPK_DEVICE void multiply_blocks(WarpgroupSums<columns>& sums, ptx::SwizzledMatrix a, ptx::SwizzledMatrix b) {
#pragma unroll
  for (int k = 0; k < kBoxColumns; k += 16)
    ptx::multiply_matrices<T, columns>(sums, ptx::from_column(a, k), ptx::from_column(b, k));
}

// The sums of 128 columns of e4m3 numbers, of blocks of rows as boxes have them, in place of what `sums` hold.
template <int columns>
MPK_DEVICE void multiply_byte_blocks(WarpgroupSums<columns>& sums, const uint8_t* x, const uint8_t* weights) {
  const ptx::SwizzledMatrix a = ptx::uniform_swizzled(x), b = ptx::uniform_swizzled(weights);
  ptx::multiply_bytes<columns, false>(sums, a, b);
#pragma unroll
  for (int k = 16; k < kBoxColumns; k += 16)  // of two bytes
    ptx::multiply_bytes<columns, true>(sums, ptx::from_element(a, 0, k), ptx::from_element(b, 0, k));
}

}  // namespace mpk
