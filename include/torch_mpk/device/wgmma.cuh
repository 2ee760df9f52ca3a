// Instructions for products of warpgroups: D = A B^T + D with A[64][16] and B[columns][16], summed in fp32 (wgmma,
// compute capability 9.0). Matrices are in shared memory, A may be in registers.
#pragma once

#include "torch_mpk/device/ptx.cuh"

namespace mpk::ptx {

// A matrix of 16-bit elements in consecutive rows of 128 bytes, in the copy engine's 128-byte swizzle, aligned to 1,024
// bytes. The descriptor has its address, the bytes from 8 rows to the next 8, and the swizzle.
using SwizzledMatrix = uint64_t;
MPK_DEVICE SwizzledMatrix swizzled_at(SharedAddress address) {
  return (address & 0x3ffff) >> 4 | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}
MPK_DEVICE SwizzledMatrix swizzled(const void* p) { return swizzled_at(smem_addr(p)); }
// The same of a place that is equal in all lanes, in uniform registers, where products take it from. A reduction
// leaves it there; after an exchange each product would move its own there. But a reduction takes longer: see "Places
// of boxes in uniform registers" in docs/experiments/rows.md.
MPK_DEVICE SwizzledMatrix uniform_swizzled(const void* p) { return swizzled_at(__reduce_or_sync(~0u, smem_addr(p))); }
// The same from a column on, a multiple of 16 of the row's 64.
MPK_DEVICE SwizzledMatrix from_column(SwizzledMatrix m, int column) { return m + column * 2 / 16; }
// From a row on, a multiple of 8, and a column. Only the lower half changes, which takes half the instructions. But the
// compiler then has more in registers, which linears of 64 rows in 16 bits have not.
MPK_DEVICE SwizzledMatrix from_element(SwizzledMatrix m, int row, int column) {
  SwizzledMatrix sum;
  asm("{\n.reg .b32 low, high;\nmov.b64 {low, high}, %1;\nadd.u32 low, low, %2;\nmov.b64 %0, {low, high};\n}"
      : "=l"(sum)
      : "l"(m), "r"((row * 128 + column * 2) / 16));
  return sum;
}

// The same where 64 columns more are `bytes` further on, for multiply_transposed.
MPK_DEVICE SwizzledMatrix in_boxes(SwizzledMatrix m, int bytes) { return m + (uint64_t(bytes / 16 - 1) << 16); }

template <class T, int columns>
MPK_DEVICE void multiply_matrices(float (&d)[columns / 2], SwizzledMatrix a, SwizzledMatrix b);
// The same of e4m3 numbers, A[64][32] and B[columns][32]: where a row has 16 elements, it has 32 bytes. Unless `adds`,
// D = A B^T.
template <int columns, bool adds>
MPK_DEVICE void multiply_bytes(float (&d)[columns / 2], SwizzledMatrix a, SwizzledMatrix b);
// The same of T with A in registers, 16 rows in those of each warp as `mma` has its first factor. They may change once
// the product has been awaited.
template <class T, int columns, bool adds = true>
MPK_DEVICE void multiply_registers(float (&d)[columns / 2], const Quad& a, SwizzledMatrix b);
// The same with B^T in place of B: each of its 16 rows has `columns` elements, in boxes (see in_boxes).
template <class T, int columns>
MPK_DEVICE void multiply_transposed(float (&d)[columns / 2], const Quad& a, SwizzledMatrix b);

#define MPK_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define MPK_4 "%0, %1, %2, %3"
#define MPK_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MPK_12 MPK_TEN() "%10, %11"
#define MPK_16 MPK_TEN() "%10, %11, %12, %13, %14, %15"
#define MPK_20 MPK_TEN() "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19"
#define MPK_24 MPK_TEN() MPK_TEN(1) "%20, %21, %22, %23"
#define MPK_28 MPK_TEN() MPK_TEN(1) "%20, %21, %22, %23, %24, %25, %26, %27"
#define MPK_32 MPK_TEN() MPK_TEN(1) MPK_TEN(2) "%30, %31"
#define MPK_48 MPK_TEN() MPK_TEN(1) MPK_TEN(2) MPK_TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47"
#define MPK_64 MPK_TEN() MPK_TEN(1) MPK_TEN(2) MPK_TEN(3) MPK_TEN(4) MPK_TEN(5) "%60, %61, %62, %63"
#define MPK_60 MPK_TEN() MPK_TEN(1) MPK_TEN(2) MPK_TEN(3) MPK_TEN(4) MPK_TEN(5)
#define MPK_96 MPK_60 MPK_TEN(6) MPK_TEN(7) MPK_TEN(8) "%90, %91, %92, %93, %94, %95"
#define MPK_128                                                  \
  MPK_60 MPK_TEN(6) MPK_TEN(7) MPK_TEN(8) MPK_TEN(9) MPK_TEN(10) \
      MPK_TEN(11) "%120, %121, %122, %123, %124, %125, %126, %127"
#define MPK_OF_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MPK_OF_8(d, i) MPK_OF_4(d, i), MPK_OF_4(d, i + 4)
#define MPK_OF_12(d, i) MPK_OF_8(d, i), MPK_OF_4(d, i + 8)
#define MPK_OF_16(d, i) MPK_OF_8(d, i), MPK_OF_8(d, i + 8)
#define MPK_OF_20(d, i) MPK_OF_16(d, i), MPK_OF_4(d, i + 16)
#define MPK_OF_24(d, i) MPK_OF_16(d, i), MPK_OF_8(d, i + 16)
#define MPK_OF_28(d, i) MPK_OF_16(d, i), MPK_OF_12(d, i + 16)
#define MPK_OF_32(d, i) MPK_OF_16(d, i), MPK_OF_16(d, i + 16)
#define MPK_OF_48(d, i) MPK_OF_32(d, i), MPK_OF_16(d, i + 32)
#define MPK_OF_64(d, i) MPK_OF_32(d, i), MPK_OF_32(d, i + 32)
#define MPK_OF_96(d, i) MPK_OF_64(d, i), MPK_OF_32(d, i + 64)
#define MPK_OF_128(d, i) MPK_OF_64(d, i), MPK_OF_64(d, i + 64)
// `sums`: columns / 2 of a thread. `a` and `b`: the numbers of the operands behind them.
#define MPK_MULTIPLY(T, type, columns, sums, a, b)                                                      \
  template <>                                                                                           \
  MPK_DEVICE void multiply_matrices<T, columns>(float (&d)[sums], SwizzledMatrix x, SwizzledMatrix y) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" MPK_##sums  \
                 "}, %" #a ", %" #b ", 1, 1, 1, 0, 0;"                                                  \
                 : MPK_OF_##sums(d, 0)                                                                  \
                 : "l"(x), "l"(y)                                                                       \
                 : "memory");                                                                           \
  }
