// The persistent kernel: roles, phases, and the way out.
//
// One CTA runs on each multiprocessor. Consumer warps go through the phases in order. In a phase each warp computes its
// share of every job. If the phase's event is awaited, they then meet at a barrier, and the CTA signals the event once.
// Otherwise they meet in the next phase, before it overwrites what some may still read. A loader warp goes through the
// same phases, as far ahead as the ring allows, and streams what the jobs need. Generated code supplies a `Kernel`:
//
//   static constexpr int kFullArrivals, kEmptyArrivals;                  // see WarpLayout
//   static constexpr int kNumRows, kNumPhases, kNumWorkers, kSlots, kSlotBytes, kNumOutputs;
//   static constexpr int kRowBytes;                                      // of a row of the table
//   static constexpr int kRowsOffset, kStagedOffset, kRingOffset;        // shared memory, see Shared
//   static constexpr bool kHasBoxes;                                     // some entries of the ring are boxes
//   static constexpr bool kJoinsBoxes;                                   // some have several, see BoxOrder
//   static constexpr bool kHasStages;                                    // some jobs use StageBarriers
//   static constexpr int kStagesOffset;                                  // then
//   static constexpr int64_t kEventsOffset, kTicketsOffset, kStallsOffset, kOutputsOffset;
//   static constexpr int64_t kStampsOffset;                              // 0: not profiled
//   static constexpr int64_t kPolledOffset, kPolledBytes;                // of the workspace, see Launch::polled
//   template <class C> static void compute(C& c, const Job& job);        // a switch over the job's variant
//   template <class L> static void load(L& l, const Job& job);           // what the table does not say
//
// Abort: a wait that aborts returns false. A consumer warp then sets `failed`, does no more work, and goes on to the
// next barrier of the group, where all warps learn of it and leave. So no barrier is left waiting.
#pragma once

#include "torch_mpk/abi/mailboxes.h"
#include "torch_mpk/device/consumer.cuh"
#include "torch_mpk/device/loader.cuh"

namespace mpk {

// Clears what the next launch polls. The launch before this one has read it.
template <class Kernel>
MPK_DEVICE void clear_polled(const Launch<Kernel>& launch) {
  uint4* accesses = reinterpret_cast<uint4*>(launch.polled(launch.epoch + 1));
  constexpr uint32_t kStep = Kernel::kNumWorkers * kConsumerThreads;
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kConsumerThreads + threadIdx.x; i < Kernel::kPolledBytes / 16; i += kStep)
    accesses[i] = uint4{};
}

template <class Kernel>
MPK_DEVICE void run_consumer(Consumer<Kernel>& c) {
  if (c.rank == 0) stamp_begin<Kernel>(c.params.control, c.epoch);
  clear_polled(c);
  c.stamp(&PhaseStamps::begin);
  while (c.row < Kernel::kNumRows) {
    const PhaseRow* row = c.next_row();
    if (row == nullptr) return;
    delay(c.params.jitter, blockIdx.x, 2 * c.row);
    const JobRow* job = first_job(row);
#pragma unroll 1
    for (uint32_t j = 0; j < c.current.num_jobs; j++, job = next_job(job)) {
      if (j > 0 && !c.sync()) return;  // the previous job's staged data has been read
      c.begin_job();
      Kernel::compute(c, Job{job, &c.params});
      if (!c.alive) return;
    }
    if (c.current.last == 0 ? !c.end_row() : !c.end_phase()) return;
  }
  if (c.rank == 0) stamp_end<Kernel>(c.params.control, c.epoch);
}

