#include <algorithm>

#include "../../arch/arch.h"
#include "../passes.h"
#include "../planner.h"
#include "torch_mpk/abi/sizes.h"

namespace mpk {

void choose_warps(Draft& draft) {
  const std::vector<Node>& nodes = draft.graph().nodes();
  const bool needed = std::any_of(nodes.begin(), nodes.end(), [](const Node& node) {
    const Planner* planner = planners().find(*node.def);
    return planner != nullptr && planner->needs_warpgroups(node);
  });
  if (needed && arch_of(draft.target().arch).has_warpgroup_products) draft.schedule.warps.warpgroups = kWarpgroups;
}

}  // namespace mpk
