// Ampere and Ada, and the PTX for GPUs to come.
#pragma once

namespace mpk::arch {

inline constexpr bool kHasBulkCopies = false;
// Whether bulk copies name the CTA as their only target. Where a copy may go to other CTAs of a cluster, the driver
// reserves gigabytes of an RTX 5090's memory. Compilers before CUDA 12.8 know no other copies.
inline constexpr bool kCopiesStayInCta = false;
inline constexpr bool kHasWarpgroupProducts = false;
inline constexpr bool kOverlapsLaunches = false;
// Whether an instruction rounds floats to e4m3.
inline constexpr bool kConvertsE4M3 = false;
// Accesses of 16 bytes that a thread may have in flight without spilling, while a tile fills its registers.
inline constexpr int kReadsTogether = 2;

}  // namespace mpk::arch
