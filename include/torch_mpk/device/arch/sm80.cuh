// Ampere and Ada, and PTX for whatever comes later.
#pragma once

namespace mpk::arch {

inline constexpr bool kHasBulkCopies = false;
inline constexpr bool kHasWarpgroupProducts = false;
inline constexpr bool kOverlapsLaunches = false;
// Accesses of 16 bytes that a thread may have under way together without spilling, where a tile fills its registers.
inline constexpr int kReadsTogether = 2;

}  // namespace mpk::arch
