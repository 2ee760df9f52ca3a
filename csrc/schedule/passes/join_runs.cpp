#include <algorithm>

#include "../access.h"
#include "../kernel.h"
#include "../passes.h"

namespace mpk {
namespace {

// Whether the nodes may be one job: they are in no other job, no other node stands between them, and none overwrites
// what another touches, unless their kernel computes them in sequence.
bool is_run(const Draft& draft, const Kernel& kernel, const std::vector<int>& nodes) {
  const auto is_free = [&](int n) { return draft.job_of[n] < 0; };
  const auto is_apart = [&](const Dependency& edge) {
    return edge.hazard == Hazard::kReadAfterWrite || kernel.stores_values() || !contains(nodes, edge.from) ||
           !contains(nodes, edge.to);
  };
  return nodes.size() > 1 && std::ranges::is_sorted(nodes) && std::ranges::all_of(nodes, is_free) &&
         std::ranges::all_of(draft.edges, is_apart) && draft.contractible(nodes);
}

}  // namespace

void join_runs(Draft& draft) {
  for (const TakenRuns& runs : draft.runs)
    for (int n = 0; n < draft.num_nodes(); n++) {
      if (draft.job_of[n] >= 0) continue;
      const std::vector<int> nodes = runs.kernel->find_run(draft.graph(), n);
      if (is_run(draft, *runs.kernel, nodes)) draft.jobs[draft.new_job(nodes)].run = runs.kernel->name();
    }
}

}  // namespace mpk
