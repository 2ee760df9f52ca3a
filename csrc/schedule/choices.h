// Passes and kernels choose by this. The validator and code generation know nothing of it.
#pragma once

#include <algorithm>

#include "staging.h"

namespace mpk {

// Shared memory beside an operand of so many rows holds the ring at its smallest, the fixed part, and the sums that all
// warps put together, of as many rows as they multiply at once.
inline int64_t least_beside(int64_t rows, const Target& target) {
  constexpr int64_t kWarps = kRegisterFile / (32 * kFewestRegisters), kRing = 40 * 1024;
  return std::min(kRing, target.smem_bytes / 2) +
         kWarps * round_up(std::min<int64_t>(rows, kMultipliedRows), 8) * kSumPitch * 4;
}

// Staged activations and the ring share shared memory; the ring must keep most of what covers the memory latency. So an
// operand that need not be staged is, and row tasks are recomputed in front of it, where it takes up to half, and fits.
inline bool leaves_room(const Tensor& staged, const Target& target) {
  const int64_t bytes = staged.numel() * size_bytes(staged.dtype), rows = staged.shape.empty() ? 1 : staged.shape[0];
  return bytes <= std::min(target.smem_bytes / 2, target.smem_bytes - least_beside(rows, target));
}

}  // namespace mpk
