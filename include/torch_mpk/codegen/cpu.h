// Codegen for the CPU: one translation unit with a graph's tasks that have C++ code for the CPU.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "torch_mpk/codegen/unsupported.h"
#include "torch_mpk/graph/tb_graph.h"

namespace mpk {

struct CpuTiles {
  std::string source;  // exports `const mpk::TileCode torch_mpk_tiles[]`; empty without such tasks
  std::vector<std::pair<int, int>> functions;  // nodes, and their places in that table
};

// Throws Unsupported naming the node when it cannot be generated.
CpuTiles generate_cpu_tiles(const TBGraph& graph);

}  // namespace mpk
