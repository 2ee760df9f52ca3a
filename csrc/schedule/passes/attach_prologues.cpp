#include <algorithm>

#include "../passes.h"

namespace mpk {

void attach_prologues(Draft& draft) {
  for (Job& job : draft.jobs) {
    std::vector<int> stack = job.body;
    while (!stack.empty()) {
      const int n = stack.back();
      stack.pop_back();
      for (const Dependency* edge : draft.in[n])
        if (draft.is_prologue[edge->from] && edge->hazard == Hazard::kReadAfterWrite) {
          job.prologue.push_back(edge->from);
          stack.push_back(edge->from);
        }
    }
    std::sort(job.prologue.begin(), job.prologue.end());
    job.prologue.erase(std::unique(job.prologue.begin(), job.prologue.end()), job.prologue.end());
  }
}

}  // namespace mpk
