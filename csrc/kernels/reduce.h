// What kernels that reduce the last dimension of a program's domain have in common.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "../codegen/context.h"
#include "../codegen/program.h"

namespace mpk {

// A reduction's domain: results, and elements of each.
struct ReducedSize {
  int64_t outer = 0, inner = 0;

  explicit ReducedSize(const Node& reduction);
};

// The class of namespace reduce (see points.cuh) for a node's operation, with the type to compute in. Throws
// Unsupported naming the node where there is none.
std::string reduction_class(const Node& node);

// A reduction of short rows, and the node behind it that takes each result at a point of its own, if there is one.
struct ShortReduction {
  const Node& reduction;
  const Node* behind = nullptr;
  size_t load = 0;  // of the result, in `behind`'s program
};

// Nothing where rows are longer than a thread is to reduce, or the node does not reduce.
std::optional<ShortReduction> short_reduction(const TBGraph& graph, const Node& node);

// The members of a variant that reduces short rows: Index, Op, kOuter, kInner; value(job, outer, inner), with
// `argument` behind these, where some loads are given; finish(job, outer, result), with what stands behind it.
std::string emit_short_reduction(codegen::KernelContext& context, codegen::Refs& refs, const ShortReduction& reduction,
                                 const std::vector<int>& unstored, const std::map<size_t, std::string>& given,
                                 const std::string& argument);

}  // namespace mpk
