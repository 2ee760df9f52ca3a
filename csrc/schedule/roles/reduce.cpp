// How the rows of a reduction are cut into pieces, where there are fewer than workers.
#include <algorithm>

#include "../planner.h"

namespace mpk {
namespace {

class ReducePlanner : public Planner {
  void cut(const Schedule& schedule, Job& job) const override {
    constexpr int64_t kLeast = 2048;  // elements of a piece
    constexpr int64_t kResultBytes = 32;
    job.staged_bytes = 256;  // a state of each warp
    const Program& program = *schedule.graph.nodes()[job.body.front()].program;
    const int64_t inner = program.domain.back(), outer = inner == 0 ? 0 : program.num_points() / inner;
    if (outer == 0) return;
    const int64_t of_row = std::min(schedule.target.num_workers / outer, inner / kLeast);
    if (of_row > 1) job.pieces = {outer * of_row, of_row, 1, 1, kResultBytes};
  }
};

const ReducePlanner kPlanner{};
[[maybe_unused]] const bool kRegistered = planners().add(Role::kReduce, kPlanner);

}  // namespace
}  // namespace mpk
