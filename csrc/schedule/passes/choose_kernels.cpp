#include <algorithm>
#include <optional>

#include "../kernel.h"
#include "../passes.h"
#include "../staging.h"

namespace mpk {
namespace {

// The cheapest of a kernel's cuts; nothing if it has none.
std::optional<Cut> cheapest(const Kernel& kernel, const Schedule& schedule, const Job& job) {
  std::optional<Cut> best;
  for (Cut& cut : kernel.candidates(schedule, job))
    if (!best || cut.cost_ns < best->cost_ns) best = std::move(cut);
  if (best) best->kernel = kernel.name();
  return best;
}

void choose(const Schedule& schedule, Job& job) {
  std::optional<Cut> best;
  std::vector<Alternative> others, refused;
  for (const Kernel* kernel : kernels_of(schedule, job)) {
    if (const std::optional<std::string> refusal = kernel->refusal(schedule, job)) {
      refused.push_back({kernel->name(), 0, *refusal});
      continue;
    }
    std::optional<Cut> cut = cheapest(*kernel, schedule, job);
    if (!cut) {
      refused.push_back({kernel->name(), 0, "no way to cut it fits shared memory beside the ring"});
      continue;
    }
    if (!best || cut->cost_ns < best->cost_ns) std::swap(best, cut);
    if (cut) others.push_back({cut->kernel, cut->cost_ns, ""});
  }
  std::sort(others.begin(), others.end(),
            [](const Alternative& a, const Alternative& b) { return a.cost_ns < b.cost_ns; });
  others.insert(others.end(), refused.begin(), refused.end());
  if (best) job.cut = *best;
  job.others = others;
}

// A run's alternative is its nodes' own jobs.
void note_own_jobs(const Draft& draft, Job& job) {
  for (const TakenRuns& runs : draft.runs)
    if (runs.kernel->name() == job.run)
      job.others.insert(job.others.begin(), {"jobs of their own", job.cut.cost_ns + runs.saved_ns, ""});
}

}  // namespace

void choose_kernels(Draft& draft) {
  for (Phase& phase : draft.schedule.phases)
    for (Job& job : phase.jobs) {
      choose(draft.schedule, job);
      note_own_jobs(draft, job);
    }
  WarpLayout& warps = draft.schedule.warps;
  warps.empty_arrivals = std::max(warps.empty_arrivals, static_cast<int>(most_readers(draft.schedule)));
}

}  // namespace mpk
