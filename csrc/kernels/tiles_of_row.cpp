#include "tiles_of_row.h"

#include <algorithm>

#include "../codegen/text.h"
#include "../codegen/tile_writer.h"
#include "../schedule/access.h"

namespace mpk {
namespace {

using namespace codegen;

// The operand by which a tile task reads the results of a node; null if it reads none, or several.
const Operand* read_rows(const Node& maker, const Node& tiles) {
  const Operand* found = nullptr;
  for (const Operand& operand : tiles.operands) {
    if (operand.tensor.buffer != output(maker).tensor.buffer) continue;
    if (found != nullptr || operand.is_write) return nullptr;
    found = &operand;
  }
  return found;
}

// How many of the operand's outermost dimensions number the rows; nothing if none do.
std::optional<size_t> num_row_dims(const Node& maker, const Operand& operand) {
  const Tensor &y = output(maker).tensor, &x = operand.tensor;
  if (y.shape.empty() || y.numel() == 0 || !same_elements(y, x)) return std::nullopt;
  int64_t left = y.numel() / y.shape.back();
  for (size_t d = 0; d <= x.shape.size(); left /= x.shape[d++]) {
    if (left == 1) return d;
    if (d == x.shape.size() || left % x.shape[d] != 0) break;
  }
  return std::nullopt;
}

}  // namespace

std::optional<TilesOfRow> TilesOfRow::find(const Node& maker, const Node& tiles) {
  if (!tiles.def->behind_rows) return std::nullopt;
  const Operand* operand = read_rows(maker, tiles);
  const std::optional<size_t> dims = operand ? num_row_dims(maker, *operand) : std::nullopt;
  if (!dims) return std::nullopt;
  const OperandSpec& spec = *tiles.def->find(operand->name);
  const std::vector<TiledDim> all = tiling(tiles).dims;
  if (spec.has_leading() || all.size() < *dims) return std::nullopt;
  TilesOfRow made{*tiles.def, tiles};
  for (size_t d = 0; d < *dims; d++) {
    if (all[d].name != spec.dims[d]) return std::nullopt;
    std::erase_if(made.def.tile, [&](const auto& cut) { return cut.first == spec.dims[d]; });
    made.def.tile.emplace_back(spec.dims[d], 1);
    made.node.operands[operand - tiles.operands.data()].tensor.strides[d] = 0;
  }
  return made;
}

bool ends_with_tiles_of_rows(const Schedule& schedule, const Job& job) {
  const auto& nodes = schedule.graph.nodes();
  const Target& target = schedule.target;
  return job.body.size() == 1 && std::ranges::all_of(tiles_behind(schedule.graph, job), [&](int n) {
           return !nodes[n].def->header_for(target.device_arch, target.arch).empty() &&
                  TilesOfRow::find(nodes[job.body.front()], nodes[n]);
         });
}

std::string emit_tiles_of_rows(const JobPlace& place, Refs& refs, JobCode& code) {
  KernelContext& context = place.context;
  const Target& target = context.schedule.target;
  const Tensor& y = output(place.node()).tensor;
  std::string text, calls;
  int64_t number = 0;
  for (int n : tiles_behind(context.graph(), place.job)) {
    const Node& node = context.node(n);
    TilesOfRow of_row = *TilesOfRow::find(place.node(), node);
    of_row.node.def = &of_row.def;
    Dialect cuda = cuda_dialect(context, refs, node);
    const auto in_memory = cuda.pointer;
    cuda.pointer = [&](const Operand& operand) {
      if (operand.tensor.buffer != y.buffer) return in_memory(operand);
      return "reinterpret_cast<const " + std::string(cuda_type(y.dtype)) + "*>(shared)";
    };
    const std::string name = "Tiles" + str(number++);
    text += "  struct " + name + " {\n" + TileWriter(of_row.node, cuda).body() + "  };\n";
    calls += "    compute_tiles_of_row<" + name + ", " + str(y.numel() / y.shape.back()) +
             ">(job, row, data, first, step, lane);\n";
    code.headers.push_back(node.def->header_for(target.device_arch, target.arch));
  }
  if (calls.empty()) return "";
  code.headers.emplace_back("torch_mpk/device/tiles_of_row.cuh");
  return text + flag("kHasTiles", true) +
         function("void", "tiles(const Job& job, uint32_t row, const T* data, uint32_t first, uint32_t step, int lane)",
                  calls);
}

}  // namespace mpk
