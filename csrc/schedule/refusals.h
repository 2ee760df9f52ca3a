// Kernels share these reasons to refuse a node. They are nothing if an operand is as expected.
#pragma once

#include <optional>
#include <string>

#include "torch_mpk/graph/tb_graph.h"
#include "torch_mpk/kernel_api.h"

namespace mpk {

// A dtype that rows and streamed operands may have.
inline bool is_row_dtype(DType t) { return is_float(t) && t != DType::kF64; }

MPK_KERNEL_API std::optional<std::string> refuses_dtype(const Operand& operand, DType expected);
MPK_KERNEL_API std::optional<std::string> refuses_row_dtype(const Operand& operand);
MPK_KERNEL_API std::optional<std::string> refuses_inner_stride(const Operand& operand);

}  // namespace mpk
