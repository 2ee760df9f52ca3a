// The warps of a CTA, as the schedule's WarpLayout has them. The kernel's source defines the macros first.
#pragma once

#include "torch_mpk/abi/sizes.h"
#include "torch_mpk/device/out_of_line.cuh"

#if !defined(MPK_CONSUMER_WARPS) || !defined(MPK_LOADER_WARPS)
#error "define MPK_CONSUMER_WARPS and MPK_LOADER_WARPS, as generated kernels do, before including torch_mpk/device"
#endif

namespace mpk {

inline constexpr int kConsumerWarps = MPK_CONSUMER_WARPS;
inline constexpr int kConsumerThreads = 32 * kConsumerWarps;
inline constexpr int kThreads = threads_of(kConsumerWarps, MPK_LOADER_WARPS, MPK_WARPGROUPS > 0);
static_assert(MPK_LOADER_WARPS == 1, "the ring is filled by one warp");

}  // namespace mpk
