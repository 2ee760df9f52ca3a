#include <algorithm>

#include "../passes.h"

namespace mpk {

void build_phases(Draft& draft) {
  std::vector<Phase>& phases = draft.schedule.phases;
  for (size_t j = 0; j < draft.jobs.size(); j++) {
    if (draft.jobs[j].body.empty()) continue;
    const size_t level = static_cast<size_t>(draft.levels[j]);
    if (level >= phases.size()) phases.resize(level + 1);
    phases[level].jobs.push_back(draft.jobs[j]);
  }
  for (size_t p = 0; p < phases.size(); p++) {
    std::sort(phases[p].jobs.begin(), phases[p].jobs.end(),
              [](const Job& a, const Job& b) { return a.body.front() < b.body.front(); });
    if (p > 0) phases[p].waits = {static_cast<int>(p) - 1};
  }
}

}  // namespace mpk
