#include "torch_mpk/cpu/kernel.h"

#include <stdexcept>

namespace mpk::cpu {

KernelRegistry& KernelRegistry::global() {
  static KernelRegistry registry;
  return registry;
}

bool KernelRegistry::add(const std::string& task, KernelFactory factory) {
  if (!factories_.emplace(task, std::move(factory)).second)
    throw std::logic_error("task '" + task + "' has two CPU kernels");
  return true;
}

const KernelFactory* KernelRegistry::find(const TaskDef& def) const {
  const bool is_program = def.role == Role::kPointwise || def.role == Role::kReduce;
  const auto found = factories_.find(!is_program ? def.name : def.role == Role::kPointwise ? "pointwise" : "reduce");
  return found == factories_.end() ? nullptr : &found->second;
}

void fail(const Node& node, const std::string& what) {
  throw std::invalid_argument(node.def->name + (node.label.empty() ? "" : " (" + node.label + ")") + ": " + what);
}

DType float_dtype(const Node& node, const Operand& operand, const Operand* like) {
  const DType dtype = operand.tensor.dtype;
  if (like != nullptr && dtype != like->tensor.dtype)
    fail(node, operand.name + " is " + info(dtype).name + ", expected " + like->name + "'s dtype " +
                   info(like->tensor.dtype).name);
  if (!is_float(dtype)) fail(node, operand.name + " is " + info(dtype).name + ", expected a floating dtype");
  return dtype;
}

void require_inner_stride(const Node& node, const Operand& operand) {
  const Tensor& t = operand.tensor;
  if (!t.shape.empty() && t.shape.back() > 1 && t.strides.back() != 1)
    fail(node, operand.name + " has inner stride " + std::to_string(t.strides.back()) +
                   ", expected 1: copy it to a contiguous tensor first");
}

}  // namespace mpk::cpu
