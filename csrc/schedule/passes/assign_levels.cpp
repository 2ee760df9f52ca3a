#include <algorithm>
#include <stdexcept>

#include "../access.h"
#include "../passes.h"

namespace mpk {
namespace {

// The order of jobs. Several jobs may hold the same prologue node.
struct Order {
  std::vector<std::vector<int>> before, after;

  explicit Order(const Draft& draft) : before(draft.jobs.size()), after(draft.jobs.size()) {
    std::vector<std::vector<int>> jobs_of_node(draft.num_nodes());
    for (size_t j = 0; j < draft.jobs.size(); j++)
      for (int n : members(draft.jobs[j])) jobs_of_node[n].push_back(static_cast<int>(j));
    for (const Dependency& edge : draft.edges) {
      // If the reader recomputes the value itself, other holders do not matter.
      if (edge.hazard == Hazard::kReadAfterWrite && draft.is_prologue[edge.from]) continue;
      for (int to : jobs_of_node[edge.to])
        for (int from : jobs_of_node[edge.from]) {
          if (from == to) continue;
          before[to].push_back(from);
          after[from].push_back(to);
        }
    }
  }
};

// Moves in-place updates of the caller's tensors that nothing waits for to the end: an aborted launch leaves counters
// alone.
void delay_counters(Draft& draft, const Order& order, int num_levels) {
  for (size_t j = 0; j < draft.jobs.size(); j++) {
    const Job& job = draft.jobs[j];
    if (job.body.size() != 1 || !order.after[j].empty()) continue;
    const Node& node = draft.node(job.body.front());
    const std::vector<const Operand*> made = outputs(node);
    const auto in_place = [&](const Operand* result) {
      return draft.graph().buffers()[result->tensor.buffer].kind == BufferKind::kInput;
    };
    if (node.def->role == Role::kPointwise && std::all_of(made.begin(), made.end(), in_place))
      draft.levels[j] = num_levels - 1;
  }
}

}  // namespace

void assign_levels(Draft& draft) {
  const Order order(draft);
  const size_t num_jobs = draft.jobs.size();
  draft.levels.assign(num_jobs, -1);
  std::vector<int> pending(num_jobs), ready;
  for (size_t j = 0; j < num_jobs; j++) {
    pending[j] = static_cast<int>(order.before[j].size());
    if (pending[j] == 0) ready.push_back(static_cast<int>(j));
  }
  int num_levels = 0;
  size_t done = 0;
  for (; !ready.empty(); done++) {
    const int j = ready.back();
    ready.pop_back();
    draft.levels[j] = 0;
    for (int b : order.before[j]) draft.levels[j] = std::max(draft.levels[j], draft.levels[b] + 1);
    if (!draft.jobs[j].body.empty()) num_levels = std::max(num_levels, draft.levels[j] + 1);
    for (int a : order.after[j])
      if (--pending[a] == 0) ready.push_back(a);
  }
  if (done != num_jobs)
    throw std::logic_error("schedule: fusion made a cycle; please report the graph (TORCH_MPK_DUMP)");
  delay_counters(draft, order, num_levels);
}

}  // namespace mpk
