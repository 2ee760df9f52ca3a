// A schedule in the making, which the passes (passes.h) change one after the other.
#pragma once

#include <string>
#include <vector>

#include "torch_mpk/schedule/schedule.h"

namespace mpk {

class Kernel;

// A kernel's runs. Each saves so many nanoseconds against jobs of its nodes' own.
struct TakenRuns {
  const Kernel* kernel;
  double saved_ns = 0;
};

struct Draft {
  Draft(const TBGraph& graph, const Target& target, std::vector<TakenRuns> runs = {});
  Draft(const Draft&) = delete;  // `in` and `out` point into `edges`
  Draft(Draft&&) = default;

  Schedule schedule;              // its phases are valid from pass `build_phases` on
  std::vector<Dependency> edges;  // of the graph, and by the node they end at, or begin at:
  std::vector<std::vector<const Dependency*>> in, out;
  std::vector<TakenRuns> runs;    // taken runs
  std::vector<Job> jobs;          // until they are in phases; one without a body has been merged into another
  std::vector<int> job_of;        // per node: the job with it in body or epilogue; -1: none
  std::vector<bool> is_prologue;  // per node: its readers recompute it
  std::vector<int> levels;        // per job: the phase it runs in

  const TBGraph& graph() const { return schedule.graph; }
  const Target& target() const { return schedule.target; }
  int num_nodes() const { return static_cast<int>(schedule.graph.nodes().size()); }
  const Node& node(int n) const { return schedule.graph.nodes()[n]; }
  bool is_workspace(int buffer) const { return graph().buffers()[buffer].kind == BufferKind::kWorkspace; }
  bool is_in_run(int n) const { return job_of[n] >= 0 && !jobs[job_of[n]].run.empty(); }
  // Whether the node may share a job with others like it.
  bool joins(int n) const { return !node(n).def->joined_by.empty() && !is_in_run(n); }
  // Whether pointwise tasks may take its results as they are made. Row tasks' results only if rows are many: with few
  // rows, the other operands may be polled, which takes a phase of its own.
  bool takes_epilogues(int n) const {
    return joins(n) || (node(n).def->role == Role::kRow && schedule.warps.hands_over_rows && !is_in_run(n));
  }
  // The phase that stores a node's results; -1: they are recomputed.
  int phase_of(int n) const { return job_of[n] < 0 ? -1 : levels[job_of[n]]; }

  int new_job(std::vector<int> body);
  // The nodes of a job's body and epilogue.
  std::vector<int> stored_nodes(int job) const;
  // Whether these nodes may be a job's body: one node, or several of one task with a common operand.
  bool have_same_input(const std::vector<int>& nodes) const;
  // Whether making one job of these nodes creates no cycle with the rest of the graph.
  bool contractible(const std::vector<int>& nodes) const;

  std::string to_json() const;

 private:
  // Whether `from` reaches `to` through at least one node outside the set both belong to.
  bool reaches(int from, int to, const std::vector<int>& set) const;
};

}  // namespace mpk
