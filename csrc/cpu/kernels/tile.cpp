// Tile tasks with C++ code of their own, compiled when a graph that calls them is built.
#include "torch_mpk/cpu/tile.h"

#include "torch_mpk/cpu/kernel.h"
#include "torch_mpk/graph/tiling.h"

namespace mpk::cpu {
namespace {

class Tiles : public Kernel {
 public:
  Tiles(const Node& node, const TileCode& code) : code_(code) {
    double bytes = 0;
    for (const Operand& operand : node.operands) {
      places_.emplace_back(operand.tensor);
      bytes += static_cast<double>(operand.tensor.numel() * size_bytes(operand.tensor.dtype));
    }
    num_units_ = tiling(node).num_tiles();
    unit_cost_ = bytes / kBytesPerNs / static_cast<double>(std::max<int64_t>(num_units_, 1));
    scratch_bytes_ = code.shared_bytes;
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    std::vector<uint8_t*> operands;
    for (const Place& place : places_) operands.push_back(place.at(frame));
    code_.run(operands.data(), static_cast<uint32_t>(begin), static_cast<uint32_t>(end), scratch);
  }

 private:
  const TileCode& code_;
  std::vector<Place> places_;
};

}  // namespace

std::unique_ptr<Kernel> make_tile_kernel(const Node& node, const TileCode& code) {
  return std::make_unique<Tiles>(node, code);
}

}  // namespace mpk::cpu
