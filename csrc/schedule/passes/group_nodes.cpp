#include "../passes.h"

namespace mpk {

void group_nodes(Draft& draft) {
  std::vector<std::vector<int>> groups;
  for (int n = 0; n < draft.num_nodes(); n++) {
    if (!draft.joins(n) || draft.job_of[n] >= 0) continue;
    bool placed = false;
    for (std::vector<int>& group : groups) {
      std::vector<int> all = group;
      all.push_back(n);
      if (!draft.have_same_input(all) || !draft.contractible(all)) continue;
      group = all;
      placed = true;
      break;
    }
    if (!placed) groups.push_back({n});
  }
  for (const std::vector<int>& group : groups) draft.new_job(group);
}

}  // namespace mpk
