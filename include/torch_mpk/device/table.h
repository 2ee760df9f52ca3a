// The read-only table behind a kernel: what differs between two jobs that share code. Written by codegen, read on the
// device.
//
// The table starts with one row of kPhaseRowBytes per phase, then rows too long for that, then one OutputRow per
// output.
#pragma once

#include "torch_mpk/abi.h"

namespace mpk {

inline constexpr int kPhaseRowBytes = 512;  // one 16-byte load for each lane of the loader warp
inline constexpr uint32_t kWorkspaceIndex = 0xffff, kControlIndex = 0xfffe;

// A phase: PhaseRow, uint32_t waits[num_waits] padded to 16 bytes, then the jobs.
struct PhaseRow {
  uint32_t num_jobs;
  uint32_t num_waits;  // phases whose events come before this phase's computation
  uint32_t overflow;   // nonzero: the whole row stands at this byte offset of the table instead
  uint32_t publishes;  // nonzero: a loader waits for this phase, so its stores must reach the copy engine
};

// A job: JobRow, uint64_t refs[num_refs], uint32_t loader_waits[num_loader_waits] padded to 16 bytes.
struct JobRow {
  uint32_t variant;  // index of the code
  uint32_t bytes;    // of this row
  uint16_t
      rotation;  // worker w plays worker (w + rotation) mod num_workers: small jobs of a phase go to different ones
  uint16_t num_loader_waits;
  uint32_t num_refs;
};

// Which of the call's pointers (or the workspace, or the control block), and the byte offset from it.
inline constexpr uint64_t make_ref(uint32_t index, uint64_t byte_offset) {
  return (uint64_t(index) << 48) | byte_offset;
}

// A float output, filled with NaN when a launch is aborted.
struct OutputRow {
  uint64_t bytes;
  uint32_t index;    // among the call's pointers
  uint32_t element;  // bytes of one element
  uint64_t nan;      // its bits
};

}  // namespace mpk
