// What a kernel is generated for: 8.0 on newer devices too, where one is compiled for its device for a task's own code.
#pragma once

#ifndef MPK_ARCH
#define MPK_ARCH __CUDA_ARCH__
#endif

// Warpgroups that multiply together; 0: each warp computes for itself.
#ifndef MPK_WARPGROUPS
#define MPK_WARPGROUPS 0
#endif

// What many jobs call: its instructions compete for the cache. Where warpgroups have other numbers of registers than
// the kernel begins with, the compiler takes no calls.
#if MPK_WARPGROUPS > 0
#define MPK_OUT_OF_LINE __device__ __forceinline__
#else
#define MPK_OUT_OF_LINE __device__ __noinline__
#endif
