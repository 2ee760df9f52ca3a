// The consumer warps' view of a launch: the group's barrier, and the way from phase to phase.
#pragma once

#include "torch_mpk/device/launch.cuh"

namespace mpk {

// Waits for the events of a phase. Out of line as other waits are, see event.cuh. The last phase, which advances
// counters, does not begin where another worker has aborted: a stalled worker may have signalled since.
MPK_OUT_OF_LINE bool wait_events(const Watchdog& dog, const PhaseRow* waiting, const uint32_t* events, uint32_t target,
                                 uint32_t phase, bool is_last) {
  for (uint32_t i = 0; i < waiting->num_waits; i++) {
    const uint32_t event = waits_of(waiting)[i];
    if (!wait_event(dog, events + event * kEventStride, target, phase, WarpRole::kConsumer, event)) return false;
  }
  return !is_last || ptx::load_relaxed_gpu(&dog.control->aborted) == 0;
}

// A consumer thread's view: the group's barrier, shared memory, the ring. `rank` is the thread's within the group.
template <class Kernel>
struct Consumer : Launch<Kernel>, PhaseClock<Kernel, PhaseStamps> {
  using Config = Kernel;
  int rank, warp, lane;
  RingReader<Kernel::kSlots, Kernel::kSlotBytes, Kernel::kEmptyArrivals> ring;
  uint32_t row = 0, phase = 0;
  uint32_t entry = 0;    // ring entry that the running job begins with
  uint32_t stage = 0;    // and its first stage of x
  bool failed = false;   // a wait of this warp was aborted
  bool alive = true;     // no warp of the group has failed, as far as the group knows
  bool awaited = false;  // the events of this phase have come
  bool apart = false;    // other warps may still be in the phase before
  PhaseRow current{};    // the row's, in registers

  MPK_DEVICE Consumer(const Launch<Kernel>& launch, int thread)
      : Launch<Kernel>(launch),
        rank(thread),
        warp(thread / 32),
        lane(thread % 32),
        ring{launch.shared.ring, launch.smem + Kernel::kRingOffset, launch.shared.watchdog, thread % 32} {}

  // The barrier of the consumer group. False for all of them when one has aborted: return at once.
  MPK_DEVICE bool sync() {
    if (alive) alive = !ptx::barrier_or<kConsumerThreads>(failed);
    return alive;
  }

  // Called at the beginning of a job. Otherwise the compiler computes what all jobs derive from these values once for
  // the whole launch, and spills it.
  MPK_DEVICE void begin_job() {
    rank = ptx::thread_index();
    warp = rank / 32;
    lane = ring.lane = rank % 32;
  }

  // Shared memory for the running job, Kernel::kRingOffset - Kernel::kStagedOffset bytes, aligned to 128.
  MPK_DEVICE uint8_t* staged() const { return this->smem + Kernel::kStagedOffset; }

  // This worker's number in the job.
  MPK_DEVICE uint32_t worker(const Job& job) const { return (blockIdx.x + job.row->rotation) % Kernel::kNumWorkers; }

  // Calls f, which computes a job out of line, behind await(), and returns false when the launch was aborted. State
  // that lives across jobs is saved to memory meanwhile, since f may need all registers. Spills of the compiler's own
  // would stay in memory for the whole launch.
  template <class F>
  MPK_DEVICE void call(F f) {
    volatile uint32_t kept[] = {row, phase, entry, stage, ring.issued};
    alive = f();
    row = kept[0], phase = kept[1], entry = kept[2], stage = kept[3], ring.issued = kept[4];
    failed = apart = false, awaited = true;
    current = *current_row();
  }

  // Waits for the next row of the table; null when the launch was aborted.
  MPK_DEVICE const PhaseRow* next_row() {
    const uint32_t target = row + 1;
    uint32_t* described = &this->shared.described;
    if (!__all_sync(~0u, reached(ptx::load_acquire_cta(described), target))) {
      const uint32_t seen =
          wait_count(this->shared.watchdog, described, target, phase, WarpRole::kConsumer, Waiting::kLoader, entry);
      if (!__all_sync(~0u, reached(seen, target))) {
        failed = true;
        sync();
        return nullptr;
      }
    }
    this->shared.await_published(row);
    current = *current_row();
    return current_row();
  }

  // Waits until the worker's warps have finished the phase before, and the events of this one have come, once a phase.
  // A job calls it before it writes to shared memory, and before it reads what earlier phases of this launch wrote, or
  // may have written since the phase before the last. Elements are polled behind it. False when the launch was aborted.
  MPK_DEVICE bool await() {
    if (awaited) return alive;
    if (!await_warps()) return false;
    if (current.num_waits != 0) {
      if (rank == kPollingThread) failed = !events_come();
      if (!sync()) return false;
      this->stamp(&PhaseStamps::ready);
    }
    return true;
  }

  // The same in two steps, without the group's barrier behind the events, for jobs whose producer warps alone read what
  // earlier phases wrote. First all warps call this, once a phase;
  MPK_DEVICE bool await_warps() {
    if (awaited) return alive;
    awaited = true;
    if (apart && !join(0)) return false;
    this->stamp(&PhaseStamps::joined);
    this->stamp(&PhaseStamps::ready);
    return true;
  }
  // then each producer warp calls this, and each warp that meets no barrier of the job. It sets `failed` when the
  // launch was aborted.
  MPK_DEVICE void await_events() {
    if (current.num_waits != 0) failed = !__all_sync(~0u, events_come());
  }

  // Ends a row whose phase goes on.
  MPK_DEVICE bool end_row() {
    if (!sync()) return false;
    this->shared.finish(row);
    if (rank == 0) ptx::store_release_cta(&this->shared.done, row + 1);
    row++;
    return true;
  }

  // Ends the last row of a phase.
  MPK_DEVICE bool end_phase() {
    if (!await()) return false;
    this->stamp(&PhaseStamps::computed);
    this->next_stamps(this->params.control, this->epoch, StampPlaces<Kernel>::kPhases, phase, rank == 0);
    const uint32_t signal = current.signal;
    if (signal & kPublishes) ptx::fence_proxy_async();
    row++;
    phase++;
    awaited = false;
    apart = true;
    return (signal == 0 && phase < Kernel::kNumPhases) || join(signal);
  }

 private:
  MPK_DEVICE bool events_come() const {
    return wait_events(this->shared.watchdog, current_row(), this->event(0), this->event_target(), phase,
                       phase + 1 == Kernel::kNumPhases);
  }

  // Joins the warps: all have finished the phase before.
  MPK_DEVICE bool join(uint32_t signal) {
    apart = false;
    if (!sync()) return false;
    this->shared.finish(row - 1);
    if (rank == 0) {
      delay(this->params.jitter, blockIdx.x, 2 * row - 1);
      if (signal & kReleases) ptx::add_release_gpu(this->event(phase - 1), 1);
      ptx::store_release_cta(&this->shared.done, row);
    }
    return true;
  }

  MPK_DEVICE const PhaseRow* current_row() const { return reinterpret_cast<const PhaseRow*>(this->place_of(row)); }
};

// Waits for a barrier of stage `number`: StageBarriers::full or empty. False when the launch was
// aborted.
template <class C>
MPK_DEVICE bool await_stage(C& c, uint64_t* stages, uint32_t number, Waiting what) {
  const uint32_t place = number % kStages, parity = number / kStages & 1;
  return ptx::mbar_peek(&stages[place], parity) ||
         wait_barrier(c.shared.watchdog, &stages[place], parity, c.phase, WarpRole::kConsumer, what, place, number);
}

}  // namespace mpk
