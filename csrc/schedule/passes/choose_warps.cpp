#include <algorithm>

#include "../../arch/arch.h"
#include "../kernel.h"
#include "../passes.h"
#include "torch_mpk/abi/sizes.h"

namespace mpk {
namespace {

// Adds a kernel's demands to the launch's warps.
void join(WarpLayout& warps, const Demands& demands) {
  warps.consumers = std::max(warps.consumers, demands.consumers);
  warps.registers = std::max(warps.registers, demands.registers);
  warps.slot_bytes = std::max(warps.slot_bytes, demands.slot_bytes);
  warps.moves_registers |= demands.moves_registers;
  warps.all_read_entries |= demands.all_read_entries;
  warps.loads_inputs |= demands.loads_inputs;
  warps.hands_over_rows |= demands.hands_over_rows;
}

}  // namespace

void choose_warps(Draft& draft) {
  if (!arch_of(draft.target().arch).has_warpgroup_products) return;
  for (const Node& node : draft.graph().nodes())
    for (const Kernel* kernel : kernels_of(*node.def))
      if (const std::optional<Demands> demands = kernel->demands(draft.graph(), node))
        join(draft.schedule.warps, *demands);
}

}  // namespace mpk
