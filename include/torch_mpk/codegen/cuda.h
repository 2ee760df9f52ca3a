// Codegen for CUDA: Schedule -> one translation unit and the tables its kernel reads.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "torch_mpk/codegen/unsupported.h"
#include "torch_mpk/graph/experts.h"
#include "torch_mpk/schedule/schedule.h"

namespace mpk {

// The layout of a matrix's boxes: several blocks of 64 columns of all its rows, in the copy engine's swizzle; rows as
// they are; or 64 columns from any column on.
enum MapLayout : int64_t { kMapOfBlocks, kMapOfRows, kMapOfColumns };

// A matrix that is copied in boxes of `box_rows` rows and `box_columns` columns of 16-bit elements. Rows are `pitch`
// bytes apart. The first is `offset` bytes behind the call's pointer of number `base`, or behind the workspace
// (kWorkspaceIndex).
struct MatrixMap {
  int64_t base, offset, rows, columns, pitch, box_rows, box_columns, layout;

  using Fields = std::array<int64_t, 8>;
  Fields fields() const { return std::bit_cast<Fields>(*this); }
  static MatrixMap of(const Fields& fields) { return std::bit_cast<MatrixMap>(fields); }
};

struct CudaProgram {
  std::string source;  // includes only torch_mpk/device/*.cuh and cuda_{bf16,fp16}.h
  std::string kernel_name;
  int arch = 0;                // the compute capability to compile it for: 90 is sm_90a
  std::vector<uint8_t> table;  // read-only, copied to the device once
  int num_workers = 0;         // CTAs of the launch, all resident at once
  int num_threads = 0;         // of each
  int64_t smem_bytes = 0;      // dynamic shared memory
  int64_t workspace_bytes = 0;
  int64_t control_bytes = 0;  // Control and everything behind it
  int64_t stalls_offset = 0;  // of StallRecord[num_workers] in the control block
  int64_t stamps_offset = 0;  // of the latest launches' stamps there, see abi/control.h; 0: not profiled
  int num_phases = 0;
  int num_inputs = 0, num_outputs = 0, num_scalars = 0;
  std::vector<MatrixMap> maps;           // see LaunchParams
  std::vector<int> input_alignment;      // bytes each input's pointer must be a multiple of
  std::vector<std::string> phase_names;  // for error messages and profiles
  std::vector<int64_t> phase_bytes;      // for profiles, as are the experts that a phase chooses from
  std::vector<ExpertStack> phase_experts;
  int ranks = 1;  // of a group, see schedule/mailboxes.h, like the rest
  std::string group, exchange_key;
  int64_t mailbox_bytes = 0;
};

// `profiled`: the kernel stamps when each worker passes each phase. `named`: comments in the source describe the jobs,
// for people; kernels that differ in names alone are compiled once. Throws Unsupported naming the node if a task cannot
// be generated for the schedule's target.
CudaProgram generate_cuda(const Schedule& schedule, bool profiled = false, bool named = false);

}  // namespace mpk
