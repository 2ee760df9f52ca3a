// quantise_rows, as rewrites add it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "torch_mpk/graph/tb_graph.h"

namespace mpk {

// Adds the node that quantises rows of the matrix x, in blocks of so many columns, to `numbers` and `scales`.
inline void add_quantise_rows(TBGraph& made, const Tensor& x, const std::optional<Tensor>& scale, const Tensor& numbers,
                              const Tensor& scales, int64_t block, const std::string& label) {
  const auto in_blocks = [&](Tensor t) {
    t.shape = {t.shape[0], t.shape[1] / block, block}, t.strides = {t.strides[0], block, 1};
    return t;
  };
  std::vector<Operand> operands = {{"x", in_blocks(x), true, false}};
  if (scale) operands.push_back({"scale", *scale, true, false});
  operands.push_back({"numbers", in_blocks(numbers), false, true});
  operands.push_back({"scales", scales, false, true});
  made.add_node("quantise_rows", operands, {}, std::nullopt, label);
}

}  // namespace mpk
