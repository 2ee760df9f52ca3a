#include <algorithm>

#include "../access.h"
#include "../passes.h"

namespace mpk {
namespace {

// A job's future body and epilogue, both in program order.
struct Fusion {
  std::vector<int> body, epilogue;

  Fusion(const Draft& draft, const std::vector<int>& producers) {
    for (int p : producers)
      for (int m : draft.job_of[p] >= 0 ? draft.stored_nodes(draft.job_of[p]) : std::vector<int>{p})
        (draft.node(m).def->role == Role::kPointwise ? epilogue : body).push_back(m);
    for (std::vector<int>* list : {&body, &epilogue}) {
      std::sort(list->begin(), list->end());
      list->erase(std::unique(list->begin(), list->end()), list->end());
    }
  }
};

// Whether the node reads nothing that the launch makes but results of one other.
bool reads_only(const Draft& draft, int n, int maker) {
  return std::ranges::all_of(draft.node(n).operands, [&](const Operand& operand) {
    return !operand.is_read || !draft.is_workspace(operand.tensor.buffer) ||
           operand.tensor.buffer == output(draft.node(maker)).tensor.buffer;
  });
}

// The makers of the node's operands that could take it as an epilogue: nodes that take epilogues, or their epilogues. A
// row task takes it if rows are few, too, where the node's other operands cannot be polled.
std::vector<int> producers_of(const Draft& draft, int n) {
  std::vector<int> producers;
  for (const Dependency* edge : draft.in[n]) {
    const int p = edge->from;
    const bool is_epilogue = draft.job_of[p] >= 0 && draft.node(p).def->role == Role::kPointwise && !draft.is_in_run(p);
    const bool is_row = draft.node(p).def->role == Role::kRow && !draft.is_in_run(p) && reads_only(draft, n, p);
    if (edge->hazard == Hazard::kReadAfterWrite && (draft.takes_epilogues(p) || is_row || is_epilogue) &&
        !contains(producers, p))
      producers.push_back(p);
  }
  return producers;
}

// Whether the node writes memory that other workers may still be reading for the same phase.
bool overwrites_input(const Draft& draft, int n, const std::vector<int>& readers) {
  return std::any_of(draft.in[n].begin(), draft.in[n].end(), [&](const Dependency* edge) {
    return edge->hazard != Hazard::kReadAfterWrite && contains(readers, edge->from);
  });
}

// Whether the node can be computed point by point behind the nodes of the fusion.
bool fits(const Draft& draft, int n, const std::vector<int>& makers, const Fusion& fusion) {
  const Node& node = draft.node(n);
  const auto in_same_space = [&](int m) {  // nodes whose results are combined share one index space
    return output(draft.node(m)).tensor.numel() == node.program->num_points();
  };
  return strides_behind(draft.graph(), makers, node) && writes_each_point_once(node) &&
         std::all_of(fusion.body.begin(), fusion.body.end(), in_same_space);
}

// Makes one job of the fusion and the node.
void fuse(Draft& draft, const Fusion& fusion, int n) {
  std::vector<int> merged;
  for (int m : fusion.body)
    if (draft.job_of[m] >= 0 && !contains(merged, draft.job_of[m])) merged.push_back(draft.job_of[m]);
  const int j = merged.empty() ? draft.new_job(fusion.body) : merged.front();
  for (size_t k = 1; k < merged.size(); k++) draft.jobs[merged[k]] = {};
  draft.jobs[j].body = fusion.body;
  draft.jobs[j].epilogue = fusion.epilogue;
  draft.jobs[j].epilogue.push_back(n);
  for (int m : draft.stored_nodes(j)) draft.job_of[m] = j;
}

}  // namespace

void fuse_epilogues(Draft& draft) {
  for (int n = 0; n < draft.num_nodes(); n++) {
    if (draft.node(n).def->role != Role::kPointwise || draft.is_in_run(n)) continue;
    std::vector<int> producers = producers_of(draft, n);
    if (producers.empty()) continue;
    Fusion fusion(draft, producers);
    if (!draft.have_same_input(fusion.body)) {
      // A residual: one producer is this phase's, the other was made by an earlier phase and is plain memory. It must
      // not drag both into one job.
      producers = {*std::max_element(producers.begin(), producers.end())};
      fusion = Fusion(draft, producers);
    }
    std::vector<int> all = fusion.body;
    all.insert(all.end(), fusion.epilogue.begin(), fusion.epilogue.end());
    if (!fits(draft, n, all, fusion)) continue;
    all.push_back(n);
    if (!draft.contractible(all) || overwrites_input(draft, n, fusion.body) ||
        overwrites_input(draft, n, fusion.epilogue))
      continue;
    fuse(draft, fusion, n);
  }
}

}  // namespace mpk
