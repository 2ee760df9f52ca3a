// The shared memory of row tasks that are jobs of their own.
#include "../planner.h"
#include "../staging.h"

namespace mpk {
namespace {

class RowPlanner : public Planner {
  void cut(const Schedule& schedule, Job& job) const override {
    const Tensor& x = schedule.graph.nodes()[job.body.front()].operands.front().tensor;
    if (x.shape.empty()) return;
    const int64_t row = round_up(x.shape.back() * size_bytes(x.dtype), 16);
    const int64_t bytes = row <= kLongestWarpRow ? schedule.warps.consumers * row : row;  // a row for each warp, or one
    if (bytes <= room(schedule)) job.staged_bytes = bytes;
  }
};

const RowPlanner kPlanner{};
[[maybe_unused]] const bool kRegistered = planners().add(Role::kRow, kPlanner);

}  // namespace
}  // namespace mpk
