#include "../passes.h"
#include "../planner.h"
#include "../staging.h"

namespace mpk {

void cut_jobs(Draft& draft) {
  for (Phase& phase : draft.schedule.phases)
    for (Job& job : phase.jobs)
      if (const Planner* planner = planner_of(draft.schedule, job)) planner->cut(draft.schedule, job);
  if (multiplies_by_warpgroups(draft.schedule)) draft.schedule.warps.empty_arrivals = kWarpgroupWarps;
}

}  // namespace mpk
