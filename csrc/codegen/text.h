// Helpers that write generated code.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "torch_mpk/dtype.h"
#include "torch_mpk/kernel_api.h"

namespace mpk::codegen {

MPK_KERNEL_API std::string str(int64_t v);
MPK_KERNEL_API std::string float_literal(double v);
MPK_KERNEL_API std::string double_literal(double v);
inline const char* cuda_type(DType t) { return info(t).cuda_type; }
inline const char* truth(bool v) { return v ? "true" : "false"; }

// Members of a variant.
MPK_KERNEL_API std::string constant(const std::string& name, int64_t v);
MPK_KERNEL_API std::string flag(const std::string& name, bool v);
MPK_KERNEL_API std::string function(const std::string& result, const std::string& signature, const std::string& body);
MPK_KERNEL_API std::string returning(const std::string& result, const std::string& signature, const std::string& value);

// An expression that gives values[i], where i is an expression in range.
MPK_KERNEL_API std::string choose(const std::string& i, const std::vector<std::string>& values);

}  // namespace mpk::codegen
