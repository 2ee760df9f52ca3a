// Pointwise tasks behind row tasks.
#pragma once

#include <string>
#include <vector>

#include "context.h"

namespace mpk::codegen {

// The epilogue of rows y that are complete in shared memory: the members of a variant that HasEpilogue in row.cuh
// requires. `lanes` share a row. `store`: a statement in front, for `elements` at `column` of `row`.
std::string emit_row_epilogues(KernelContext& context, Refs& refs, const Job& job, const std::vector<int>& nodes,
                               const Tensor& y, int64_t lanes, const std::string& store = "");

}  // namespace mpk::codegen
