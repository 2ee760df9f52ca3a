// The tile loop that a kernel's linears with one row of x share, see linear::compute_shared.
#pragma once

#include <optional>
#include <vector>

#include "../../codegen/job_code.h"

namespace mpk::codegen {

// Shares the loop among variants of the first element type. A single one needs no choice.
std::optional<SharedCode> share_tile_loop(const std::vector<Variant>& variants);

}  // namespace mpk::codegen
