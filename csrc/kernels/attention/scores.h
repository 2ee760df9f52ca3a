// The members about scores in all variants of attention, see device/tasks/attention_scores.cuh.
#pragma once

#include <optional>
#include <string>

#include "../../codegen/context.h"
#include "torch_mpk/graph/tb_graph.h"

namespace mpk::codegen {

// Why no kernel of attention takes what a node says of its scores; nothing where one does.
std::optional<std::string> refuses_scores(const Node& node);

std::string scores(Refs& refs, const Node& node, bool zero_without_keys);

// The member that gives the mask of row b, head h and a position, as a number to add; nothing without a mask.
std::string mask_of_position(Refs& refs, const Node& node);

}  // namespace mpk::codegen