#define MPK_MULTIPLY_ALL(T, type)        \
  MPK_MULTIPLY(T, type, 8, 4, 4, 5)      \
  MPK_MULTIPLY(T, type, 16, 8, 8, 9)     \
  MPK_MULTIPLY(T, type, 24, 12, 12, 13)  \
  MPK_MULTIPLY(T, type, 32, 16, 16, 17)  \
  MPK_MULTIPLY(T, type, 40, 20, 20, 21)  \
  MPK_MULTIPLY(T, type, 48, 24, 24, 25)  \
  MPK_MULTIPLY(T, type, 56, 28, 28, 29)  \
  MPK_MULTIPLY(T, type, 64, 32, 32, 33)  \
  MPK_MULTIPLY(T, type, 96, 48, 48, 49)  \
  MPK_MULTIPLY(T, type, 128, 64, 64, 65) \
  MPK_MULTIPLY(T, type, 192, 96, 96, 97) \
  MPK_MULTIPLY(T, type, 256, 128, 128, 129)
MPK_MULTIPLY_ALL(__nv_bfloat16, "bf16")
MPK_MULTIPLY_ALL(__half, "f16")
#define MPK_MULTIPLY_REGISTERS_AS(name, type, columns, sums, a0, a1, a2, a3, b, adds, transposes)          \
  template <>                                                                                              \
  MPK_DEVICE void name(float (&d)[sums], const Quad& x, SwizzledMatrix y) {                                \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" MPK_##sums     \
                 "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", " #adds ", 1, 1, " #transposes ";" \
                 : MPK_OF_##sums(d, 0)                                                                     \
                 : "r"(x.v[0]), "r"(x.v[1]), "r"(x.v[2]), "r"(x.v[3]), "l"(y)                              \
                 : "memory");                                                                              \
  }
#define MPK_NAME(...) __VA_ARGS__
#define MPK_MULTIPLY_REGISTERS(T, type, columns, sums, a0, a1, a2, a3, b, adds)                                     \
  MPK_MULTIPLY_REGISTERS_AS(MPK_NAME(multiply_registers<T, columns, adds>), type, columns, sums, a0, a1, a2, a3, b, \
                            adds, 0)
#define MPK_MULTIPLY_TRANSPOSED(T, type, columns, sums, a0, a1, a2, a3, b) \
  MPK_MULTIPLY_REGISTERS_AS(MPK_NAME(multiply_transposed<T, columns>), type, columns, sums, a0, a1, a2, a3, b, 1, 1)
