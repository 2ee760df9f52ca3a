// What many jobs call.
#pragma once

// Warpgroups that multiply together; 0: each warp computes for itself.
#ifndef MPK_WARPGROUPS
#define MPK_WARPGROUPS 0
#endif

// Its instructions compete for the cache, so it stands once. Where warpgroups have other numbers of registers than the
// kernel begins with, the compiler takes no calls.
#if MPK_WARPGROUPS > 0
#define MPK_OUT_OF_LINE __device__ __forceinline__
#else
#define MPK_OUT_OF_LINE __device__ __noinline__
#endif
