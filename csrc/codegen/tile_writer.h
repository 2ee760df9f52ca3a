// Tile tasks: what a task's function knows of a node at compile time, and where a tile's slices begin, for any device.
#pragma once

#include <functional>
#include <string>

#include "context.h"
#include "torch_mpk/graph/tiling.h"

namespace mpk::codegen {

// Differences between devices: the names of types, the places of operands, and their alignment.
struct Dialect {
  std::function<std::string(DType)> type;
  std::function<std::string(const Operand&)> pointer;
  std::function<int64_t(const Tensor&)> alignment;
  int64_t max_shared_bytes = 0;  // of a tile; 0: any number
};

// CUDA's, for a node of a launch. It refers to all three.
Dialect cuda_dialect(const KernelContext& context, Refs& refs, const Node& node);

class TileWriter {
 public:
  TileWriter(const Node& node, Dialect dialect) : node_(node), dialect_(std::move(dialect)), tiling_(tiling(node)) {}

  // The body of the struct that the task's function gets. `through_ring`: the streamed operand comes through the ring.
  std::string body(bool through_ring = false) const;
  uint32_t num_tiles() const { return static_cast<uint32_t>(tiling_.num_tiles()); }

 private:
  const TiledDim* dim_of(const OperandSpec& spec, const Tensor& t, size_t d) const;
  std::string traits(const OperandSpec& spec, const Operand* operand) const;
  int64_t alignment(const OperandSpec& spec, const Tensor& t) const;
  int64_t slice_bytes(const OperandSpec& spec, const Tensor& t) const;
  std::string argument(const OperandSpec& spec, const Operand* operand) const;
  std::string stream_members(const OperandSpec& spec, const Operand& operand) const;
  std::string tile() const;
  std::string shared_limit() const;

  const Node& node_;
  const Dialect dialect_;
  const Tiling tiling_;
};

}  // namespace mpk::codegen
