#include "checks.h"

#include "text.h"

namespace mpk::codegen {

void fail(const Node& node, const std::string& why) {
  throw Unsupported(node.def->name + (node.label.empty() ? "" : " (" + node.label + ")") + ": " + why);
}

void require_dtype(const Node& node, const Operand& operand, DType expected) {
  require(operand.tensor.dtype == expected, node,
          "operand " + operand.name + " is " + info(operand.tensor.dtype).name + ", expected " + info(expected).name);
}

void require_row_dtype(const Node& node, DType t) {
  require(is_row_dtype(t), node,
          std::string(info(t).name) + " is not supported, expected float32, float16 or bfloat16");
}

void require_inner_stride(const Node& node, const Operand& operand) {
  const Tensor& t = operand.tensor;
  require(t.shape.empty() || t.shape.back() == 1 || t.strides.back() == 1, node,
          "operand " + operand.name + " needs stride 1 in its last dimension, got " +
              (t.strides.empty() ? "none" : str(t.strides.back())));
}

}  // namespace mpk::codegen
