// A norm whose rows a job makes: its part of each element, and the row's factor for readers.
#pragma once

#include <string>

#include "torch_mpk/graph/tb_graph.h"

namespace mpk::codegen {

// The element of the result without the row's factor, from expressions of the row's element and of a pointer to the
// weight's. Declared in torch_mpk/device/tasks/rms_norm.cuh.
std::string weighted_element(const Node& norm, const std::string& element, const std::string& weight);

}  // namespace mpk::codegen