MPK_MULTIPLY_TRANSPOSED(__nv_bfloat16, "bf16", 128, 64, 64, 65, 66, 67, 68)
MPK_MULTIPLY_TRANSPOSED(__half, "f16", 128, 64, 64, 65, 66, 67, 68)
#define MPK_MULTIPLY_REGISTERS_ALL(T, type, adds)                     \
  MPK_MULTIPLY_REGISTERS(T, type, 16, 8, 8, 9, 10, 11, 12, adds)      \
  MPK_MULTIPLY_REGISTERS(T, type, 24, 12, 12, 13, 14, 15, 16, adds)   \
  MPK_MULTIPLY_REGISTERS(T, type, 32, 16, 16, 17, 18, 19, 20, adds)   \
  MPK_MULTIPLY_REGISTERS(T, type, 40, 20, 20, 21, 22, 23, 24, adds)   \
  MPK_MULTIPLY_REGISTERS(T, type, 48, 24, 24, 25, 26, 27, 28, adds)   \
  MPK_MULTIPLY_REGISTERS(T, type, 56, 28, 28, 29, 30, 31, 32, adds)   \
  MPK_MULTIPLY_REGISTERS(T, type, 64, 32, 32, 33, 34, 35, 36, adds)   \
  MPK_MULTIPLY_REGISTERS(T, type, 96, 48, 48, 49, 50, 51, 52, adds)   \
  MPK_MULTIPLY_REGISTERS(T, type, 128, 64, 64, 65, 66, 67, 68, adds)  \
  MPK_MULTIPLY_REGISTERS(T, type, 192, 96, 96, 97, 98, 99, 100, adds) \
  MPK_MULTIPLY_REGISTERS(T, type, 256, 128, 128, 129, 130, 131, 132, adds)
MPK_MULTIPLY_REGISTERS_ALL(__nv_bfloat16, "bf16", 0)
MPK_MULTIPLY_REGISTERS_ALL(__nv_bfloat16, "bf16", 1)
MPK_MULTIPLY_REGISTERS_ALL(__half, "f16", 0)
MPK_MULTIPLY_REGISTERS_ALL(__half, "f16", 1)
#undef MPK_MULTIPLY_TRANSPOSED
#undef MPK_MULTIPLY_REGISTERS_ALL
#undef MPK_MULTIPLY_REGISTERS
#undef MPK_NAME
#undef MPK_MULTIPLY_REGISTERS_AS
#define MPK_MULTIPLY_BYTES(columns, sums, a, b, adds)                                                               \
  template <>                                                                                                       \
  MPK_DEVICE void multiply_bytes<columns, adds>(float (&d)[sums], SwizzledMatrix x, SwizzledMatrix y) {             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e4m3 {" MPK_##sums "}, %" #a ", %" #b   \
                                                                                               ", " #adds ", 1, 1;" \
                 : MPK_OF_##sums(d, 0)                                                                              \
                 : "l"(x), "l"(y)                                                                                   \
                 : "memory");                                                                                       \
  }
#define MPK_MULTIPLY_BYTES_ALL(adds)       \
  MPK_MULTIPLY_BYTES(8, 4, 4, 5, adds)     \
  MPK_MULTIPLY_BYTES(16, 8, 8, 9, adds)    \
  MPK_MULTIPLY_BYTES(24, 12, 12, 13, adds) \
  MPK_MULTIPLY_BYTES(32, 16, 16, 17, adds) \
  MPK_MULTIPLY_BYTES(40, 20, 20, 21, adds) \
  MPK_MULTIPLY_BYTES(48, 24, 24, 25, adds) \
  MPK_MULTIPLY_BYTES(56, 28, 28, 29, adds) \
  MPK_MULTIPLY_BYTES(64, 32, 32, 33, adds) \
  MPK_MULTIPLY_BYTES(96, 48, 48, 49, adds) \
  MPK_MULTIPLY_BYTES(128, 64, 64, 65, adds)
MPK_MULTIPLY_BYTES_ALL(0)
MPK_MULTIPLY_BYTES_ALL(1)
#undef MPK_MULTIPLY_BYTES_ALL
#undef MPK_MULTIPLY_BYTES
#undef MPK_MULTIPLY_ALL
#undef MPK_MULTIPLY
#undef MPK_OF_128
#undef MPK_OF_96
#undef MPK_OF_64
#undef MPK_OF_48
#undef MPK_OF_32
#undef MPK_OF_28
#undef MPK_OF_24
#undef MPK_OF_20
#undef MPK_OF_16
#undef MPK_OF_12
#undef MPK_OF_8
#undef MPK_OF_4
#undef MPK_128
#undef MPK_96
#undef MPK_60
#undef MPK_64
#undef MPK_48
#undef MPK_32
#undef MPK_28
#undef MPK_24
#undef MPK_20
#undef MPK_16
#undef MPK_12
#undef MPK_8
#undef MPK_4
#undef MPK_TEN

// Call it before the first product that uses registers or shared memory that the warp has written.
MPK_DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Ends a group of products.
MPK_DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most the latest `groups` groups are in flight.
template <int groups>
MPK_DEVICE void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}
// The compiler moves no use of these sums across it.
template <int n>
MPK_DEVICE void hold_sums(float (&d)[n]) {
#pragma unroll
  for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Waits until all products are done. The compiler keeps uses of the sums behind it.
template <int n>
MPK_DEVICE void await_sums(float (&d)[n]) {
  await_products<0>();
  hold_sums(d);
}

}  // namespace mpk::ptx
