// The instruction-set tiers of the CPU kernels.
#pragma once

#include <string>
#include <vector>

namespace mpk::cpu {

enum class Isa { kGeneric, kAvx2, kAvx512, kAvx512Bf16, kAmx };

inline constexpr const char* kIsaNames[] = {"generic", "avx2", "avx512", "avx512_bf16", "amx"};  // in the order of Isa

// The tiers this processor and operating system can run, slowest first; always contains kGeneric.
const std::vector<Isa>& supported_isas();

// "" is the fastest supported tier. Throws std::invalid_argument for an unknown name or a tier this machine lacks.
Isa parse_isa(const std::string& name);

}  // namespace mpk::cpu
