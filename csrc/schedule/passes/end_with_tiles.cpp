#include <algorithm>

#include "../access.h"
#include "../kernel.h"
#include "../passes.h"

namespace mpk {
namespace {

// Whether the node takes the result of one of the job's nodes, and neither needs nor overwrites anything else of the
// job, nor it of the node.
bool meets_only_in_result(const Draft& draft, const Job& job, int maker, int n) {
  const std::vector<int> nodes = members(job);
  const int made = output(draft.node(maker)).tensor.buffer;
  return std::ranges::none_of(draft.edges, [&](const Dependency& edge) {
    const bool is_taken = edge.from == maker && edge.buffer == made && edge.hazard == Hazard::kReadAfterWrite;
    return (edge.to == n && contains(nodes, edge.from) && !is_taken) || (edge.from == n && contains(nodes, edge.to));
  });
}

// Moves the only node of a job to the end of the one that makes its rows, if that can compute it.
bool ends(Draft& draft, int maker, int n) {
  const int j = draft.job_of[maker];
  if (j < 0 || draft.jobs[j].body != std::vector<int>{maker}) return false;
  Job ended = draft.jobs[j];
  if (!meets_only_in_result(draft, ended, maker, n)) return false;
  ended.epilogue.push_back(n);
  std::vector<int> all = draft.stored_nodes(j);
  all.push_back(n);
  const bool is_computed = std::ranges::any_of(kernels_of(draft.schedule, ended), [&](const Kernel* kernel) {
    return kernel->ends_with_tiles(draft.schedule, ended);
  });
  if (!is_computed || !draft.contractible(all)) return false;
  draft.jobs[draft.job_of[n]] = {};
  draft.jobs[j] = ended;
  draft.job_of[n] = j;
  return true;
}

}  // namespace

void end_with_tiles(Draft& draft) {
  for (int n = 0; n < draft.num_nodes(); n++) {
    if (!draft.node(n).def->behind_rows || draft.is_in_run(n)) continue;
    for (const Dependency* edge : draft.in[n])
      if (edge->hazard == Hazard::kReadAfterWrite && ends(draft, edge->from, n)) break;
  }
}

}  // namespace mpk
