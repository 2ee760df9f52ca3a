// How a quantised weight stands in memory, and what a product with it means. A format is described here once; bodies
// and kernels ask this, and never the node.
//
//   y[r, n] = sum over k of x'[r, k] * weight[n, k] * scale[n / block_rows, k / block_columns]
//
// Weights are e4m3 or int8, one to a byte. x' is x; or, where activations are quantised, too, the e4m3 number next to
// x / s, times s. s is given (x_scale), or the largest magnitude of some columns of a row over 448, at least
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
  int64_t block_rows, block_columns;  // that a scale is for
  int64_t x_columns;                  // that a scale of x is for; 0: x is not quantised
  bool has_static_x;                  // that scale is given

  bool quantizes_x() const { return x_columns > 0; }
  int64_t scale_rows() const { return count(rows, block_rows); }
  int64_t scale_columns() const { return count(columns, block_columns); }
  // Whether each row of the weight has one scale for all of its columns.
  bool scales_rows() const { return block_columns >= columns; }
  // Columns from one change of a scale, of the weight or of x, to the next.
  int64_t run() const;
  std::string name() const;  // for people

  // The format of a node that has operands and attributes as `quantized_linear`; what keeps it from being one, if
  // something does.
  static WeightFormat of(const Node& node);
  static std::optional<std::string> refuses(const Node& node);

 private:
  static int64_t count(int64_t size, int64_t block) { return (size + block - 1) / block; }
};

}  // namespace mpk
