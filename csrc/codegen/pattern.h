// Addresses of a view's elements.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "torch_mpk/graph/tb_graph.h"

namespace mpk::codegen {

// An access pattern up to the rank it is written in: sizes and strides without unit dimensions, mergeable ones merged.
struct Pattern {
  int64_t offset = 0;
  std::vector<std::pair<int64_t, int64_t>> dims;
  bool operator==(const Pattern&) const = default;
};
Pattern pattern(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t offset);
inline Pattern pattern(const Tensor& t) { return pattern(t.shape, t.strides, t.offset); }

// The element offset of row number `row` (an expression) among a tensor's leading dimensions.
std::string row_offset(const Tensor& t, const std::string& row);

// The same for a tensor whose every element is a row.
std::string element_offset(Tensor t, const std::string& element);

// " + int64_t(b) * 64 + ...": from a tensor's first element to the one with these indices in the leading dimensions.
std::string element_at(const Tensor& t, const std::vector<std::string>& indices);

}  // namespace mpk::codegen
