// Rules by which passes and kernels choose. Validator and code generation do not depend on them.
#pragma once

#include <algorithm>

#include "access.h"
#include "staging.h"

namespace mpk {

// The least shared memory beside an operand of so many rows: the smallest ring, the fixed part, and the sums that all
// warps combine, for as many rows as they multiply at once.
inline int64_t least_beside(int64_t rows, const Target& target) {
  constexpr int64_t kWarps = kRegisterFile / (32 * kFewestRegisters), kRing = 40 * 1024;
  return std::min(kRing, target.smem_bytes / 2) +
         kWarps * round_up(std::min<int64_t>(rows, kMultipliedRows), 8) * kSumPitch * 4;
}

// Staged activations and the ring share shared memory, and the ring must keep most of what covers the memory's latency.
// So an operand is staged by choice, and row tasks recomputed in front of it, only if it takes at most half and fits.
inline bool leaves_room(const Tensor& staged, const Target& target) {
  const int64_t bytes = staged.numel() * size_bytes(staged.dtype), rows = staged.shape.empty() ? 1 : staged.shape[0];
  return bytes <= std::min(target.smem_bytes / 2, target.smem_bytes - least_beside(rows, target));
}

// Whether the reader stages exactly these rows, as an operand that takes row tasks in front.
inline bool takes_rows(const Node& reader, const Tensor& made, const WarpLayout& warps, const Target& target) {
  return std::ranges::any_of(reader.operands, [&](const Operand& operand) {
    const OperandSpec* spec = reader.def->find(operand.name);
    return spec != nullptr && spec->takes_rows && !is_loaded_as_boxes(warps, *spec) &&
           same_rows(made, operand.tensor) && (!spec->is_whole || leaves_room(operand.tensor, target));
  });
}

}  // namespace mpk
