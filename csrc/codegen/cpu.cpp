// TBGraph -> the C++ source of its tile tasks.
#include "torch_mpk/codegen/cpu.h"

#include <map>
#include <set>

#include "text.h"
#include "tile_writer.h"

namespace mpk {

CpuTiles generate_cpu_tiles(const TBGraph& graph) {
  using namespace codegen;
  std::set<std::string> headers = {"torch_mpk/cpu/tile.h"};
  std::map<std::string, int> numbers;
  std::vector<std::string> structs;
  CpuTiles tiles;
  for (const Node& node : graph.nodes()) {
    if (node.def->cpu_body.empty()) continue;
    headers.insert(node.def->cpu_body);
    Dialect cpu;
    cpu.type = [](DType t) -> std::string {
      return t == DType::kF16 ? "Float16" : t == DType::kBF16 ? "BFloat16" : cuda_type(t);
    };
    cpu.pointer = [&](const Operand& operand) {
      const std::string type = (operand.is_write ? "" : "const ") + cpu.type(operand.tensor.dtype);
      return "job.pointer<" + type + ">(" + str(&operand - node.operands.data()) + ")";
    };
    cpu.alignment = [](const Tensor& t) { return size_bytes(t.dtype); };
    const std::string body = TileWriter(node, cpu).body();
    const auto [found, fresh] = numbers.try_emplace(body, static_cast<int>(structs.size()));
    if (fresh) structs.push_back(body);
    tiles.functions.emplace_back(node.id, found->second);
  }
  if (structs.empty()) return tiles;
  for (const std::string& header : headers) tiles.source += "#include \"" + header + "\"\n";
  tiles.source += "\nnamespace {\n\nusing namespace mpk;\n\n";
  std::string table;
  for (size_t i = 0; i < structs.size(); i++) {
    const std::string name = "Tile" + std::to_string(i);
    tiles.source += "struct " + name + " {\n" + structs[i] + "};\n\n";
    table += (i > 0 ? ", " : "") + ("kTileCode<" + name + ">");
  }
  tiles.source += "}  // namespace\n\nextern \"C\" __attribute__((visibility(\"default\"))) const mpk::TileCode " +
                  std::string("torch_mpk_tiles[] = {") + table + "};\n";
  return tiles;
}

}  // namespace mpk
