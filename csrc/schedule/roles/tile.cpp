// The shared memory of tile tasks.
#include <algorithm>

#include "../planner.h"
#include "../staging.h"

namespace mpk {
namespace {

// What its device code takes, only the compiler knows.
class TilePlanner : public Planner {
  void cut(const Schedule& schedule, Job& job) const override {
    job.staged_bytes = std::clamp<int64_t>(room(schedule), 0, kMaxTileBytes);
  }
};

const TilePlanner kPlanner{};
[[maybe_unused]] const bool kRegistered = planners().add(Role::kTile, kPlanner);

}  // namespace
}  // namespace mpk
