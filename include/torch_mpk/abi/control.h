// Device memory that outlives a launch, one block for each executable and stream: `Control`, then the parts that the
// constants below describe. The host zeroes it with the workspace when it makes them, and after an aborted launch.
#pragma once

#include <cstdint>

#include "torch_mpk/abi/layout.h"

namespace mpk {

struct Control {
  uint32_t epoch;    // launches completed; the last CTA to exit increments it
  uint32_t exited;   // CTAs of the running launch that have exited
  uint32_t aborted;  // a CTA has aborted the launch; all others leave as soon as they see it
  uint32_t started;  // CTAs of the running launch that have started
};

// Behind it, for each phase: the event that every worker signals at its end, and the counter of its drawn tickets, a
// uint32_t each, in a sector of its own.
inline constexpr int kEventBytes = 32;
inline constexpr int kEventsOffset = kEventBytes;
constexpr int64_t tickets_offset(int64_t num_phases) { return kEventsOffset + num_phases * kEventBytes; }
constexpr int64_t stalls_offset(int64_t num_phases) { return tickets_offset(num_phases) + num_phases * kEventBytes; }

// Then a StallRecord for each worker and, if the kernel is profiled, the stamps of its latest launches.
enum class WarpRole : uint32_t { kConsumer, kLoader };
enum class Waiting : uint32_t {
  kEvent,     // the event of a phase
  kFullSlot,  // of the ring
  kFreeSlot,
  kLoader,   // rows of the table, or entries, from the loader
  kElement,  // a polled element of another worker
  kSum,      // another warp's part of a sum
  kRank,     // a word of another rank; `event` is its number
};

// The wait in which a warp aborted.
struct Stall {
  uint32_t phase;  // the phase the warp was in
  WarpRole role;
  Waiting waiting;
  uint32_t event;  // the awaited event's phase, or a ring slot, or the phase it polled in
  uint32_t seen;
  uint32_t expected;
  uint32_t entry;  // ring entry or tile the warp had reached
};

// Written by the first warp of a CTA whose wait aborts. The host reads it after an aborted launch, and zeroes it.
struct StallRecord {
  uint32_t written;  // 1: a warp has written it, or is about to
  Stall stall;
  uint32_t expert;  // whose product the warp had begun, counted from 1; 0: no expert's
  uint32_t tile;    // of that expert's
};

// A profiled kernel stamps when each worker passes each phase, in cycles of its multiprocessor's own clock, which
// wraps; 0: no stamp. For the latest launches, by their epoch modulo kLaunchesKept, there are
// WorkerStamps[num_workers], PhaseStamps[num_workers][num_phases] and LoaderStamps[num_workers][num_phases].
inline constexpr int kLaunchesKept = 8;

// Two moments by the multiprocessor's clock and by the shared one, which is slower to read.
struct WorkerStamps {
  uint64_t begin_ns, end_ns;
  uint32_t begin, end;
  uint32_t launch;  // its number + 1, when the worker was done
  uint32_t reserved;
};

// The consumers' stamps.
struct PhaseStamps {
  uint32_t begin;     // entered the phase
  uint32_t joined;    // all warps of the worker had left the phase before
  uint32_t ready;     // the phase's events had come; as `joined` where only producer warps await them
  uint32_t staged;    // the first activations stood in shared memory, or had been pushed to other ranks
  uint32_t computed;  // one warp had finished
};

struct LoaderStamps {
  uint32_t begin;      // entered the phase
  uint32_t described;  // its row of the table was in shared memory
  uint32_t waits;      // began to await what its copies depend on; of several jobs, the last one
  uint32_t awaited;    // it had come
  uint32_t loaded;     // had started the last copy
  uint32_t bytes;      // copied
};

// Behind those of all launches kept, for each of them again, a kernel of several ranks has
// uint32_t[num_workers][num_phases][ranks]: cycles for which the first thread has waited for each rank.
constexpr int64_t rank_stamps_bytes(int64_t num_workers, int64_t num_phases, int64_t ranks) {
  return ranks == 1 ? 0 : num_workers * num_phases * ranks * static_cast<int64_t>(sizeof(uint32_t));
}
// And behind those, where a launch has products of experts, uint32_t[num_phases][num_experts]: pairs of a row and a
// choice that chose each expert, of which there are as many as in the phase with most.
constexpr int64_t pair_stamps_bytes(int64_t num_phases, int64_t num_experts) {
  return num_phases * num_experts * static_cast<int64_t>(sizeof(uint32_t));
}
constexpr int64_t phase_stamps_offset(int64_t num_workers) {
  return num_workers * static_cast<int64_t>(sizeof(WorkerStamps));
}
constexpr int64_t loader_stamps_offset(int64_t num_workers, int64_t num_phases) {
  return phase_stamps_offset(num_workers) + num_workers * num_phases * static_cast<int64_t>(sizeof(PhaseStamps));
}
constexpr int64_t launch_stamps_bytes(int64_t num_workers, int64_t num_phases) {
  constexpr int64_t kAlignment = alignof(WorkerStamps);
  const int64_t bytes = loader_stamps_offset(num_workers, num_phases) +
                        num_workers * num_phases * static_cast<int64_t>(sizeof(LoaderStamps));
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

static_assert(sizeof(Control) == 16 && sizeof(Control) <= kEventsOffset && MPK_STANDS_AT(Control, aborted, 8));
static_assert(sizeof(StallRecord) == 40 && MPK_STANDS_AT(StallRecord, stall.waiting, 12));
static_assert(alignof(StallRecord) == 4 && sizeof(WorkerStamps) == 32 && alignof(WorkerStamps) == 8);
static_assert(sizeof(PhaseStamps) == 20 && sizeof(LoaderStamps) == 24 && alignof(LoaderStamps) == 4);

}  // namespace mpk
