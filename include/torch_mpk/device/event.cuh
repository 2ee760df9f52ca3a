// Waiting without ever hanging: the watchdog, and the events that end phases.
#pragma once

#include "torch_mpk/device/out_of_line.cuh"
#include "torch_mpk/device/ptx.cuh"

namespace mpk {

inline constexpr int kEventStride = kEventBytes / sizeof(uint32_t);  // from one event, or ticket, to the next

// The state that every wait needs in order to abort. A CTA has one, in shared memory.
struct Watchdog {
  Control* control;
  StallRecord* stall;  // this CTA's
  uint64_t limit_ns;
  uint32_t num_workers;
};

// Describes what the warp waited for.
MPK_DEVICE Stall stall(uint32_t phase, WarpRole role, Waiting waiting, uint32_t event, uint32_t seen, uint32_t expected,
                       uint32_t entry) {
  return {phase, role, waiting, event, seen, expected, entry};
}

// Whether the launch must be aborted. `since`: when the wait was first seen, or 0.
MPK_DEVICE bool is_over(const Watchdog& dog, uint64_t& since) {
  const uint64_t time = ptx::watched_time_ns();
  // Workers that wait for a multiprocessor which another kernel holds are queued, not stuck.
  if (since == 0 || ptx::load_relaxed_gpu(&dog.control->started) < dog.num_workers) since = time;
  const bool late = dog.limit_ns != 0 && time - since > dog.limit_ns;
  return late || ptx::load_relaxed_gpu(&dog.control->aborted) != 0;
}

// Aborts the launch, and records what this CTA was waiting for. Kernels of warpgroups have a copy of this behind every
// wait, so it stores no more of the record than it must: the host zeroes what it has read.
MPK_OUT_OF_LINE void do_abort(const Watchdog& dog, Stall now) {
  // The CTA's first warp to notice records it. A loader without a free slot only shows that consumers wait for
  // something else.
  if (now.waiting != Waiting::kFreeSlot && atomicExch(&dog.stall->written, 1u) == 0) dog.stall->stall = now;
  __threadfence();
  atomicExch(&dog.control->aborted, 1u);
}

// Waits call it every few thousand polls. Returns 0 when the launch was aborted, else the time to pass to the next
// call. Out of line, so that polling loops are short.
MPK_OUT_OF_LINE uint64_t keep_waiting(const Watchdog& dog, Stall now, uint64_t since) {
  if (!is_over(dog, since)) return since;
  do_abort(dog, now);
  return 0;
}

// Polls `ready()` until it is true. False when the launch was aborted. `report()` says what was waited for.
template <class Ready, class Report>
MPK_DEVICE bool spin(const Watchdog& dog, Ready ready, Report report) {
  uint64_t since = 0;
  for (uint32_t i = 1; !ready(); i++)
    if ((i & 4095) == 0 && (since = keep_waiting(dog, report(), since)) == 0) return false;
  return true;
}

// The same for code that holds many registers, half of which a call would lose: it calls nothing until it aborts.
template <class Ready, class Report>
MPK_DEVICE bool spin_here(const Watchdog& dog, Ready ready, Report report) {
  uint64_t since = 0;
  for (uint32_t i = 1; !ready(); i++)
    if ((i & 4095) == 0 && is_over(dog, since)) {
      do_abort(dog, report());
      return false;
    }
  return true;
}

// Counters wrap: compare by signed difference.
MPK_DEVICE bool reached(uint32_t value, uint32_t target) { return static_cast<int32_t>(value - target) >= 0; }

// Waits are out of line: dozens of places wait, and shared code need not be fetched again. Each returns false, or a
// count short of `target`, when the launch was aborted.

// Waits until every worker has signalled `event` in this launch. The counter grows by num_workers in every launch.
MPK_OUT_OF_LINE bool wait_event(const Watchdog& dog, const uint32_t* event, uint32_t target, uint32_t phase,
                                WarpRole role, uint32_t event_idx) {
  uint32_t seen = 0;
  return spin(
      dog, [&] { return reached(seen = ptx::load_acquire_gpu(event), target); },
      [&] { return stall(phase, role, Waiting::kEvent, event_idx, seen, target, 0); });
}

// Waits until a count in shared memory has reached `target`. Returns the count.
MPK_OUT_OF_LINE uint32_t wait_count(const Watchdog& dog, const uint32_t* count, uint32_t target, uint32_t phase,
                                    WarpRole role, Waiting waiting, uint32_t entry) {
  uint32_t seen = 0;
  spin(
      dog, [&] { return reached(seen = ptx::load_acquire_cta(count), target); },
      [&] { return stall(phase, role, waiting, phase, seen, target, entry); });
  return seen;
}

// Waits until a barrier has completed the phase of this parity.
MPK_OUT_OF_LINE bool wait_barrier(const Watchdog& dog, uint64_t* barrier, uint32_t parity, uint32_t phase,
                                  WarpRole role, Waiting waiting, uint32_t slot, uint32_t entry) {
  return spin(
      dog, [&] { return ptx::mbar_test(barrier, parity); },
      [&] { return stall(phase, role, waiting, slot, 0, 0, entry); });
}

// A random delay of up to 4 microseconds: jitter makes every legal order of events happen sooner or later.
MPK_OUT_OF_LINE void delay_randomly(uint32_t jitter, uint32_t worker, uint32_t step) {
  uint32_t h = jitter * 0x9e3779b1u ^ worker * 0x85ebca77u ^ step * 0xc2b2ae3du;
  h = (h ^ (h >> 15)) * 0x2c1b3c6du;
  h = (h ^ (h >> 12)) * 0x297a2d39u;
  __nanosleep((h ^ (h >> 15)) & 4095);
}
MPK_DEVICE void delay(uint32_t jitter, uint32_t worker, uint32_t step) {
  if (jitter != 0) delay_randomly(jitter, worker, step);
}

}  // namespace mpk
