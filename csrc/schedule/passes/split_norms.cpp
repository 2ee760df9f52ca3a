#include <algorithm>

#include "../access.h"
#include "../kernel.h"
#include "../passes.h"

namespace mpk {
namespace {

bool can_split(const Draft& draft, int job) {
  if (job < 0) return false;
  return std::ranges::any_of(kernels_of(draft.schedule, draft.jobs[job]), [&](const Kernel* kernel) {
    return kernel->splits_norms(draft.schedule, draft.jobs[job]);
  });
}

// The job that makes the norm's rows, each element as a result of its own; -1: none.
int maker_of_rows(const Draft& draft, const Node& norm) {
  const Tensor& x = norm.operands.front().tensor;
  if (draft.in[norm.id].size() != 1) return -1;  // its weight is made here, too, or its place was somebody else's
  const Dependency& edge = *draft.in[norm.id].front();
  if (edge.hazard != Hazard::kReadAfterWrite || edge.buffer != x.buffer) return -1;
  const int j = draft.job_of[edge.from];
  if (!can_split(draft, j) || draft.jobs[j].body.size() != 1) return -1;
  const Node& maker = draft.node(edge.from);
  const Tensor& results = output(draft.node(draft.jobs[j].body.front())).tensor;
  const auto is_made = [&](const Operand* made) {
    return same_rows(made->tensor, x) && (!maker.program || stores_at_same_point(maker, *made));
  };
  const std::vector<const Operand*> made = outputs(maker);
  return same_row_space(results, x) && std::any_of(made.begin(), made.end(), is_made) ? j : -1;
}

// Whether all readers of the norm multiply it with matrices.
bool is_multiplied(const Draft& draft, const Node& norm) {
  const Tensor& made = output(norm).tensor;
  const auto multiplies = [&](const Dependency* edge) {
    const Node& reader = draft.node(edge->to);
    return edge->hazard == Hazard::kReadAfterWrite && can_split(draft, draft.job_of[edge->to]) &&
           std::all_of(reader.operands.begin(), reader.operands.end(), [&](const Operand& operand) {
             const OperandSpec* spec = reader.def->find(operand.name);
             return operand.tensor.buffer != made.buffer ||
                    (spec != nullptr && spec->takes_rows && same_rows(made, operand.tensor));
           });
  };
  const auto& out = draft.out[norm.id];
  return !out.empty() && std::all_of(out.begin(), out.end(), multiplies);
}

}  // namespace

void split_norms(Draft& draft) {
  for (int n = 0; n < draft.num_nodes(); n++) {
    const Node& norm = draft.node(n);
    if (!norm.def->scales_rows || draft.is_prologue[n] || !draft.is_workspace(output(norm).tensor.buffer)) continue;
    const int j = maker_of_rows(draft, norm);
    if (j < 0 || norm_of(draft.jobs[j]) >= 0 || !is_multiplied(draft, norm)) continue;
    std::vector<int> all = draft.stored_nodes(j);
    all.push_back(n);
    if (!draft.contractible(all)) continue;
    draft.jobs[j].epilogue.push_back(n);
    draft.jobs[j].cut.row_sums = RowSums{};
    draft.job_of[n] = j;
  }
}

}  // namespace mpk
