// What the host and a generated CUDA kernel share: plain data, no pointers to host memory, no torch.
//
// One launch gets one `LaunchParams` as its only kernel parameter (`const __grid_constant__`), followed in the same
// parameter block by the call's pointers: inputs in TBGraph order, then outputs. Everything else is read-only device
// memory written once (`table`) or state that survives from launch to launch (`control`).
#pragma once

#include <cstdint>

namespace mpk {

inline constexpr int kMaxScalars = 16;         // SymInt arguments of one call
inline constexpr int kMaxLaunchBytes = 32764;  // kernel parameter space since CUDA 12.1 on sm_70 and newer

// Written by a CTA that gives up waiting; read by the host after an aborted launch.
struct StallRecord {
  uint32_t valid;
  uint32_t phase;    // the phase the warp was in
  uint32_t role;     // 0: consumer, 1: loader
  uint32_t waiting;  // what for: 0 event, 1 full ring slot, 2 free ring slot, 3 the loader's progress, 4 what it polls
  uint32_t event;    // phase whose event it waited for, or ring slot, or where it polls the phase it was in
  uint32_t seen;
  uint32_t expected;
  uint32_t entry;  // ring entry or tile the warp had reached
};

// What a worker of a profiled kernel writes of each phase, in cycles of its multiprocessor's clock (which wraps).
struct PhaseStamps {
  uint32_t begin;     // came to the phase
  uint32_t joined;    // all warps of the worker were done with the phase before
  uint32_t ready;     // the phase's events had been seen
  uint32_t staged;    // the activations stood in shared memory; 0 where a task does not say
  uint32_t computed;  // one warp was done
};

// Device memory, one per executable and stream, zeroed with the workspace by the host when created and after an aborted
// launch.
// Followed by: uint32_t events[num_phases] (one per 32 bytes), uint32_t tickets[num_phases] (one per 32 bytes),
// StallRecord stalls[num_workers], and, where the kernel is profiled, PhaseStamps stamps[num_workers][num_phases].
struct Control {
  uint32_t epoch;    // launches completed; the last CTA to exit increments it
  uint32_t exited;   // CTAs of the running launch that have exited
  uint32_t aborted;  // a CTA gave up; all others leave as soon as they see it
  uint32_t started;  // CTAs of the running launch that run, or have
};

struct LaunchParams {
  const void* table;  // CudaProgram::table
  uint8_t* workspace;
  Control* control;
  uint32_t* host_abort;  // pinned host memory: set to 1 before an aborted kernel exits
  uint64_t watchdog_ns;  // give up after so long without progress; 0 waits forever
  uint32_t jitter;       // nonzero: random delays per CTA and phase, seeded by it (stress tests)
  uint32_t reserved;
  int64_t scalars[kMaxScalars];
  // void* pointers[num_inputs + num_outputs];
};

}  // namespace mpk
