// Memory in pages of 2 MiB: a step reads every weight once, so that with small pages each of them misses the TLB.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace mpk::cpu {

inline constexpr int64_t kHugePageBytes = 2 << 20;

// Moves memory of this process into huge pages, on a thread of its own: some seconds per gigabyte. Contents, addresses
// and rights stay as they are, and the memory may be freed meanwhile. Does nothing where the system has no huge pages
// or its administrator said "never"; memory that cannot be moved, such as mapped files, stays where it is.
void move_to_huge_pages(std::vector<std::span<const uint8_t>> memory);

}  // namespace mpk::cpu
