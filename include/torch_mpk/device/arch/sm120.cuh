// Blackwell for consumers.
#pragma once

namespace mpk::arch {

inline constexpr bool kHasBulkCopies = true;
// Bulk copies are told that they stay in the CTA. Where they may go to others of its cluster, the driver sets gigabytes
// of an RTX 5090's memory aside; compilers before CUDA 12.8 know no other copies.
inline constexpr bool kCopiesStayInCta = true;
inline constexpr bool kHasWarpgroupProducts = false;
inline constexpr bool kOverlapsLaunches = true;
// Accesses of 16 bytes that a thread may have under way together without spilling, where a tile fills its registers.
inline constexpr int kReadsTogether = 4;

}  // namespace mpk::arch
