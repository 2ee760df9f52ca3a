#include "prepared_x.h"

#include <algorithm>
#include <utility>

#include "../../schedule/access.h"

namespace mpk {

Tensor in_blocks(Tensor matrix, int64_t columns) {
  matrix.shape = {matrix.shape[0], matrix.shape[1] / columns, columns};
  matrix.strides = {matrix.strides[0], columns, 1};
  return matrix;
}

void add_quantise_rows(TBGraph& made, const Tensor& x, const std::optional<Tensor>& scale, const Tensor& numbers,
                       const Tensor& scales, int64_t columns, const std::string& label) {
  std::vector<Operand> operands = {{"x", in_blocks(x, columns), true, false}};
  if (scale) operands.push_back({"scale", *scale, true, false});
  operands.push_back({"numbers", in_blocks(numbers, columns), false, true});
  operands.push_back({"scales", scales, false, true});
  made.add_node("quantise_rows", operands, {}, std::nullopt, label);
}

std::optional<TBGraph> PreparesX::run() {
  if (std::ranges::none_of(graph_.nodes(), [&](const Node& node) { return takes(node); })) return std::nullopt;
  result_ = with_buffers_of(graph_);
  for (const Node& node : graph_.nodes()) {
    if (takes(node))
      add_reader(node, prepared(node));
    else
      copy_node(result_, node);
    std::erase_if(made_, [&](const PreparedX& made) {
      return writes(node, made.x.buffer) || (made.scale && writes(node, made.scale->buffer));
    });
  }
  return std::move(result_);
}

const PreparedX& PreparesX::prepared(const Node& node) {
  PreparedX own = input_of(node);
  const auto is_same = [&](const PreparedX& other) {
    return same_view(other.x, own.x) && other.columns == own.columns &&
           other.scale.has_value() == own.scale.has_value() && (!own.scale || same_view(*other.scale, *own.scale));
  };
  if (const auto found = std::ranges::find_if(made_, is_same); found != made_.end()) return *found;
  prepare(own, graph_.buffers()[own.x.buffer].name, label_of_part(node, "x"));
  return made_.emplace_back(std::move(own));
}

}  // namespace mpk
