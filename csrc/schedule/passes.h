// The passes that make a schedule, in order. Each is a file of its name in passes/, and does one thing to the draft.
#pragma once

#include <string>
#include <vector>

#include "draft.h"

namespace mpk {

// Whether warps multiply together: what a job may do besides depends on it.
void choose_warps(Draft& draft);
// Nodes that a kernel of runs does in one job become one.
void join_runs(Draft& draft);
// Pointwise nodes become the epilogues of nodes whose results they read, each element at one point.
void fuse_epilogues(Draft& draft);
// The remaining nodes of one input become one job: their rows form one space. So do those with epilogues of their own,
// where rows are many.
void group_nodes(Draft& draft);
// Row tasks read only by row tasks, or by stream tasks as the operand those stage in shared memory, are recomputed by
// each reader.
void find_prologues(Draft& draft);
// Norms of rows that many workers make, and that only matrices are multiplied with, end the jobs that make the rows:
// beyond a factor for each row, which is left to those, an element of the norm is one of the row.
void split_norms(Draft& draft);
// What is neither in a job nor recomputed becomes a job of its own.
void make_single_jobs(Draft& draft);
// Jobs get the row tasks that they recompute.
void attach_prologues(Draft& draft);
// Row tasks of many rows end the jobs whose tiles hold their rows whole, such as norms and rotations of a prompt's
// heads those that make queries and keys, where that spares more than such tiles cost.
void end_with_rows(Draft& draft);
// A job's level is the length of the longest chain of jobs before it.
void assign_levels(Draft& draft);
// The jobs of a level become a phase, which waits for the one before it.
void build_phases(Draft& draft);
// How many tiles a job has, unless its kernel cuts it otherwise.
void count_tiles(Draft& draft);
// Buffers that exist only inside a job are not written to memory.
void find_unstored(Draft& draft);
// The loader waits for what the launch computes before it loads that.
void find_loader_waits(Draft& draft);
// The warps of a CTA and their ring.
void lay_out_warps(Draft& draft);
// Which vectors are polled, and which phases therefore wait for no event.
void choose_handover(Draft& draft);
// Where intermediates live.
void place_workspace(Draft& draft);
// Which jobs bring their whole input to shared memory.
void choose_staging(Draft& draft);
// Each job gets the kernel that takes the least time for it, and is cut as that asks for, see Kernel.
void choose_kernels(Draft& draft);
// Where workers leave things for each other.
void place_scratch(Draft& draft);
// Which tiles workers draw at run time.
void deal_tiles(Draft& draft);

// Buffers, and what jobs leave, begin at multiples of this in the workspace.
inline constexpr int64_t kWorkspaceAlignment = 256;

struct Pass {
  const char* name;
  void (*run)(Draft&);
  bool (*applies)(const Target&);
};

const std::vector<Pass>& passes();

// Runs the passes that apply to the target, up to and including the one named, or all.
Draft make_draft(const TBGraph& graph, const Target& target, const std::string& last_pass = "");

}  // namespace mpk
