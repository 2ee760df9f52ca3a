// x86-64-v4 with bfloat16 tile products, which flush denormals: equal to the other tiers within tolerance.
#include "includes.h"

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(                                                                                          \
    __attribute__((target(                                                                                             \
        "avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt,movbe,avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi,avx512bf16," \
        "amx-tile,amx-bf16"))),                                                                                        \
    apply_to = function)
#else
#pragma GCC target( \
    "avx2,fma,f16c,bmi,bmi2,lzcnt,popcnt,movbe,avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi,avx512bf16,amx-tile,amx-bf16,prefer-vector-width=512")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about its own intrinsics
#endif
#define MPK_TIER_AVX512
#define MPK_TIER_AVX512_BF16
#define MPK_TIER_AMX
#define MPK_TIER amx_kernels
#define MPK_TIER_ISA Isa::kAmx
#define MPK_VEC_BYTES 64
#include "tier.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif  // __x86_64__
