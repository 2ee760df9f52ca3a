#include <algorithm>

#include "../access.h"
#include "../choices.h"
#include "../passes.h"

namespace mpk {
namespace {

// Whether the edge leads to a task that takes the row task in front of it. A row task does, recomputed or not.
bool is_staged(const Draft& draft, const Node& row, const Dependency& edge) {
  if (edge.hazard != Hazard::kReadAfterWrite || draft.is_in_run(edge.to)) return false;
  const Node& reader = draft.node(edge.to);
  const Tensor& made = output(row).tensor;
  if (reader.def->role == Role::kRow) return same_rows(made, reader.operands.front().tensor);
  return takes_rows(reader, made, draft.schedule.warps, draft.target());
}

}  // namespace

void find_prologues(Draft& draft) {
  for (int n = draft.num_nodes(); n-- > 0;) {
    const Node& row = draft.node(n);
    if (row.def->role != Role::kRow || draft.is_in_run(n) || !draft.is_workspace(output(row).tensor.buffer)) continue;
    const auto& out = draft.out[n];
    draft.is_prologue[n] = !out.empty() && std::all_of(out.begin(), out.end(), [&](const Dependency* edge) {
      return is_staged(draft, row, *edge);
    });
  }
}

}  // namespace mpk
