// The element types a tensor of the task graph may have.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace mpk {

enum class DType : uint8_t { kBool, kU8, kI8, kI16, kI32, kI64, kF16, kBF16, kF32, kF64, kE4M3, kE8M0, kE2M1 };

// Programs and kernels compute with the first kNumDTypes. The others are storage of quantised weights and their scales,
// see weight_format.h.
inline constexpr int kNumDTypes = 10, kNumStoredDTypes = 13;

struct DTypeInfo {
  const char* name;       // as PyTorch spells it, without "torch."
  const char* cuda_type;  // the type's name in generated and device code
  int bytes;
};

inline constexpr DTypeInfo kDTypeInfo[kNumStoredDTypes] = {
    {"bool", "bool", 1},
    {"uint8", "uint8_t", 1},
    {"int8", "int8_t", 1},
    {"int16", "int16_t", 2},
    {"int32", "int32_t", 4},
    {"int64", "int64_t", 8},
    {"float16", "__half", 2},
    {"bfloat16", "__nv_bfloat16", 2},
    {"float32", "float", 4},
    {"float64", "double", 8},
    {"float8_e4m3fn", "E4M3", 1},
    {"float8_e8m0fnu", "E8M0", 1},
    {"float4_e2m1fn_x2", "uint8_t", 1},  // an element is two numbers
};

inline const DTypeInfo& info(DType t) { return kDTypeInfo[static_cast<int>(t)]; }
inline int64_t size_bytes(DType t) { return info(t).bytes; }
inline bool is_only_stored(DType t) { return t >= DType::kE4M3; }
inline bool is_float(DType t) { return t >= DType::kF16 && !is_only_stored(t); }
inline bool is_reduced_float(DType t) { return t == DType::kF16 || t == DType::kBF16; }

inline DType parse_dtype(const std::string& name) {
  for (int i = 0; i < kNumStoredDTypes; i++)
    if (name == kDTypeInfo[i].name) return static_cast<DType>(i);
  throw std::invalid_argument("dtype '" + name +
                              "' is not supported by torch_mpk: expected a bool, integer or floating type of PyTorch");
}

}  // namespace mpk
