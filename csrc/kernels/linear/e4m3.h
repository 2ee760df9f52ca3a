// The kernels of e4m3_linear have this in common.
#pragma once

#include <optional>
#include <string>

#include "../../codegen/context.h"
#include "torch_mpk/schedule/schedule.h"

namespace mpk {

// Why no kernel takes the node, or the job.
std::optional<std::string> refuses_e4m3(const Node& node);
std::optional<std::string> refuses_e4m3(const Schedule& schedule, const Job& job);

// Whether e4m3_linear.warpgroups takes the node, in a launch whose warps do not all multiply together.
bool multiplies_lines(const TBGraph& graph, const Node& node);

// Members that say where the scales of x are.
std::string x_scales_members(codegen::Refs& refs, const Node& node);

}  // namespace mpk
