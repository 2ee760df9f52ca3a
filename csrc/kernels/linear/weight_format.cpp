#include "torch_mpk/graph/weight_format.h"

#include <algorithm>

namespace mpk {
namespace {

std::string str(int64_t v) { return std::to_string(v); }

bool is_scale(DType t) { return t == DType::kF32 || is_reduced_float(t) || t == DType::kE8M0; }

// A block's size from the node's attribute, in which 0 means all.
int64_t block(const Node& node, const char* name, int64_t all) {
  const int64_t size = node.int_attr(name);
  return size <= 0 || size > all ? std::max<int64_t>(all, 1) : size;
}

}  // namespace

WeightFormat WeightFormat::of(const Node& node) {
  const Tensor &weight = node.operand("weight").tensor, &scale = node.operand("weight_scale").tensor;
  const int64_t rows = weight.shape[0], columns = node.operand("x").tensor.shape[1];
  const bool has_static_x = node.find("x_scale") != nullptr;
  const int64_t x_columns = has_static_x ? columns : node.int_attr("x_columns");
  return {weight.dtype,
          scale.dtype,
          rows,
          columns,
          block(node, "block_rows", rows),
          block(node, "block_columns", columns),
          x_columns < 0 || x_columns > columns ? std::max<int64_t>(columns, 1) : x_columns,
          has_static_x};
}

std::optional<std::string> WeightFormat::refuses(const Node& node) {
  const Tensor &weight = node.operand("weight").tensor, &scale = node.operand("weight_scale").tensor;
  if (weight.dtype != DType::kE4M3 && weight.dtype != DType::kI8)
    return "weight is " + std::string(info(weight.dtype).name) + ", expected float8_e4m3fn or int8";
  const WeightFormat f = of(node);
  if (weight.shape[1] != f.columns)
    return "weight has " + str(weight.shape[1]) + " columns, but x has " + str(f.columns);
  if (!is_scale(scale.dtype))
    return "weight_scale is " + std::string(info(scale.dtype).name) +
           ", expected float32, bfloat16, float16 or float8_e8m0fnu";
  if (scale.shape[0] != f.scale_rows() || scale.shape[1] != f.scale_columns())
    return "weight_scale is " + str(scale.shape[0]) + " x " + str(scale.shape[1]) + ", expected " +
           str(f.scale_rows()) + " x " + str(f.scale_columns()) + " for blocks of " + str(f.block_rows) + " x " +
           str(f.block_columns);
  if (f.has_static_x && node.operand("x_scale").tensor.dtype != DType::kF32) return "x_scale is not float32";
  if (f.quantizes_x() && std::max(f.x_columns, f.block_columns) % f.run() != 0 && !f.scales_rows() &&
      f.x_columns < f.columns)
    return "blocks of " + str(f.block_columns) + " columns, and of " + str(f.x_columns) +
           " of x, divide each other not";
  return std::nullopt;
}

int64_t WeightFormat::run() const { return quantizes_x() ? std::min(x_columns, block_columns) : block_columns; }

std::string WeightFormat::name() const {
  const std::string of_scale = scales_rows()
                                   ? block_rows >= rows ? "one scale" : "a scale for " + str(block_rows) + " rows"
                                   : "blocks of " + str(block_rows) + " x " + str(block_columns);
  const std::string of_x = !quantizes_x()         ? ""
                           : has_static_x         ? ", activations by a given scale"
                           : x_columns >= columns ? ", activations by row"
                                                  : ", activations by " + str(x_columns) + " columns";
  return std::string(info(storage).name) + ", " + of_scale + of_x;
}

}  // namespace mpk
