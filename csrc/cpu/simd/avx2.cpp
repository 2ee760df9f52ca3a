// x86-64-v3.
#include "includes.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt,movbe"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt,movbe")
#endif
#define MPK_TIER_AVX2
#define MPK_TIER avx2_kernels
#define MPK_TIER_ISA Isa::kAvx2
#define MPK_VEC_BYTES 32
#include "tier.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
