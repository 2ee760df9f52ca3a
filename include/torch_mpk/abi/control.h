// Device memory that outlives a launch, one block per executable and stream: `Control`, then what the constants below
// say. The host zeroes it with the workspace when it makes them and after an aborted launch.
#pragma once

#include <cstdint>

#include "torch_mpk/abi/layout.h"

namespace mpk {

struct Control {
  uint32_t epoch;    // launches completed; the last CTA to exit increments it
  uint32_t exited;   // CTAs of the running launch that have exited
  uint32_t aborted;  // a CTA gave up; all others leave as soon as they see it
  uint32_t started;  // CTAs of the running launch that run, or have
};

// Behind it, for each phase the event that every worker signals at its end, and the tickets drawn in it: a uint32_t
// each, in a sector of its own.
inline constexpr int kEventBytes = 32;
inline constexpr int kEventsOffset = kEventBytes;
constexpr int64_t tickets_offset(int64_t num_phases) { return kEventsOffset + num_phases * kEventBytes; }
constexpr int64_t stalls_offset(int64_t num_phases) { return tickets_offset(num_phases) + num_phases * kEventBytes; }

// Then a StallRecord for each worker, and, where the kernel is profiled, what its latest launches have stamped.
enum class WarpRole : uint32_t { kConsumer, kLoader };
enum class Waiting : uint32_t {
  kEvent,     // the event of a phase
  kFullSlot,  // of the ring
  kFreeSlot,
  kLoader,   // rows of the table, or entries, that the loader brings
  kElement,  // an element that another worker makes, polled
  kSum,      // another warp's part of a sum
  kRank,     // what another rank pushes; `event` is its number
};

// Written by a CTA that gives up waiting; read by the host after an aborted launch.
struct StallRecord {
  uint32_t valid;
  uint32_t phase;  // the phase the warp was in
  WarpRole role;
  Waiting waiting;
  uint32_t event;  // phase whose event it waited for, or ring slot, or where it polls the phase it was in
  uint32_t seen;
  uint32_t expected;
  uint32_t entry;  // ring entry or tile the warp had reached
};

// A profiled kernel notes when each worker passes each phase, in cycles of its multiprocessor's clock, which wraps and
// is no other's; 0 where there is nothing to note. Of the latest launches, by their epoch modulo how many are kept,
// there are WorkerStamps[num_workers], PhaseStamps[num_workers][num_phases] and LoaderStamps[num_workers][num_phases].
inline constexpr int kLaunchesKept = 8;

// Two moments by the clock and by the one that all multiprocessors share, which is slower to read.
struct WorkerStamps {
  uint64_t begin_ns, end_ns;
  uint32_t begin, end;
  uint32_t launch;  // its number + 1, when the worker was done
  uint32_t reserved;
};

// Of the consumers.
struct PhaseStamps {
  uint32_t begin;     // came to the phase
  uint32_t joined;    // all warps of the worker were done with the phase before
  uint32_t ready;     // the phase's events had been seen; or as joined, where only warps that bring x await them
  uint32_t staged;    // the first activations stood in shared memory
  uint32_t computed;  // one warp was done
};

struct LoaderStamps {
  uint32_t begin;      // came to the phase
  uint32_t described;  // its row of the table stood in shared memory: there was room for it
  uint32_t waits;      // began to wait for what its copies depend on; of several jobs, the last that does
  uint32_t awaited;    // had seen it
  uint32_t loaded;     // had started the last copy
  uint32_t bytes;      // that it copied
};

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
static_assert(sizeof(StallRecord) == 32 && MPK_STANDS_AT(StallRecord, waiting, 12));
static_assert(alignof(StallRecord) == 4 && sizeof(WorkerStamps) == 32 && alignof(WorkerStamps) == 8);
static_assert(sizeof(PhaseStamps) == 20 && sizeof(LoaderStamps) == 24 && alignof(LoaderStamps) == 4);

}  // namespace mpk
