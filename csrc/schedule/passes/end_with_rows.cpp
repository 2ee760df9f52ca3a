#include <algorithm>

#include "../access.h"
#include "../kernel.h"
#include "../passes.h"

namespace mpk {
namespace {

// Whether all readers of the node's result are among the nodes, and it is no output.
bool stays_among(const Draft& draft, int n, const std::vector<int>& nodes) {
  const auto& out = draft.out[n];
  return draft.is_workspace(output(draft.node(n)).tensor.buffer) &&
         std::all_of(out.begin(), out.end(), [&](const Dependency* edge) { return contains(nodes, edge->to); });
}

// The job whose body makes the rows of these nodes, for them alone; -1: none.
int maker_of_rows(const Draft& draft, const std::vector<int>& nodes) {
  const Tensor& x = draft.node(nodes.front()).operands.front().tensor;
  const auto& in = draft.in[nodes.front()];
  const auto edge = std::find_if(in.begin(), in.end(), [&](const Dependency* edge) {
    return edge->buffer == x.buffer && edge->hazard == Hazard::kReadAfterWrite;
  });
  if (edge == in.end()) return -1;
  const int maker = (*edge)->from, j = draft.job_of[maker];
  const bool is_made = j >= 0 && contains(draft.jobs[j].body, maker) &&
                       same_elements(output(draft.node(maker)).tensor, x) && stays_among(draft, maker, nodes);
  return is_made ? j : -1;
}

// Whether the rest of the job neither needs nor overwrites anything of the nodes, and they nothing of it.
bool meet_only_in_rows(const Draft& draft, int job, const std::vector<int>& nodes) {
  const std::vector<int> others = draft.stored_nodes(job);
  const int x = draft.node(nodes.front()).operands.front().tensor.buffer;
  return std::none_of(draft.edges.begin(), draft.edges.end(), [&](const Dependency& edge) {
    const bool is_of_both = (contains(others, edge.from) && contains(nodes, edge.to)) ||
                            (contains(nodes, edge.from) && contains(others, edge.to));
    return is_of_both && !(edge.to == nodes.front() && edge.buffer == x);
  });
}

}  // namespace

void end_with_rows(Draft& draft) {
  if (!draft.schedule.warps.hands_over_rows) return;
  for (Job& rows : draft.jobs) {
    if (rows.body.size() != 1 || draft.node(rows.body.front()).def->role != Role::kRow) continue;
    const std::vector<int> nodes = members(rows);
    const bool is_alone =
        std::all_of(rows.prologue.begin(), rows.prologue.end(), [&](int n) { return stays_among(draft, n, nodes); });
    const int j = is_alone ? maker_of_rows(draft, nodes) : -1;
    if (j < 0 || !meet_only_in_rows(draft, j, nodes)) continue;
    Job ended = draft.jobs[j];
    ended.epilogue.insert(ended.epilogue.end(), nodes.begin(), nodes.end());
    std::sort(ended.epilogue.begin(), ended.epilogue.end());
    std::vector<int> all = draft.stored_nodes(j);
    all.insert(all.end(), nodes.begin(), nodes.end());
    const bool ends = std::ranges::any_of(kernels_of(draft.schedule, ended), [&](const Kernel* kernel) {
      return kernel->ends_with_rows(draft.schedule, ended);
    });
    if (!ends || !draft.contractible(all)) continue;
    rows = {};
    draft.jobs[j] = ended;
    for (int n : nodes) {
      draft.job_of[n] = j;
      draft.is_prologue[n] = false;
    }
  }
}

}  // namespace mpk
