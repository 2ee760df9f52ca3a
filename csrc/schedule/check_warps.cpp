#include "proof.h"
#include "staging.h"

namespace mpk {
namespace {

std::string str(int64_t v) { return std::to_string(v); }

void require(bool holds, const std::string& what) {
  if (!holds) unsound(what);
}

void check_ring(const WarpLayout& w, const Target& target) {
  require(w.slot_bytes >= kMinSlotBytes && w.slot_bytes % kSharedAlignment == 0,
          "slots of " + str(w.slot_bytes) + " bytes, expected a multiple of " + str(kSharedAlignment) + " from " +
              str(kMinSlotBytes) + " on");
  require(w.max_slots >= kFewestSlots && w.max_slots <= kMaxSlots,
          "a ring of " + str(w.max_slots) + " slots, expected " + str(kFewestSlots) + " to " + str(kMaxSlots));
  // A slot is full when the copy engine, or every lane of the loader, has arrived; and empty when the one consumer that
  // owns the entry has.
  const int64_t full = target.arch >= 90 ? w.loaders : 32 * w.loaders;
  require(w.full_arrivals == full,
          "slots are full after " + str(w.full_arrivals) + " arrivals, but loaders arrive " + str(full) + " times");
  require(w.empty_arrivals == 1, "slots are empty after " + str(w.empty_arrivals) + " arrivals, but one of the " +
                                     str(w.consumers) + " consumers owns an entry");
}

}  // namespace

void check_warps(const Schedule& s) {
  if (s.target.device != "cuda") return;
  const WarpLayout& w = s.warps;
  require(w.consumers > 0 && w.loaders == 1,
          str(w.consumers) + " consumers and " + str(w.loaders) + " loaders, expected some and one");
  require(w.registers >= kFewestRegisters && w.registers <= registers_each(w.threads()),
          "threads of " + str(w.registers) + " registers, but code needs " + str(kFewestRegisters) + ", and " +
              str(w.threads()) + " threads may have " + str(registers_each(w.threads())));
  check_ring(w, s.target);
  for (const Phase& phase : s.phases)
    for (const Job& job : phase.jobs)
      if (job.staged_bytes > 0 && job.staged_bytes > room(s))
        unsound(name_node(s, job.body.front()) + ": it stages " + str(job.staged_bytes) + " bytes, but beside " +
                str(kFewestSlots) + " slots of the ring shared memory has room for " + str(room(s)));
}

}  // namespace mpk
