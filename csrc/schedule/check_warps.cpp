#include "../arch/arch.h"
#include "proof.h"
#include "staging.h"

namespace mpk {
namespace {

std::string str(int64_t v) { return std::to_string(v); }

void require(bool holds, const std::string& what) {
  if (!holds) unsound(what);
}

void check_ring(const Schedule& s) {
  const WarpLayout& w = s.warps;
  require(w.slot_bytes >= kMinSlotBytes && w.slot_bytes % kSharedAlignment == 0,
          "slots of " + str(w.slot_bytes) + " bytes, expected a multiple of " + str(kSharedAlignment) + " from " +
              str(kMinSlotBytes) + " on");
  require(w.max_slots >= kFewestSlots && w.max_slots <= kMaxSlots,
          "a ring of " + str(w.max_slots) + " slots, expected " + str(kFewestSlots) + " to " + str(kMaxSlots));
  // A slot is full once the copy engine, or every lane of the loader, has arrived. It is empty once the consumer that
  // owns the entry has arrived, or all that multiply together.
  const int64_t full = arch_of(s.target.arch).has_bulk_copies ? w.loaders : 32 * w.loaders;
  require(w.full_arrivals == full,
          "slots are full after " + str(w.full_arrivals) + " arrivals, but loaders arrive " + str(full) + " times");
  const int64_t readers = w.all_read_entries ? w.consumers : most_readers(s);
  require(w.empty_arrivals == readers, "slots are empty after " + str(w.empty_arrivals) + " arrivals, but " +
                                           str(readers) + " of " + str(w.consumers) + " consumers read an entry");
}

}  // namespace

void check_warps(const Schedule& s) {
  if (s.target.device != "cuda") return;
  const WarpLayout& w = s.warps;
  require(w.consumers > 0 && w.loaders == 1,
          str(w.consumers) + " consumers and " + str(w.loaders) + " loaders, expected some and one");
  const int64_t most = w.moves_registers ? kMultiplyingRegisters : registers_each(w.threads());
  require(w.registers >= kFewestRegisters && w.registers <= most,
          "threads of " + str(w.registers) + " registers, but code needs " + str(kFewestRegisters) + ", and " +
              str(w.threads()) + " threads may have " + str(most));
  require(!w.moves_registers || w.consumers == kWarpgroupWarps * kWarpgroups,
          str(w.consumers) + " consumers are not the " + str(kWarpgroups) + " warpgroups that registers are moved to");
  check_ring(s);
  for (const Phase& phase : s.phases)
    for (const Job& job : phase.jobs)
      if (job.cut.staged_bytes > 0 && job.cut.staged_bytes > room(s))
        unsound(name_node(s, job.body.front()) + ": it stages " + str(job.cut.staged_bytes) + " bytes, but beside " +
                str(kFewestSlots) + " slots of the ring shared memory has room for " + str(room(s)));
}

}  // namespace mpk
