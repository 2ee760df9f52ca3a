// Codegen's checks of a job, beyond what its kernel refuses. They raise Unsupported, which names the node.
#pragma once

#include <string>

#include "torch_mpk/codegen/unsupported.h"
#include "torch_mpk/graph/tb_graph.h"
#include "torch_mpk/kernel_api.h"

namespace mpk::codegen {

[[noreturn]] MPK_KERNEL_API void fail(const Node& node, const std::string& why);

inline void require(bool condition, const Node& node, const std::string& why) {
  if (!condition) fail(node, why);
}

}  // namespace mpk::codegen
