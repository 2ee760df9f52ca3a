// Ampere and Ada, and PTX for whatever comes later.
#pragma once

namespace mpk::arch {

inline constexpr bool kHasBulkCopies = false;
// Bulk copies are told that they stay in the CTA. Where they may go to others of its cluster, the driver sets gigabytes
// of an RTX 5090's memory aside; compilers before CUDA 12.8 know no other copies.
inline constexpr bool kCopiesStayInCta = false;
inline constexpr bool kHasWarpgroupProducts = false;
inline constexpr bool kOverlapsLaunches = false;
// Accesses of 16 bytes that a thread may have under way together without spilling, where a tile fills its registers.
inline constexpr int kReadsTogether = 2;

}  // namespace mpk::arch
