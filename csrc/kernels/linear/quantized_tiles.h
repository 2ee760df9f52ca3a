// Which quantised linears warpgroups multiply tile by tile, for rewrites that would compute them otherwise.
#pragma once

#include "../../schedule/rewrite.h"

namespace mpk {

// Whether launches with many rows of x, if this is one, take the node as it is.
bool converts_tiles(const TBGraph& graph, const Node& node, const Target& target);

}  // namespace mpk
