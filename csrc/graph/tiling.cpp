#include "torch_mpk/graph/tiling.h"

#include <algorithm>
#include <numeric>

namespace mpk {

int64_t Tiling::num_tiles() const {
  return std::accumulate(dims.begin(), dims.end(), int64_t{1},
                         [](int64_t n, const TiledDim& dim) { return n * dim.count(); });
}

Tiling tiling(const Node& node) {
  Tiling tiling;
  const auto add = [&](const std::string& name, int64_t size) {
    const auto is_it = [&](const auto& dim) { return dim.name == name; };
    if (std::any_of(tiling.dims.begin(), tiling.dims.end(), is_it)) return;
    const auto& cut = node.def->tile;
    const auto found = std::find_if(cut.begin(), cut.end(), [&](const auto& dim) { return dim.first == name; });
    const bool is_cut = found != cut.end();
    tiling.dims.push_back({name, size, is_cut ? std::clamp<int64_t>(size, 1, found->second) : size, is_cut});
  };
  for (const OperandSpec& spec : node.def->operands) {
    const Operand* operand = node.find(spec.name);
    if (operand == nullptr) continue;
    const std::vector<int64_t>& shape = operand->tensor.shape;
    const size_t leading = num_leading(spec, operand->tensor);
    if (spec.has_leading())
      add("...", std::accumulate(shape.begin(), shape.begin() + static_cast<int64_t>(leading), int64_t{1},
                                 std::multiplies<>()));
    for (size_t d = leading; d < shape.size(); d++) {
      const std::string& dim = spec.dims[d - leading + spec.has_leading()];
      if (dim.find_first_not_of("0123456789") != std::string::npos) add(dim, shape[d]);
    }
  }
  return tiling;
}

}  // namespace mpk
