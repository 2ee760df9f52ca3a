// The stacks of weights that nodes of experts' products choose from.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "torch_mpk/graph/tb_graph.h"

namespace mpk {

// How many experts there are, and the bytes of one expert's weights; 0 experts: none.
using ExpertStack = std::pair<int64_t, int64_t>;

// The stack of a node of such a task: operands whose first dimension, as declared, is none of the result's.
inline ExpertStack expert_stack(const Node& node) {
  const std::vector<std::string>& result = node.def->operands.back().dims;
  ExpertStack stack = {0, 0};
  for (const Operand& operand : node.operands) {
    if (std::ranges::count(result, node.def->find(operand.name)->dims.front()) != 0) continue;
    const Tensor& t = operand.tensor;
    int64_t elements = 1;
    for (size_t d = 1; d < t.shape.size(); d++)
      if (t.strides[d] != 0) elements *= t.shape[d];
    stack.first = t.shape[0];
    stack.second += elements * size_bytes(t.dtype);
  }
  return stack;
}

// The number of experts of the phase with most.
inline int64_t most_experts(const std::vector<ExpertStack>& phases) {
  int64_t most = 0;
  for (const ExpertStack& phase : phases) most = std::max(most, phase.first);
  return most;
}

}  // namespace mpk
