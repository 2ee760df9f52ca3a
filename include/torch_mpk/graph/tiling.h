// How a task of role kTile is cut: into tiles along the dimensions that its declaration names.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "torch_mpk/graph/tb_graph.h"

namespace mpk {

struct TiledDim {
  std::string name;  // as in the signature; "..." is one dimension, the product of those it stands for
  int64_t size;
  int64_t step;  // of a tile, the last one of the dimension may have less; `size` where it is not cut
  bool is_cut;

  // Where it is not cut all tiles have all of it, and of none a tile may still be made.
  int64_t count() const { return is_cut ? (size + step - 1) / step : 1; }
};

struct Tiling {
  std::vector<TiledDim> dims;  // all of the signature's, in its order

  int64_t num_tiles() const;  // they are numbered row-major
};

Tiling tiling(const Node& node);

// How many of an operand's dimensions "..." stands for.
inline size_t num_leading(const OperandSpec& spec, const Tensor& t) {
  return spec.has_leading() ? t.shape.size() - (spec.dims.size() - 1) : 0;
}

}  // namespace mpk
