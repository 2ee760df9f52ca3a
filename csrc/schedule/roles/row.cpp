// The shared memory of row tasks that are jobs of their own.
#include "../planner.h"
#include "../staging.h"

namespace mpk {
namespace {

class RowPlanner : public Planner {
  void cut(const Schedule& schedule, Job& job) const override {
    const Tensor& x = schedule.graph.nodes()[job.body.front()].operands.front().tensor;
    if (x.numel() == 0 || x.shape.empty()) return;
    const int64_t row = round_up(x.shape.back() * size_bytes(x.dtype), 16);
    // Rows for each warp, or one.
    const int64_t warps = schedule.warps.consumers,
                  at_once = rows_at_once(row, x.numel() / x.shape.back(), warps * schedule.target.num_workers);
    const int64_t bytes = row <= kLongestWarpRow ? warps * at_once * (row + (at_once > 1 ? kLaneRowPad : 0)) : row;
    if (bytes <= room(schedule)) job.staged_bytes = bytes;
  }
};

const RowPlanner kPlanner{};
[[maybe_unused]] const bool kRegistered = planners().add(Role::kRow, kPlanner);

}  // namespace
}  // namespace mpk
