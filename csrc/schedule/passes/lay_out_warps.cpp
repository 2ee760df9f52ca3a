#include <algorithm>

#include "../../arch/arch.h"
#include "../kernel.h"
#include "../passes.h"
#include "torch_mpk/abi/table.h"

namespace mpk {
namespace {

// Chooses the ring's slot size that the weights' rows fill best. Candidates are compared by the bytes of slots that a
// launch fills with weights. A larger slot must save a twentieth, and leave slots for all warps.
int64_t choose_slot_bytes(const Schedule& schedule) {
  const auto filled = [&](int64_t slot_bytes) {
    double total = 0;
    for (const Phase& phase : schedule.phases)
      for (const Job& job : phase.jobs)
        for (const Kernel* kernel : kernels_of(schedule, job)) total += kernel->filled_bytes(schedule, job, slot_bytes);
    return total;
  };
  constexpr int64_t kSlotsForAll = 16;
  const int64_t most = std::min<int64_t>(kMaxSlotBytes, schedule.target.smem_bytes / kSlotsForAll);
  int64_t best = kMinSlotBytes;
  double least = filled(best);
  for (int64_t bytes = best + 1024; bytes <= most; bytes += 1024)
    if (const double total = filled(bytes); total < 0.95 * least) best = bytes, least = total;
  return best;
}

}  // namespace

void lay_out_warps(Draft& draft) {
  WarpLayout& warps = draft.schedule.warps;
  warps.loaders = 1;
  if (warps.consumers == 0)
    warps.consumers = kRegisterFile / (32 * kFewestRegisters) - warps.loaders;  // as many as fit
  if (warps.registers == 0) warps.registers = registers_each(warps.threads());
  warps.max_slots = kMaxSlots;
  warps.full_arrivals = arch_of(draft.target().arch).has_bulk_copies ? 1 : 32;
  warps.empty_arrivals = warps.all_read_entries ? warps.consumers : 1;
  if (warps.slot_bytes == 0) warps.slot_bytes = choose_slot_bytes(draft.schedule);
}

}  // namespace mpk
