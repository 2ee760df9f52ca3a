// Waiting without ever hanging: the watchdog, and the events that end phases.
#pragma once

#include "torch_mpk/device/out_of_line.cuh"
#include "torch_mpk/device/ptx.cuh"

namespace mpk {

inline constexpr int kEventStride = kEventBytes / sizeof(uint32_t);  // from one event, or ticket, to the next

// What every wait needs in order to give up. One per CTA, in shared memory.
struct Watchdog {
  Control* control;
  StallRecord* stall;  // this CTA's
  uint64_t limit_ns;
  uint32_t num_workers;
};

// What a warp that gives up was waiting for.
MPK_DEVICE StallRecord stall(uint32_t phase, WarpRole role, Waiting waiting, uint32_t event, uint32_t seen,
                             uint32_t expected, uint32_t entry) {
  return {1, phase, role, waiting, event, seen, expected, entry};
}

// Whether a wait that began to be watched at `since`, or begins to be now, is over: the launch has to be given up.
MPK_DEVICE bool is_over(const Watchdog& dog, uint64_t& since) {
  const uint64_t time = ptx::watched_time_ns();
  // Workers that another kernel's multiprocessors are still denied are queued, and nobody is stuck.
  if (since == 0 || ptx::load_relaxed_gpu(&dog.control->started) < dog.num_workers) since = time;
  const bool late = dog.limit_ns != 0 && time - since > dog.limit_ns;
  return late || ptx::load_relaxed_gpu(&dog.control->aborted) != 0;
}

// Gives the launch up, and records what this CTA was waiting for.
MPK_OUT_OF_LINE void give_up(const Watchdog& dog, StallRecord now) {
  // The first warp of the CTA to notice. A loader without a free slot only tells that consumers wait for something
  // else.
  if (now.waiting != Waiting::kFreeSlot && atomicExch(&dog.stall->valid, 1u) == 0) *dog.stall = now;
  __threadfence();
  atomicExch(&dog.control->aborted, 1u);
}

// Called every few thousand polls of a wait, with what to report of it. Returns 0 when the launch was given up;
// otherwise the time to pass to the next call. Out of line, so that loops that wait are short.
MPK_OUT_OF_LINE uint64_t keep_waiting(const Watchdog& dog, StallRecord now, uint64_t since) {
  if (!is_over(dog, since)) return since;
  give_up(dog, now);
  return 0;
}

// Polls `ready()` until it is true; false when the launch was given up. `report()` says what was waited for.
template <class Ready, class Report>
MPK_DEVICE bool spin(const Watchdog& dog, Ready ready, Report report) {
  uint64_t since = 0;
  for (uint32_t i = 1; !ready(); i++)
    if ((i & 4095) == 0 && (since = keep_waiting(dog, report(), since)) == 0) return false;
  return true;
}

// The same where much is held in registers, of which a call leaves half: it calls nothing before it gives up.
template <class Ready, class Report>
MPK_DEVICE bool spin_here(const Watchdog& dog, Ready ready, Report report) {
  uint64_t since = 0;
  for (uint32_t i = 1; !ready(); i++)
    if ((i & 4095) == 0 && is_over(dog, since)) {
      give_up(dog, report());
      return false;
    }
  return true;
}

// Counters wrap: compare by signed difference.
MPK_DEVICE bool reached(uint32_t value, uint32_t target) { return static_cast<int32_t>(value - target) >= 0; }

// The waits themselves are out of line: there are dozens of places that wait, and code that is not there need not be
// fetched. Each returns false, or a count short of `target`, when the launch was given up.

// Until every worker has signalled `event` in this launch; it grows by num_workers in every launch.
MPK_OUT_OF_LINE bool wait_event(const Watchdog& dog, const uint32_t* event, uint32_t target, uint32_t phase,
                                WarpRole role, uint32_t event_idx) {
  uint32_t seen = 0;
  return spin(
      dog, [&] { return reached(seen = ptx::load_acquire_gpu(event), target); },
      [&] { return stall(phase, role, Waiting::kEvent, event_idx, seen, target, 0); });
}

// Until a count in shared memory has reached `target`. Returns the count.
MPK_OUT_OF_LINE uint32_t wait_count(const Watchdog& dog, const uint32_t* count, uint32_t target, uint32_t phase,
                                    WarpRole role, Waiting waiting, uint32_t entry) {
  uint32_t seen = 0;
  spin(
      dog, [&] { return reached(seen = ptx::load_acquire_cta(count), target); },
      [&] { return stall(phase, role, waiting, phase, seen, target, entry); });
  return seen;
}

// Until a slot's barrier has passed the phase of this parity.
MPK_OUT_OF_LINE bool wait_barrier(const Watchdog& dog, uint64_t* barrier, uint32_t parity, uint32_t phase,
                                  WarpRole role, Waiting waiting, uint32_t slot, uint32_t entry) {
  return spin(
      dog, [&] { return ptx::mbar_test(barrier, parity); },
      [&] { return stall(phase, role, waiting, slot, 0, 0, entry); });
}

// A random delay of up to 4 microseconds: with jitter, any order of events that is legal happens sooner or later.
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
