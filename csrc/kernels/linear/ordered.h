// Which linears of 4-bit weights take an x whose columns are put in order before, for rewrites that would compute them
// otherwise.
#pragma once

#include "torch_mpk/schedule/schedule.h"

namespace mpk {

bool takes_ordered_x(const TBGraph& graph, const Node& node, const Target& target);

}  // namespace mpk
