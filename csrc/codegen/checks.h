// What codegen demands of a node; raised as Unsupported, which names it.
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

MPK_KERNEL_API void require_dtype(const Node& node, const Operand& operand, DType expected);

// One that rows, and what is streamed, may have.
inline bool is_row_dtype(DType t) { return is_float(t) && t != DType::kF64; }
MPK_KERNEL_API void require_row_dtype(const Node& node, DType t);

MPK_KERNEL_API void require_inner_stride(const Node& node, const Operand& operand);

}  // namespace mpk::codegen
