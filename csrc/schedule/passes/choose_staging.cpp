#include <algorithm>

#include "../access.h"
#include "../choices.h"
#include "../passes.h"

namespace mpk {

void choose_staging(Draft& draft) {
  for (Phase& phase : draft.schedule.phases)
    for (Job& job : phase.jobs) {
      const Node& first = draft.node(job.body.front());
      const bool is_staged = std::any_of(first.operands.begin(), first.operands.end(), [&](const Operand& operand) {
        const OperandSpec* spec = first.def->find(operand.name);
        return spec != nullptr && spec->is_whole && !is_loaded_as_boxes(draft.schedule.warps, *spec) &&
               (!job.prologue.empty() || draft.schedule.polled[operand.tensor.buffer] ||
                leaves_room(operand.tensor, draft.target()));
      });
      job.cut.input = is_staged ? Input::kWhole : Input::kInPlace;
    }
}

}  // namespace mpk
