#include <algorithm>

#include "../passes.h"
#include "torch_mpk/abi/table.h"

namespace mpk {
namespace {

// Workers draw eight tiles at a time, so fewer slots than this for a worker are balanced better by static assignment.
constexpr int64_t kMinClaimedSlots = 40;

int64_t streamed_bytes(const Draft& draft, const Job& job) {
  int64_t bytes = 0;
  for (int n : job.body) {
    const Tensor& rows = draft.node(n).operand(draft.node(n).def->tiled_by).tensor;
    bytes += rows.numel() * size_bytes(rows.dtype);
  }
  return bytes;
}

// Runs of several entries, and boxes, are assigned to warps statically.
bool may_be_drawn(const Job& job) {
  const std::optional<TileShape>& shape = job.cut.shape;
  return job.cut.num_tiles > 0 && shape && !shape->is_boxed && (shape->run == 1 || !shape->shares_entries);
}

}  // namespace

void deal_tiles(Draft& draft) {
  const int64_t workers = draft.target().num_workers;
  for (Phase& phase : draft.schedule.phases) {
    const auto streams = [&](const Job& job) { return draft.node(job.body.front()).def->streams(); };
    if (std::count_if(phase.jobs.begin(), phase.jobs.end(), streams) != 1) continue;  // a phase has one counter
    for (Job& job : phase.jobs) {
      if (!may_be_drawn(job) || draft.node(job.body.front()).def->tiled_by.empty() ||
          streamed_bytes(draft, job) <= kMinClaimedSlots * kMinSlotBytes * workers)
        continue;
      job.assignment = Assignment::kClaimed;
      job.tickets = make_tickets(static_cast<uint32_t>(job.cut.num_tiles),
                                 static_cast<uint32_t>(job.cut.shape->entries()), static_cast<uint32_t>(workers));
    }
  }
}

}  // namespace mpk
