// MPK_OUT_OF_LINE: functions that many jobs call.
#pragma once

// Warpgroups that multiply together. 0: each warp computes for itself.
#ifndef MPK_WARPGROUPS
#define MPK_WARPGROUPS 0
#endif

// Instructions compete for the cache, so shared code stands once. Where warpgroups change their numbers of registers,
// the compiler supports no calls.
#if MPK_WARPGROUPS > 0
#define MPK_OUT_OF_LINE __device__ __forceinline__
#else
#define MPK_OUT_OF_LINE __device__ __noinline__
#endif