// The last CTA to leave closes the launch, since all others have finished. Called by all consumer threads.
template <class Kernel>
MPK_DEVICE void leave(Consumer<Kernel>& c) {
  Control& control = *c.params.control;
  c.failed = false;  // all threads have passed the same barrier, aborted or not
  c.alive = true;
  if (c.rank == 0)
    c.shared.word = ptx::fetch_inc_acq_rel_gpu(&control.exited, Kernel::kNumWorkers - 1) == Kernel::kNumWorkers - 1;
  c.sync();
  if (c.shared.word == 0) return;
  if (c.rank == 0) control.started = 0;
  if (ptx::load_acquire_gpu(&control.aborted) == 0) {
    if (c.rank == 0) control.epoch = c.epoch + 1;
    return;
  }
  const OutputRow* outputs = reinterpret_cast<const OutputRow*>(c.table() + Kernel::kOutputsOffset);
  for (int i = 0; i < Kernel::kNumOutputs; i++) {
    const OutputRow out = outputs[i];
    uint8_t* data = static_cast<uint8_t*>(c.pointers[out.index]);
    for (uint64_t b = c.rank * out.element; b < out.bytes; b += kConsumerThreads * out.element) {
      if (out.element == 2) *reinterpret_cast<uint16_t*>(data + b) = static_cast<uint16_t>(out.nan);
      if (out.element == 4) *reinterpret_cast<uint32_t*>(data + b) = static_cast<uint32_t>(out.nan);
      if (out.element == 8) *reinterpret_cast<uint64_t*>(data + b) = out.nan;
    }
  }
  // Other ranks would wait in vain. One thread for each: a loop would take registers that products need.
  static_assert(kMaxRanks <= kConsumerThreads);
  if (c.rank < c.params.ranks && c.rank != c.params.rank)
    ptx::store_relaxed_sys(reinterpret_cast<uint32_t*>(c.params.mailboxes[c.rank]) + c.params.rank, kRankAborted);
  __threadfence_system();
  c.sync();
  if (c.rank == 0) ptx::store_release_sys(c.params.host_abort, 1);
}

template <class Kernel>
MPK_DEVICE void run(const LaunchParams& params, void* const* pointers) {
  extern __shared__ __align__(1024) uint8_t smem[];
  Shared& shared = *reinterpret_cast<Shared*>(smem);
  static_assert(sizeof(Shared) <= kMaxFixedBytes, "the schedule leaves less room for the fixed shared memory");
  static_assert(Kernel::kRowsOffset % kAccessBytes == 0 && Kernel::kStagedOffset % kAccessBytes == 0);
  static_assert(Kernel::kSlotBytes >= kMinSlotBytes && Kernel::kSlotBytes <= kTileSlotBytes);
  static_assert(Kernel::kSlotBytes % kAccessBytes == 0 && Kernel::kRingOffset % kAccessBytes == 0);
  static_assert(Kernel::kSlots <= kMaxSlots);
  static_assert(!Kernel::kHasBoxes ||
                (Kernel::kSlotBytes % kBoxAlignment == 0 && Kernel::kRingOffset % kBoxAlignment == 0));
  static_assert(Kernel::kEventsOffset == kEventsOffset && Kernel::kTicketsOffset % kEventBytes == 0);
  static_assert(Kernel::kStallsOffset % alignof(StallRecord) == 0 &&
                Kernel::kStampsOffset % alignof(WorkerStamps) == 0);
  static_assert(Kernel::kOutputsOffset % alignof(OutputRow) == 0);
  if (threadIdx.x == 0) {
    init_ring<Kernel>(shared.ring);
    if constexpr (Kernel::kHasStages) reinterpret_cast<StageBarriers*>(smem + Kernel::kStagesOffset)->init();
    shared.init();
    uint8_t* control = reinterpret_cast<uint8_t*>(params.control);
    shared.watchdog = {params.control, reinterpret_cast<StallRecord*>(control + Kernel::kStallsOffset) + blockIdx.x,
                       params.watchdog_ns, Kernel::kNumWorkers};
    ptx::add_relaxed_gpu(&params.control->started, 1);
    shared.described = shared.done = 0;
  }
  for (uint32_t i = threadIdx.x; i < kSumsKept * kSumsOfRun; i += kThreads)
    shared.run_sums[i / kSumsOfRun][i % kSumsOfRun] = 0;
  const uint32_t epoch = ptx::load_relaxed_gpu(&params.control->epoch);
  const bool aborted = ptx::load_relaxed_gpu(&params.control->aborted) != 0;  // an earlier launch was: run nothing
  const Launch<Kernel> launch{params, pointers, shared, smem, epoch};
  const bool skip = __syncthreads_or(aborted);
  const int warp = threadIdx.x / 32;
  if (warp >= kConsumerWarps) {
#if MPK_WARPGROUPS > 0
    ptx::give_up_registers<kLoadingRegisters>();
#endif
    if (!skip && warp == kConsumerWarps) run_loader(launch, threadIdx.x % 32);
    return;
  }
#if MPK_WARPGROUPS > 0
  ptx::take_registers<kMultiplyingRegisters>();
#endif
  Consumer<Kernel> c(launch, threadIdx.x);
  if (!skip) run_consumer(c);
  leave(c);
}

}  // namespace mpk
