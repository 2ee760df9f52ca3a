// What becomes of a norm whose rows a job makes: its part of an element, and what readers make of the rows' squares.
#pragma once

#include <string>

#include "torch_mpk/graph/tb_graph.h"

namespace mpk::codegen {

// The element of the result but for the row's factor, of expressions of the row's element and of a pointer to the
// weight's. Declared in torch_mpk/device/tasks/rms_norm.cuh.
std::string weighted_element(const Node& norm, const std::string& element, const std::string& weight);

}  // namespace mpk::codegen
