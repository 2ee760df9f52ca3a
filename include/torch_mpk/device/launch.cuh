// The state of a launch that both roles share: shared memory, rows of the table, places in memory.
#pragma once

#include "torch_mpk/device/ring.cuh"
#include "torch_mpk/device/stamps.cuh"
#include "torch_mpk/device/warps.cuh"

namespace mpk {

// In a kernel for racecheck, barriers that repeat what `described` and `done` say of the table's rows. Otherwise empty.
struct RowBarriers {
#ifdef MPK_RACECHECK
  uint64_t published[kPhasesAhead], finished[kPhasesAhead];

  MPK_DEVICE void init() {
    for (int i = 0; i < kPhasesAhead; i++) {
      ptx::mbar_init(&published[i], 32);
      ptx::mbar_init(&finished[i], kConsumerThreads);
    }
  }
  MPK_DEVICE void publish(uint32_t row) { ptx::mbar_arrive(&published[row % kPhasesAhead]); }
  MPK_DEVICE void finish(uint32_t row) { ptx::mbar_arrive(&finished[row % kPhasesAhead]); }
  MPK_DEVICE void await_published(uint32_t row) { await(published, row); }
  MPK_DEVICE void await_finished(uint32_t row) { await(finished, row); }

 private:
  MPK_DEVICE void await(uint64_t* barriers, uint32_t row) {
    while (!ptx::mbar_test(&barriers[row % kPhasesAhead], row / kPhasesAhead & 1)) {
    }
  }
#else
  MPK_DEVICE void init() {}
  MPK_DEVICE void publish(uint32_t) {}
  MPK_DEVICE void finish(uint32_t) {}
  MPK_DEVICE void await_published(uint32_t) {}
  MPK_DEVICE void await_finished(uint32_t) {}
#endif
};

// The fixed part of dynamic shared memory. Behind it: kPhasesAhead rows of the table (kRowsOffset), staged activations
// (kStagedOffset), the ring (kRingOffset).
struct Shared : RowBarriers {
  RingState ring;
  Watchdog watchdog;
  uint32_t described;  // rows of the table that the loader has published
  uint32_t done;       // rows that consumers have finished
  uint32_t word;       // for broadcasts within the group
  alignas(16) float partials[2][(kConsumerWarps + 3) / 4 * 4];
  uint64_t run_sums[kSumsKept][kSumsOfRun];  // each below the number of the entry behind its run
  uint64_t data[2];                          // addresses of matrices that a job's own code streams, see fill_ring
  MatrixRow matrices[2];
};

// In the last warp, which shares its scheduler with fewer warps.
inline constexpr int kPollingThread = kConsumerThreads - 32;

// A job of the running phase, as tasks see it.
struct Job {
  const JobRow* row;
  const LaunchParams* params;
  uint32_t variant;  // of the row
  uint32_t first_ref = 0;

  MPK_DEVICE Job(const JobRow* row, const LaunchParams* params) : row(row), params(params), variant(row->variant) {}

  // The same job for code whose references begin at number `first`.
  MPK_DEVICE Job from(uint32_t first) const {
    Job job = *this;
    job.first_ref = first;
    return job;
  }

  MPK_DEVICE const uint64_t* refs() const { return reinterpret_cast<const uint64_t*>(row + 1) + first_ref; }
  template <class T>
  MPK_DEVICE T* pointer(int i) const {
    // As bytes: of a pointer to a struct of one byte nvcc 13.0 makes a broken call.
    uint8_t* p = reinterpret_cast<uint8_t*>(refs()[i]);
    __builtin_assume(__isGlobal(p));
    return reinterpret_cast<T*>(p);
  }
  MPK_DEVICE int32_t number(int i) const { return static_cast<int32_t>(refs()[i]); }
};

// The StreamRow of a job that streams matrices. The matrices follow it.
MPK_DEVICE const StreamRow* stream_of(const Job& job) {
  return reinterpret_cast<const StreamRow*>(job.refs() + (job.row->num_refs + job.row->num_loader_waits));
}

MPK_DEVICE const uint32_t* waits_of(const PhaseRow* phase) { return reinterpret_cast<const uint32_t*>(phase + 1); }
MPK_DEVICE const JobRow* first_job(const PhaseRow* phase) {
  constexpr uint32_t kWords = kAccessBytes / sizeof(uint32_t);
  return reinterpret_cast<const JobRow*>(waits_of(phase) + (phase->num_waits + kWords - 1) / kWords * kWords);
}
MPK_DEVICE const JobRow* next_job(const JobRow* job) {
  return reinterpret_cast<const JobRow*>(reinterpret_cast<const uint8_t*>(job) + job->bytes);
}

// The barriers of stages in shared memory: producer warps fill a stage, and the other consumer warps read it. A stage
// holds columns of x, or the rows that a split of attention needs.
struct StageBarriers {
  uint64_t full[kStages], empty[kStages];

  MPK_DEVICE void init() {
    for (int i = 0; i < kStages; i++) {
      ptx::mbar_init(&full[i], 32 * kProducerWarps);
      ptx::mbar_init(&empty[i], (kConsumerWarps - kProducerWarps) * kLanesThatArrive);
    }
  }
  // Called by a warp that has read stage `place`.
  MPK_DEVICE void release(uint32_t place, int lane) { arrive_for_warp(&empty[place], lane); }
};

// The launch, as both roles see it.
template <class Kernel>
struct Launch {
  const LaunchParams& params;
  void* const* pointers;
  Shared& shared;
  uint8_t* smem;
  uint32_t epoch;

  MPK_DEVICE uint32_t* event(uint32_t phase) const {
    return control_word(Kernel::kEventsOffset) + phase * kEventStride;
  }
  MPK_DEVICE uint32_t* ticket(uint32_t phase) const {
    return control_word(Kernel::kTicketsOffset) + phase * kEventStride;
  }
  MPK_DEVICE uint32_t event_target() const { return (epoch + 1) * Kernel::kNumWorkers; }
  MPK_DEVICE uint32_t* control_word(int64_t offset) const {
    return reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(params.control) + offset);
  }
  // The place of a row of the table in shared memory.
  MPK_DEVICE uint8_t* place_of(uint32_t row) const {
    return smem + Kernel::kRowsOffset + row % kPhasesAhead * Kernel::kRowBytes;
  }
  // The polled vectors of launches with this epoch's parity.
  MPK_DEVICE uint8_t* polled(uint32_t epoch) const {
    return static_cast<uint8_t*>(params.workspace) + Kernel::kPolledOffset + epoch % 2 * Kernel::kPolledBytes;
  }
  MPK_DEVICE StageBarriers& stages() const { return *reinterpret_cast<StageBarriers*>(smem + Kernel::kStagesOffset); }
  MPK_DEVICE const uint8_t* table() const { return static_cast<const uint8_t*>(params.table); }
};

}  // namespace mpk
