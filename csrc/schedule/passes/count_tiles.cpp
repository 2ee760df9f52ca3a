#include "../access.h"
#include "../passes.h"
#include "torch_mpk/graph/tiling.h"

namespace mpk {
namespace {

int64_t tiles_of(const Draft& draft, const Job& job) {
  const Node& first = draft.node(job.body.front());
  if (first.program) return first.program->num_points();
  if (first.def->role == Role::kTile) return tiling(first).num_tiles();
  if (!first.def->tiled_by.empty()) {
    int64_t rows = 0;
    for (int n : job.body) rows += draft.node(n).operand(first.def->tiled_by).tensor.shape[0];
    return rows;
  }
  const Tensor& y = output(first).tensor;
  return y.shape.empty() ? 1 : y.shape[0];
}

}  // namespace

void count_tiles(Draft& draft) {
  for (Phase& phase : draft.schedule.phases)
    for (Job& job : phase.jobs) job.cut.num_tiles = tiles_of(draft, job);
}

}  // namespace mpk
