// The passes that make a schedule, in order. Each is a file of its name in passes/, and changes one thing of the draft.
#pragma once

#include <string>
#include <vector>

#include "draft.h"

namespace mpk {

// Decides whether warps multiply together, which limits what else jobs may do.
void choose_warps(Draft& draft);
// Joins the nodes of each run that a kernel computes in one job.
void join_runs(Draft& draft);
// Makes pointwise nodes the epilogues of nodes whose results they read, each element at one point.
void fuse_epilogues(Draft& draft);
// Groups the remaining nodes of one input into one job, whose rows form one space. Nodes with epilogues of their own
// are grouped if rows are many.
void group_nodes(Draft& draft);
// Finds row tasks whose readers recompute them: row tasks, or stream tasks that stage the row.
void find_prologues(Draft& draft);
// Moves norms of rows that many workers make, and that are only multiplied with matrices, to the end of the jobs that
// make the rows. Readers multiply by each row's factor; the rest of a norm's element depends on one element alone.
void split_norms(Draft& draft);
// Makes a job of each node that is neither in a job nor recomputed.
void make_single_jobs(Draft& draft);
// Attaches to jobs the row tasks that they recompute.
void attach_prologues(Draft& draft);
// Moves row tasks of many rows to the end of jobs whose tiles hold whole rows, such as norms and rotations of a
// prompt's heads, if that saves more than such tiles cost.
void end_with_rows(Draft& draft);
// Moves tile tasks of rows to the end of jobs that make these, where the kernel computes them row by row.
void end_with_tiles(Draft& draft);
// Assigns levels: the length of the longest chain of jobs before a job.
void assign_levels(Draft& draft);
// Makes a phase of each level's jobs, which waits for the phase before.
void build_phases(Draft& draft);
// Counts a job's tiles, which its kernel may change.
void count_tiles(Draft& draft);
// Finds buffers that exist inside a job alone, which are not stored.
void find_unstored(Draft& draft);
// Finds what the loader must await before it loads results of the launch.
void find_loader_waits(Draft& draft);
// Lays out the warps of a CTA and their ring.
void lay_out_warps(Draft& draft);
// Chooses the vectors that are polled, and thereby the phases that await no event.
void choose_handover(Draft& draft);
// Places intermediates in the workspace.
void place_workspace(Draft& draft);
// Chooses the jobs that stage their whole input.
void choose_staging(Draft& draft);
// Chooses the fastest kernel of each job, and its cut, see Kernel.
void choose_kernels(Draft& draft);
// Places what workers leave for each other.
void place_scratch(Draft& draft);
// Chooses which tiles workers draw at run time.
void deal_tiles(Draft& draft);

// Buffers and scratch begin at multiples of this in the workspace.
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
