#include <algorithm>

#include "../access.h"
#include "../kernel.h"
#include "../passes.h"

namespace mpk {
namespace {

// Whether all readers of the node's write to the buffer are in the job, or recompute it.
bool stays_inside(const Draft& draft, const std::vector<int>& job, int n, int buffer) {
  return std::all_of(draft.out[n].begin(), draft.out[n].end(), [&](const Dependency* edge) {
    return edge->buffer != buffer || draft.is_prologue[n] || std::find(job.begin(), job.end(), edge->to) != job.end();
  });
}

}  // namespace

void find_unstored(Draft& draft) {
  for (Phase& phase : draft.schedule.phases)
    for (Job& job : phase.jobs) {
      if (!job.run.empty() && find_kernel(job.run)->stores_values()) continue;
      const std::vector<int> all = members(job);
      for (int n : all) {
        if (job.epilogue.empty() && job.body == std::vector<int>{n}) continue;
        for (const Operand* made : outputs(draft.node(n))) {
          const int b = made->tensor.buffer;
          if (draft.is_workspace(b) && stays_inside(draft, all, n, b)) job.unstored.push_back(b);
        }
      }
    }
}

}  // namespace mpk
