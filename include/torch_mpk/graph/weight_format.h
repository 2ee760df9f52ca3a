// The memory layout of a quantised weight, and the meaning of a product with it. A format is described here once:
// kernels ask this, and never the node.
//
//   y[r, n] = sum over k of x'[r, k] * (number[n, k] * scale[i, j] + offset[i, j]),  i = n / block_rows,
//                                                                                    j = k / block_columns
//
// Numbers are e4m3 or int8, one to a byte; or integers of 4 bits, two to a byte, the first of them in the low bits. An
// int32 of eight such numbers is four bytes of them; or, as AWQ has it, eight rows of one column, see place(). Those of
// int8 have a sign; uint8 and int32 hold 8 more than the number. Or 4 bits of uint8 are looked up in a table of 16
// numbers, and the first stands in the high bits. Or they are e2m1, and the first stands in the low bits. Where there
// are zero points they say offset: it is the zero point itself, of a floating type, or minus the zero point times the
// scale, where 8 belongs to the zero point, too, if it belongs to the numbers. int32 has eight zero points of 4 bits,
// of eight blocks of rows, which stand in a word as the weight's rows do.
//
// Scales may be bytes themselves: number[byte] * scale[p / scale_block] + offset, where p is the scale's place in
// row-major order.
//
// x' is x; or, where activations are quantised, too, the e4m3 number next to x / s, times s. s is given (x_scale), or
// the largest magnitude of some columns of a row over 448, at least kLeastScale.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "torch_mpk/graph/tb_graph.h"

namespace mpk {

inline constexpr float kLargestE4M3 = 448, kLeastScale = 1e-12f;

enum class ZeroKind { kNone, kAdded, kPoints, kPackedPoints };

struct WeightFormat {
  DType storage, scale_dtype;
  int64_t rows, columns;              // of the matrix
  int64_t packed, word_rows;          // columns, and rows, to an element of the storage
  int64_t block_rows, block_columns;  // that a scale is for
  int64_t x_columns;                  // that a scale of x is for; 0: x is not quantised
  bool has_static_x;                  // that scale is given
  bool has_groups;                    // j is given for each k
  bool has_code;                      // numbers are looked up
  int64_t scale_block;                // scales that share one of theirs; 0: they have none
  ZeroKind zero;
  int64_t zero_bytes;  // of one, where they are added

  static constexpr int kMiddle = 8;  // what a number of 4 bits without a sign is stored above
  static constexpr int kWordRows = 8;
  static constexpr int kCodes = 16, kScaleCodes = 256;

  bool quantizes_x() const { return x_columns > 0; }
  bool has_zero() const { return zero != ZeroKind::kNone; }
  bool has_word_rows() const { return word_rows > 1; }
  // The place of a row's 4 bits in a word of rows; of a block's zero point in a word of them.
  int64_t place(int64_t row) const { return has_word_rows() ? row % 8 / 2 + row % 2 * 4 : row % 8; }
  int64_t bits() const { return packed * word_rows == 1 ? 8 : 4; }
  bool has_middle() const { return bits() == 4 && storage != DType::kI8 && !is_e2m1() && !has_code; }
  bool is_e2m1() const { return storage == DType::kE2M1; }
  bool has_nested_scales() const { return scale_block > 0; }
  int64_t row_bytes() const { return columns * bits() / 8; }
  int64_t columns_of(int64_t bytes) const { return bytes * 8 / bits(); }
  int64_t scale_rows() const { return count(rows, block_rows); }
  int64_t scale_columns() const { return count(columns, block_columns); }
  // Whether all that a row of the weight has beside its numbers is one scale.
  bool scales_rows() const { return block_columns >= columns && !has_zero() && !has_groups && !has_nested_scales(); }
  // Columns from one change of a scale, of the weight or of x, to the next; all of them if they are in no order.
  int64_t run() const;
  std::string name() const;  // for people

  // The format of a node with `quantized_linear`'s operands and attributes, or of all matrices of one that has several.
  // Without an x, the node's result is the matrix.
  // Says what is wrong if it has none.
  static WeightFormat of(const Node& node);
  static std::optional<std::string> refuses(const Node& node);

 private:
  static int64_t count(int64_t size, int64_t block) { return (size + block - 1) / block; }
  std::optional<std::string> refuses_storage(const Node& node) const;
  std::optional<std::string> refuses_scales(const Node& node) const;
  std::optional<std::string> refuses_groups(const Node& node) const;
  std::optional<std::string> refuses_tables(const Node& node) const;
};

}  // namespace mpk
