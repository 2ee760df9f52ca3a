// Planners decide what only a task knows of its jobs on a GPU: how they are cut. One for each task, or role, that has
// something to decide (tasks/, roles/). The passes ask them; codegen only writes down what they decided.
#pragma once

#include "../graph/by_task.h"
#include "torch_mpk/schedule/schedule.h"

namespace mpk {

// Polls of more elements delay each other; beyond this an event is cheaper.
inline constexpr int64_t kMaxPolledElements = 49152;

class Planner {
 public:
  virtual ~Planner() = default;

  // Whether warps must multiply together for the node, as warpgroups; those of the whole kernel then do.
  virtual bool needs_warpgroups(const Node&) const { return false; }

  // Bytes of the ring's slots, of which each has `slot_bytes`, that a launch fills for a job; 0: it has no say in that.
  virtual double filled_bytes(const Schedule&, const Job&, int64_t /*slot_bytes*/) const { return 0; }

  // Whether a job like this may end with a norm, and leave the factors of rows to those that read it (Job::epilogue),
  // and may read such rows itself.
  virtual bool splits_norms(const Schedule&, const Job&) const { return false; }

  // Whether a job like this, whose epilogues have row tasks that could be a phase of their own, may have them.
  virtual bool ends_with_rows(const Schedule&, const Job&) const { return false; }

  // Of a vector that the job brings to shared memory: the elements that each worker would poll.
  virtual int64_t polled_elements(const Schedule&, const Job&, const Tensor& made) const { return made.numel(); }

  // Cuts the job: its tiles, what it stages, its pieces. A job whose code cannot be generated may stay as it is:
  // codegen says why.
  virtual void cut(const Schedule& schedule, Job& job) const = 0;
};

// To which planners add themselves.
ByTask<Planner>& planners();

// Of the job's body; null where its task has none.
const Planner* planner_of(const Schedule& schedule, const Job& job);

}  // namespace mpk
