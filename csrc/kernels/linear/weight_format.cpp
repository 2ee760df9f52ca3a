#include "torch_mpk/graph/weight_format.h"

#include <algorithm>

namespace mpk {
namespace {

std::string str(int64_t v) { return std::to_string(v); }

bool is_scale(DType t) { return t == DType::kF32 || is_reduced_float(t) || t == DType::kE8M0; }

// The size of a matrix's dimension, or of matrices that are stacked: 1 is that of rows, 0 of columns.
int64_t size_of(const Tensor& t, int dim) { return t.shape[t.shape.size() - 1 - dim]; }

// A block's size from the node's attribute, in which 0 means all.
int64_t block(const Node& node, const char* name, int64_t all) {
  const int64_t size = node.int_attr(name);
  return size <= 0 || size > all ? std::max<int64_t>(all, 1) : size;
}

ZeroKind zero_kind(DType t) {
  return is_float(t) ? ZeroKind::kAdded : t == DType::kI32 ? ZeroKind::kPackedPoints : ZeroKind::kPoints;
}

}  // namespace

WeightFormat WeightFormat::of(const Node& node) {
  const Tensor &weight = node.operand("weight").tensor, &scale = node.operand("weight_scale").tensor;
  const Operand* x = node.find("x");
  const int64_t columns = size_of((x != nullptr ? *x : node.operands.back()).tensor, 0);
  const int64_t word_rows = weight.dtype == DType::kI32 && size_of(weight, 0) == columns ? kWordRows : 1;
  const int64_t rows = size_of(weight, 1) * word_rows;
  const bool has_static_x = node.find("x_scale") != nullptr;
  const int64_t x_columns = has_static_x ? columns : node.attrs.contains("x_columns") ? node.int_attr("x_columns") : 0;
  const Operand* zero = node.find("zero");
  return {weight.dtype,
          scale.dtype,
          rows,
          columns,
          columns / std::max<int64_t>(size_of(weight, 0), 1),
          word_rows,
          block(node, "block_rows", rows),
          block(node, "block_columns", columns),
          x_columns < 0 || x_columns > columns ? std::max<int64_t>(columns, 1) : x_columns,
          has_static_x,
          node.find("column_groups") != nullptr,
          node.find("codebook") != nullptr,
          node.find("scale_code") == nullptr ? 0 : std::min(node.int_attr("scale_block"), scale.numel()),
          zero == nullptr ? ZeroKind::kNone : zero_kind(zero->tensor.dtype),
          zero != nullptr && is_float(zero->tensor.dtype) ? size_bytes(zero->tensor.dtype) : 0};
}

std::optional<std::string> WeightFormat::refuses(const Node& node) {
  const WeightFormat f = of(node);
  if (auto why = f.refuses_storage(node)) return why;
  if (auto why = f.refuses_scales(node)) return why;
  if (auto why = f.refuses_groups(node)) return why;
  if (auto why = f.refuses_tables(node)) return why;
  if (f.has_static_x && node.operand("x_scale").tensor.dtype != DType::kF32) return "x_scale is not float32";
  if (f.bits() == 4 && f.run() % 2 != 0 && f.run() < f.columns)
    return "blocks of " + str(f.run()) + " columns part the two numbers of a byte";
  if (f.quantizes_x() && std::max(f.x_columns, f.block_columns) % f.run() != 0 && f.block_columns < f.columns &&
      f.x_columns < f.columns)
    return "blocks of " + str(f.block_columns) + " columns, and of " + str(f.x_columns) +
           " of x, divide each other not";
  return std::nullopt;
}

std::optional<std::string> WeightFormat::refuses_storage(const Node& node) const {
  const Tensor& weight = node.operand("weight").tensor;
  const auto is = [&](DType dtype, int64_t columns_of_element) {
    return storage == dtype && size_of(weight, 0) * columns_of_element == columns;
  };
  if (has_word_rows() && (weight.shape.size() > 2 || columns % 2 != 0))
    return "weight has eight rows to a word, expected one matrix of an even number of columns";
  if (columns == 0 || has_word_rows() || is(DType::kE4M3, 1) || is(DType::kI8, 1) || is(DType::kI8, 2) ||
      is(DType::kU8, 2) || is(DType::kE2M1, 2) || is(DType::kI32, 8))
    return std::nullopt;
  return "weight is " + std::string(info(storage).name) + " of " + str(size_of(weight, 0)) + " columns, where x has " +
         str(columns) +
         ", expected float8_e4m3fn or int8, of as many, int8, uint8 or float4_e2m1fn_x2 of half, or int32 of an "
         "eighth, "
         "or as many";
}

std::optional<std::string> WeightFormat::refuses_scales(const Node& node) const {
  const Tensor& scale = node.operand("weight_scale").tensor;
  const auto differs = [&](const char* name, const Tensor& t, int64_t expected_rows) {
    std::optional<std::string> why;
    if (size_of(t, 1) != expected_rows || size_of(t, 0) != scale_columns())
      why = std::string(name) + " is " + str(size_of(t, 1)) + " x " + str(size_of(t, 0)) + ", expected " +
            str(expected_rows) + " x " + str(scale_columns()) + " for blocks of " + str(block_rows) + " x " +
            str(block_columns);
    return why;
  };
  if (!is_scale(scale_dtype) && !(has_nested_scales() && scale_dtype == DType::kU8))
    return "weight_scale is " + std::string(info(scale_dtype).name) +
           ", expected float32, bfloat16, float16 or float8_e8m0fnu";
  if (auto why = differs("weight_scale", scale, scale_rows())) return why;
  if (!has_zero()) return std::nullopt;
  const Tensor& given = node.operand("zero").tensor;
  const bool is_integer = given.dtype == DType::kI8 || given.dtype == DType::kU8 || given.dtype == DType::kI32;
  if (storage == DType::kE4M3 || is_e2m1() ||
      !(is_integer || given.dtype == DType::kF32 || is_reduced_float(given.dtype)))
    return "zero is " + std::string(info(given.dtype).name) + " beside weights of " + info(storage).name;
  return differs("zero", given, zero == ZeroKind::kPackedPoints ? count(scale_rows(), 8) : scale_rows());
}

std::optional<std::string> WeightFormat::refuses_groups(const Node& node) const {
  if (!has_groups) return std::nullopt;
  const Tensor& groups = node.operand("column_groups").tensor;
  if (groups.dtype != DType::kI32)
    return "column_groups is " + std::string(info(groups.dtype).name) + ", expected int32";
  if (bits() != 4 || is_e2m1() || quantizes_x())
    return "column_groups belong to integers of 4 bits, and to an x that is not quantised";
  return std::nullopt;
}

std::optional<std::string> WeightFormat::refuses_tables(const Node& node) const {
  const auto differs = [&](const char* name, int64_t size) {
    const Operand* table = node.find(name);
    std::optional<std::string> why;
    if (table == nullptr || table->tensor.dtype != DType::kF32 || table->tensor.numel() != size)
      why = std::string(name) + " is no float32 tensor of " + str(size) + " elements";
    return why;
  };
  if (has_code) {
    if (auto why = differs("codebook", kCodes)) return why;
    if (storage != DType::kU8 || has_zero() || has_groups || quantizes_x())
      return "codebook belongs to uint8 weights with scales alone";
  }
  if (node.find("scale_code") == nullptr) return std::nullopt;
  if (!has_nested_scales() || scale_dtype != DType::kU8) return "scale_code belongs to uint8 scales in scale_blocks";
  if (auto why = differs("scale_code", kScaleCodes)) return why;
  if (auto why = differs("scale_offset", 1)) return why;
  return differs("scale_scale", count(scale_rows() * scale_columns(), scale_block));
}

int64_t WeightFormat::run() const {
  if (has_groups) return std::max<int64_t>(columns, 1);
  return quantizes_x() ? std::min(x_columns, block_columns) : block_columns;
}

std::string WeightFormat::name() const {
  const std::string of_scale = block_columns >= columns
                                   ? block_rows >= rows ? "one scale" : "a scale for " + str(block_rows) + " rows"
                                   : "blocks of " + str(block_rows) + " x " + str(block_columns);
  const std::string of_x = !quantizes_x()         ? ""
                           : has_static_x         ? ", activations by a given scale"
                           : x_columns >= columns ? ", activations by row"
                                                  : ", activations by " + str(x_columns) + " columns";
  const std::string number = bits() == 4 && !is_e2m1() ? "4 bits in " : "", points = has_zero() ? ", zero points" : "",
                    order = has_groups ? ", columns in any order" : "",
                    table = has_code ? has_nested_scales() ? ", by a table, with scales of scales" : ", by a table"
                            : has_nested_scales() ? ", with scales of scales"
                                                  : "";
  const std::string words = has_word_rows() ? " of eight rows" : "";
  return number + info(storage).name + words + ", " + of_scale + points + order + table + of_x;
}

}  // namespace mpk
