#include "planner.h"

namespace mpk {

ByTask<Planner>& planners() {
  static ByTask<Planner> all("planners");
  return all;
}

const Planner* planner_of(const Schedule& schedule, const Job& job) {
  return planners().find(*schedule.graph.nodes()[job.body.front()].def);
}

}  // namespace mpk
