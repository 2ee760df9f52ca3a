// The memory layout of a quantised weight, and the meaning of a product with it. A format is described here once:
// kernels ask this, and never the node.
//
//   y[r, n] = sum over k of x'[r, k] * weight[n, k] * scale[n / block_rows, k / block_columns]
//
// Weights are e4m3 or int8, one byte each. x' is x or, if activations are quantised, too, the e4m3 number nearest to x
// / s, times s. s is given (x_scale), or is the largest magnitude of some columns of a row over 448, at least
// kLeastScale.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "torch_mpk/graph/tb_graph.h"

namespace mpk {

inline constexpr float kLargestE4M3 = 448, kLeastScale = 1e-12f;

struct WeightFormat {
  DType storage, scale_dtype;
  int64_t rows, columns;              // of the matrix
  int64_t block_rows, block_columns;  // of a scale
  int64_t x_columns;                  // of a scale of x; 0: x is not quantised
  bool has_static_x;                  // x's scale is given

  bool quantizes_x() const { return x_columns > 0; }
  int64_t scale_rows() const { return count(rows, block_rows); }
  int64_t scale_columns() const { return count(columns, block_columns); }
  // Whether each row of the weight has one scale for all of its columns.
  bool scales_rows() const { return block_columns >= columns; }
  // Columns between changes of a scale, of the weight or of x.
  int64_t run() const;
  std::string name() const;  // for people

  // The format of a node with `quantized_linear`'s operands and attributes. Says what is wrong if it has none.
  static WeightFormat of(const Node& node);
  static std::optional<std::string> refuses(const Node& node);

 private:
  static int64_t count(int64_t size, int64_t block) { return (size + block - 1) / block; }
};

}  // namespace mpk
