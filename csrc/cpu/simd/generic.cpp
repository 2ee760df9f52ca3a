// Any machine: SSE2 on x86-64, NEON on aarch64.
#include "includes.h"

#define MPK_TIER generic_kernels
#define MPK_TIER_ISA Isa::kGeneric
#define MPK_VEC_BYTES 16
#include "tier.h"
