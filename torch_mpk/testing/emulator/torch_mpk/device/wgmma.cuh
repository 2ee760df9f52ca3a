// The emulator's version of products of warpgroups: factors in shared memory are read when a product is awaited.
#pragma once

#include <array>

#include "torch_mpk/device/ptx.cuh"

namespace mpk::ptx {

struct SwizzledMatrix {
  const uint8_t* rows;
  int column;
  int box_bytes = 0;  // to the next 64 columns
};
inline SwizzledMatrix swizzled(const void* p) {
  emulator::require_aligned_to(p, 1024);
  return {static_cast<const uint8_t*>(p), 0};
}
inline SwizzledMatrix uniform_swizzled(const void* p) { return swizzled(p); }
inline SwizzledMatrix from_element(SwizzledMatrix m, int row, int column) {
  return {m.rows + row * 128, m.column + column, m.box_bytes};
}
inline SwizzledMatrix from_column(SwizzledMatrix m, int column) { return from_element(m, 0, column); }
inline SwizzledMatrix in_boxes(SwizzledMatrix m, int bytes) { return {m.rows, m.column, bytes}; }
// 16 elements of a row; the first one's column is a multiple of 8.
template <class T>
void read_row(float (&x)[16], const SwizzledMatrix& m, int row) {
  for (int k = 0; k < 16; k += 8) {
    T v[8];
    std::memcpy(v, m.rows + row * 128 + ((m.column + k) / 8 ^ row % 8) * 16, sizeof(v));
    for (int i = 0; i < 8; i++) x[k + i] = static_cast<float>(v[i]);
  }
}
// The products of a thread. `read` reads a row of either matrix.
template <int columns, int size, class Read>
void multiply_rows(float (&d)[columns / 2], const SwizzledMatrix& a, const SwizzledMatrix& b, Read read) {
  const int first = threadIdx.x / 32 % 4 * 16 + lane_id() / 4;
  float x[2][size], y[size];
  for (int i = 0; i < 2; i++) read(x[i], a, first + 8 * i);
  for (int j = 0; j < columns / 8; j++)
    for (int e = 0; e < 2; e++) {
      read(y, b, 8 * j + lane_id() % 4 * 2 + e);
      for (int i = 0; i < 2; i++) {
        float& sum = d[4 * j + 2 * i + e];
        for (int k = 0; k < size; k++) sum = std::fma(x[i][k], y[k], sum);
      }
    }
}
// `multiply` adds a product to d, or with `adds` false puts it there.
template <bool adds = true, int sums, class Multiply>
void start(float (&d)[sums], Multiply multiply) {
  emulator::start_product(d, sums, [&d, multiply] {
    if (!adds) std::fill_n(d, sums, 0.0f);
    multiply(d);
  });
}
template <class T, int columns>
void multiply_matrices(float (&d)[columns / 2], SwizzledMatrix a, SwizzledMatrix b) {
  start(d, [=](float (&sums)[columns / 2]) {
    multiply_rows<columns, 16>(sums, a, b,
                               [](float (&x)[16], const SwizzledMatrix& m, int row) { read_row<T>(x, m, row); });
  });
}
// `as`: of the lanes that have a lane's rows. `read` reads 16 elements of B.
template <class T, int columns, class Read>
void multiply_warps_rows(float (&d)[columns / 2], const std::array<Quad, 4>& as, Read read) {
  float y[16];
  for (int j = 0; j < columns / 8; j++)
    for (int e = 0; e < 2; e++) {
      read(y, 8 * j + lane_id() % 4 * 2 + e);
      for (int i = 0; i < 2; i++)
        for (int k = 0; k < 16; k++) {
          const T x = half_of<T>(as[k % 8 / 2].v[k / 8 * 2 + i], k % 2);
          d[4 * j + 2 * i + e] = std::fma(static_cast<float>(x), y[k], d[4 * j + 2 * i + e]);
        }
    }
}
inline std::array<Quad, 4> of_rows(const Quad& a) {
  std::array<Quad, 4> as;
  emulator::warp_collect(&a, sizeof(a));
  for (int i = 0; i < 4; i++) std::memcpy(&as[i], emulator::warp_value(lane_id() / 4 * 4 + i), sizeof(a));
  return as;
}
template <class T, int columns, bool adds = true>
void multiply_registers(float (&d)[columns / 2], const Quad& a, SwizzledMatrix b) {
  start<adds>(d, [as = of_rows(a), b](float (&sums)[columns / 2]) {
    multiply_warps_rows<T, columns>(sums, as, [&](float (&y)[16], int row) { read_row<T>(y, b, row); });
  });
}
template <class T, int columns>
void multiply_transposed(float (&d)[columns / 2], const Quad& a, SwizzledMatrix b) {
  start(d, [as = of_rows(a), b](float (&sums)[columns / 2]) {
    multiply_warps_rows<T, columns>(sums, as, [&](float (&y)[16], int column) {
      const uint8_t* box = b.rows + column / 64 * b.box_bytes;
      for (int k = 0; k < 16; k++) {
        T v;
        std::memcpy(&v, box + k * 128 + (column % 64 / 8 ^ k % 8) * 16 + column % 8 * sizeof(T), sizeof(v));
        y[k] = static_cast<float>(v);
      }
    });
  });
}
// 32 e4m3 numbers of a row, where 16 elements would be.
inline void read_row_of_bytes(float (&x)[32], const SwizzledMatrix& m, int row) {
  static const struct Numbers {
    float of[256];
    Numbers() {
      for (uint32_t bits = 0; bits < 256; bits++) of[bits] = float_of_e4m3(bits);
    }
  } numbers;
  for (int k = 0; k < 16; k += 8) {
    const uint8_t* bytes = m.rows + row * 128 + ((m.column + k) / 8 ^ row % 8) * 16;
    for (int i = 0; i < 16; i++) x[2 * k + i] = numbers.of[bytes[i]];
  }
}
template <int columns, bool adds>
void multiply_bytes(float (&d)[columns / 2], SwizzledMatrix a, SwizzledMatrix b) {
  start<adds>(d, [=](float (&sums)[columns / 2]) { multiply_rows<columns, 32>(sums, a, b, read_row_of_bytes); });
}
inline void begin_products() {}
inline void commit_products() { emulator::commit_products(); }
template <int groups>
void await_products() {
  emulator::await_products(groups);
}
template <int n>
void hold_sums(float (&)[n]) {}
template <int n>
void await_sums(float (&)[n]) {
  await_products<0>();
}

}  // namespace mpk::ptx
