// Cuts a task of role kTile into tiles, along the dimensions that its declaration names.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "torch_mpk/graph/tb_graph.h"

namespace mpk {

struct TiledDim {
  std::string name;  // as in the signature; "..." is one dimension, the product of those it stands for
  int64_t size;
  int64_t step;  // of a tile; the last tile may be smaller; `size` if it is not cut
  bool is_cut;

  // If it is not cut, all tiles have all of it, even if it is empty.
  int64_t count() const { return is_cut ? (size + step - 1) / step : 1; }
};

struct Tiling {
  std::vector<TiledDim> dims;  // the signature's, in its order

  int64_t num_tiles() const;  // numbered row-major
};

Tiling tiling(const Node& node);

// The number of an operand's dimensions that "..." stands for.
inline size_t num_leading(const OperandSpec& spec, const Tensor& t) {
  return spec.has_leading() ? t.shape.size() - (spec.dims.size() - 1) : 0;
}

}  // namespace mpk
