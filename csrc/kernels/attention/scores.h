// What variants of all kernels of attention say of scores, see device/tasks/attention_scores.cuh.
#pragma once

#include <string>

#include "../../codegen/context.h"
#include "torch_mpk/graph/tb_graph.h"

namespace mpk::codegen {

std::string scores(Refs& refs, const Node& node, bool zero_without_keys);

}  // namespace mpk::codegen
