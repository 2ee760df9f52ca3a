// The parameters of a launch of a generated CUDA kernel: plain data, one pointer to host memory, no torch.
#pragma once

#include "torch_mpk/abi/control.h"
#include "torch_mpk/abi/layout.h"

namespace mpk {

inline constexpr int kMaxScalars = 16;         // SymInt arguments of one call
inline constexpr int kMapBytes = 128;          // a CUtensorMap
inline constexpr int kMaxLaunchBytes = 32764;  // kernel parameter space since CUDA 12.1 on sm_70 and newer

// The only kernel parameter (`const __grid_constant__`). The call's pointers follow it in the parameter block: inputs
// in TBGraph order, then outputs. `table` is read-only device memory written once, and `control` is state that survives
// from launch to launch.
struct LaunchParams {
  const void* table;  // CudaProgram::table
  uint8_t* workspace;
  Control* control;
  const void* maps;           // of the matrices in CudaProgram::maps, kMapBytes each
  uint32_t* host_abort;       // pinned host memory: set to 1 before an aborted kernel exits
  uint64_t watchdog_ns;       // abort after so long without progress; 0: wait forever
  uint32_t jitter;            // nonzero: the seed of random delays per CTA and phase, for stress tests
  uint16_t rank, ranks;       // this process's rank among those that exchange; 0 of 1: alone
  uint8_t* const* mailboxes;  // of each rank, see abi/mailboxes.h; null: alone
  int64_t scalars[kMaxScalars];
  // void* pointers[num_inputs + num_outputs];
};

static_assert(sizeof(void*) == 8 && alignof(LaunchParams) == 8);
static_assert(MPK_STANDS_AT(LaunchParams, watchdog_ns, 40) && MPK_STANDS_AT(LaunchParams, jitter, 48));
static_assert(MPK_STANDS_AT(LaunchParams, mailboxes, 56) && MPK_STANDS_AT(LaunchParams, scalars, 64) &&
              sizeof(LaunchParams) == 64 + 8 * kMaxScalars);

}  // namespace mpk
