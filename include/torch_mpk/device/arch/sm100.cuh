// Blackwell for data centres.
#pragma once

namespace mpk::arch {

inline constexpr bool kHasBulkCopies = true;
inline constexpr bool kHasWarpgroupProducts = false;
inline constexpr bool kOverlapsLaunches = true;
// Accesses of 16 bytes that a thread may have under way together without spilling, where a tile fills its registers.
inline constexpr int kReadsTogether = 4;

}  // namespace mpk::arch
