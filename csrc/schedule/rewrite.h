// Rewrites of a task graph, before the passes: a target may compute a node best as several others. The launch that
// takes less time is chosen. What rewrites add is scheduled and proven as the graph's own nodes are. A rewrite is a
// file of csrc/kernels that registers itself.
#pragma once

#include <optional>

#include "torch_mpk/kernel_api.h"
#include "torch_mpk/schedule/schedule.h"

namespace mpk {

// A graph that may take another's place: its first buffers are those of the other. Nothing: there is none.
using Rewrite = std::optional<TBGraph> (*)(const TBGraph&, const Target&);

// Returns true, for a variable's initialiser.
MPK_KERNEL_API bool add_rewrite(Rewrite rewrite);

// The graph after all rewrites. Nothing: none changes it.
std::optional<TBGraph> rewritten(const TBGraph& graph, const Target& target);

}  // namespace mpk
