// Rewrites of a task graph, before the passes: a target may compute a node best as several others. What they add is
// scheduled and proven as the graph's own nodes are. A rewrite is a file of csrc/kernels that registers itself.
#pragma once

#include <optional>

#include "torch_mpk/kernel_api.h"
#include "torch_mpk/schedule/schedule.h"

namespace mpk {

// The graph that takes another's place: its first buffers are those of the other. Nothing: it stays as it is.
using Rewrite = std::optional<TBGraph> (*)(const TBGraph&, const Target&);

// Returns true, for a variable's initialiser.
MPK_KERNEL_API bool add_rewrite(Rewrite rewrite);

// The graph after all rewrites.
TBGraph rewritten(const TBGraph& graph, const Target& target);

// Whether warps of a launch of the graph multiply together, since a kernel demands it for many rows.
MPK_KERNEL_API bool multiplies_together(const TBGraph& graph, const Target& target);

}  // namespace mpk
