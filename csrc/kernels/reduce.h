// The common part of kernels that reduce the last dimension of a program's domain.
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

// The class in namespace reduce (see points.cuh) of a node's operation, with the type to compute in. Throws Unsupported
// naming the node if there is none.
std::string reduction_class(const Node& node);

// A reduction of short rows and, if there is one, the node behind it that takes each result at a point of its own.
struct ShortReduction {
  const Node& reduction;
  const Node* behind = nullptr;
  size_t load = 0;  // of the result, in `behind`'s program
};

// Nothing if rows are too long for a thread, or the node does not reduce.
std::optional<ShortReduction> short_reduction(const TBGraph& graph, const Node& node);

// The members of a variant that reduces short rows: Index, Op, kOuter, kInner; value(job, outer, inner), followed by
// `argument` where some loads are given; finish(job, outer, result), with the node behind.
std::string emit_short_reduction(codegen::KernelContext& context, codegen::Refs& refs, const ShortReduction& reduction,
                                 const std::vector<int>& unstored, const std::map<size_t, std::string>& given,
                                 const std::string& argument);

}  // namespace mpk
