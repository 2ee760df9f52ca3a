#include "refusals.h"

namespace mpk {
namespace {

std::string has_dtype(const Operand& operand) {
  return "operand " + operand.name + " is " + info(operand.tensor.dtype).name;
}

}  // namespace

std::optional<std::string> refuses_dtype(const Operand& operand, DType expected) {
  if (operand.tensor.dtype == expected) return std::nullopt;
  return has_dtype(operand) + ", expected " + info(expected).name;
}

std::optional<std::string> refuses_row_dtype(const Operand& operand) {
  if (is_row_dtype(operand.tensor.dtype)) return std::nullopt;
  return has_dtype(operand) + ", expected float32, float16 or bfloat16";
}

std::optional<std::string> refuses_inner_stride(const Operand& operand) {
  const Tensor& t = operand.tensor;
  if (t.shape.empty() || t.shape.back() == 1 || t.strides.back() == 1) return std::nullopt;
  return "operand " + operand.name + " needs stride 1 in its last dimension, got " +
         (t.strides.empty() ? "none" : std::to_string(t.strides.back()));
}

}  // namespace mpk
