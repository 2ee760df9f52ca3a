#include <algorithm>

#include "../access.h"
#include "../passes.h"

namespace mpk {
namespace {

bool loader_reads_buffer(const WarpLayout& warps, const Node& node, int buffer) {
  return std::any_of(node.operands.begin(), node.operands.end(), [&](const Operand& operand) {
    return operand.tensor.buffer == buffer && loader_reads(warps, node, operand);
  });
}

}  // namespace

void find_loader_waits(Draft& draft) {
  for (Phase& phase : draft.schedule.phases)
    for (Job& job : phase.jobs) {
      std::vector<int>& waits = job.loader_waits;
      for (int n : job.body) {
        for (const Dependency* edge : draft.in[n]) {
          const int p = draft.phase_of(edge->from);
          if (p >= 0 && edge->hazard != Hazard::kWriteAfterRead &&
              loader_reads_buffer(draft.schedule.warps, draft.node(n), edge->buffer))
            waits.push_back(p);
        }
      }
      std::sort(waits.begin(), waits.end());
      waits.erase(std::unique(waits.begin(), waits.end()), waits.end());
    }
}

}  // namespace mpk
