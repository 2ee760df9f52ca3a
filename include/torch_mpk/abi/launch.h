// What one launch of a generated CUDA kernel is given: plain data, no pointers to host memory but one, no torch.
#pragma once

#include "torch_mpk/abi/control.h"
#include "torch_mpk/abi/layout.h"

namespace mpk {

inline constexpr int kMaxScalars = 16;         // SymInt arguments of one call
inline constexpr int kMapBytes = 128;          // a CUtensorMap
inline constexpr int kMaxLaunchBytes = 32764;  // kernel parameter space since CUDA 12.1 on sm_70 and newer

// The only kernel parameter (`const __grid_constant__`), followed in the same parameter block by the call's pointers:
// inputs in TBGraph order, then outputs. Everything else is read-only device memory written once (`table`) or state
// that survives from launch to launch (`control`).
struct LaunchParams {
  const void* table;  // CudaProgram::table
  uint8_t* workspace;
  Control* control;
  const void* maps;           // of the matrices in CudaProgram::maps, kMapBytes each
  uint32_t* host_abort;       // pinned host memory: set to 1 before an aborted kernel exits
  uint64_t watchdog_ns;       // give up after so long without progress; 0 waits forever
  uint32_t jitter;            // nonzero: random delays per CTA and phase, seeded by it (stress tests)
  uint16_t rank, ranks;       // this process's among so many whose launches exchange; 0 of 1: alone
  uint8_t* const* mailboxes;  // of each rank, see abi/mailboxes.h; null: alone
  int64_t scalars[kMaxScalars];
  // void* pointers[num_inputs + num_outputs];
};

static_assert(sizeof(void*) == 8 && alignof(LaunchParams) == 8);
static_assert(MPK_STANDS_AT(LaunchParams, watchdog_ns, 40) && MPK_STANDS_AT(LaunchParams, jitter, 48));
static_assert(MPK_STANDS_AT(LaunchParams, mailboxes, 56) && MPK_STANDS_AT(LaunchParams, scalars, 64) &&
              sizeof(LaunchParams) == 64 + 8 * kMaxScalars);

}  // namespace mpk
