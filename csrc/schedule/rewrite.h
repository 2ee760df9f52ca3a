// Rewrites of a task graph, before the passes: a target may compute a node best as several others. The launch that
// takes less time is chosen. What rewrites add is scheduled and proven as the graph's own nodes are. A rewrite is a
// file of csrc/kernels that registers itself.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "torch_mpk/kernel_api.h"
#include "torch_mpk/schedule/schedule.h"

namespace mpk {

// A graph that may take another's place: its first buffers are those of the other. Nothing: there is none.
using Rewrite = std::optional<TBGraph> (*)(const TBGraph&, const Target&);

// Rewrites begin with this: a graph of the same buffers, without nodes.
MPK_KERNEL_API TBGraph with_buffers_of(const TBGraph& graph);
// Adds a node as it is.
MPK_KERNEL_API void copy_node(TBGraph& made, const Node& node);
// Adds a buffer of the workspace for a matrix whose rows follow each other.
MPK_KERNEL_API Tensor add_matrix(TBGraph& made, const std::string& name, DType dtype, int64_t rows, int64_t columns);
// The label of a node that computes a part of another.
MPK_KERNEL_API std::string label_of_part(const Node& node, const char* part);

// Returns true, for a variable's initialiser.
MPK_KERNEL_API bool add_rewrite(Rewrite rewrite);

// The graph with row tasks that are made twice: once for readers that take them in front of themselves, as a router's
// linear takes a norm, and once for those that cannot, as experts. So the former begin a phase earlier. Nothing: there
// are none.
std::optional<TBGraph> with_rows_apart(const TBGraph& graph, const Target& target);

// The graph after all rewrites. Nothing: none changes it.
std::optional<TBGraph> rewritten(const TBGraph& graph, const Target& target);
// The graph after each rewrite alone that changes it.
std::vector<TBGraph> rewritten_apart(const TBGraph& graph, const Target& target);

}  // namespace mpk
