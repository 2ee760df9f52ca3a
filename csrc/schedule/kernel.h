// A kernel is one way to compute the jobs of a task on a GPU: which it accepts, how it cuts them, what that costs, how
// the cut is proven, and how its code is written. A task, or a role, may have several; `choose_kernels` takes the
// cheapest. Each is a file of csrc/kernels that registers itself.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch_mpk/kernel_api.h"
#include "torch_mpk/schedule/schedule.h"

namespace mpk {

namespace codegen {
struct JobCode;
struct JobPlace;
struct SharedCode;
struct Variant;
}  // namespace codegen

// Polls of more elements delay each other; beyond this an event is cheaper.
inline constexpr int64_t kMaxPolledElements = 49152;

// What a kernel needs of the launch's warps and of its ring, where it needs more than every launch has. The warps of a
// launch are the same for all its jobs, so the pass `choose_warps` joins what its kernels demand.
struct Demands {
  int consumers = 0;       // warps; 0: as many as there are registers for
  int registers = 0;       // of each of their threads; 0: what all threads have
  int64_t slot_bytes = 0;  // of the ring; 0: what the rows of weights fill best
  bool moves_registers = false, all_read_entries = false, loads_inputs = false, hands_over_rows = false;  // WarpLayout
};

class CutProof;

class MPK_KERNEL_API Kernel {
 public:
  explicit Kernel(std::string name) : name_(std::move(name)) {}
  virtual ~Kernel() = default;
  Kernel(const Kernel&) = delete;

  // As schedules name it: "linear.rows".
  const std::string& name() const { return name_; }

  // Why it takes no job with this node, whatever else the job and its launch have; nothing where it may.
  virtual std::optional<std::string> refuses_node(const Node&, const Target&) const { return std::nullopt; }

  // Why it does not take a job of nodes that it may take; nothing where it does.
  virtual std::optional<std::string> refuses(const Schedule&, const Job&) const { return std::nullopt; }

  // Both of these.
  std::optional<std::string> refusal(const Schedule& schedule, const Job& job) const;

  // Ways to cut a job that it takes, each with its cost in nanoseconds; none where no way fits shared memory. The job
  // comes with the number of tiles and the input that a job has that nothing is known of.
  virtual std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const = 0;

  // Throws by `proof.fail` where its own fields, or what it demands of the others, do not hold.
  virtual void prove(const CutProof& proof) const = 0;

  // Throws Unsupported naming the node when the job cannot be generated.
  virtual codegen::JobCode emit(const codegen::JobPlace& place) const = 0;

  // What variants of this kernel share in a launch, if anything.
  virtual std::optional<codegen::SharedCode> share(const std::vector<codegen::Variant>& variants) const;

  // A run that begins with this node: nodes in program order, each of which depends on others of them, that the kernel
  // does in one job. Empty where there is none. Asked of kernels that are added by `add_run_kernel`; whether a launch
  // takes their runs is decided by what it costs as a whole, see choose_runs. A run is a job by itself: nothing is
  // recomputed in front of it, nothing ends it, and neither its inputs nor its results are polled.
  virtual std::vector<int> find_run(const TBGraph&, int /*first*/) const { return {}; }

  // Whether the nodes of its runs pass values on through the workspace, one node behind the other. Else what stays
  // inside a run has no place there, and no node may overwrite what another touches.
  virtual bool stores_values() const { return false; }

  // Whether jobs may have other nodes beside the one that the body begins with.
  virtual bool takes_companions() const { return false; }

  // What the passes ask before jobs are cut, of all kernels that the task has.

  // What it demands of a launch for a node that no other kernel of the task takes; nothing: it takes any launch, or
  // does not take the node.
  virtual std::optional<Demands> demands(const Node&) const { return std::nullopt; }

  // Bytes of the ring's slots, of which each has `slot_bytes`, that a launch fills for a job; 0: it has no say in that.
  virtual double filled_bytes(const Schedule&, const Job&, int64_t /*slot_bytes*/) const { return 0; }

  // Whether a job like this may end with a norm, and leave the factors of rows to those that read it (Job::epilogue),
  // and may read such rows itself.
  virtual bool splits_norms(const Schedule&, const Job&) const { return false; }

  // Whether a job like this, whose epilogues have row tasks that could be a phase of their own, may have them.
  virtual bool ends_with_rows(const Schedule&, const Job&) const { return false; }

  // Of a vector that a job that it takes brings to shared memory: the elements that each worker would poll. More than
  // kMaxPolledElements: it must not be polled.
  virtual int64_t polled_elements(const Schedule&, const Job&, const Tensor& made) const { return made.numel(); }

 private:
  const std::string name_;
};

// Where warpgroups multiply what the loader brings.
Demands of_warpgroups();

// Adds a kernel of a task, or of all tasks of a role that have none of their own. True, for a variable's initialiser.
// Throws std::logic_error where there is one of that name.
MPK_KERNEL_API bool add_kernel(const std::string& task, const Kernel& kernel);
MPK_KERNEL_API bool add_kernel(Role role, const Kernel& kernel);
// Adds one of runs of nodes.
MPK_KERNEL_API bool add_run_kernel(const Kernel& kernel);

// A task's kernels, in the order of their names. A task of tiles has its function besides, whatever kernels it has of
// its own.
std::vector<const Kernel*> kernels_of(const TaskDef& def);
// Kernels of runs.
const std::vector<const Kernel*>& run_kernels();
// A job's kernels: its run's, or those of its body's task.
std::vector<const Kernel*> kernels_of(const Schedule& schedule, const Job& job);

// Null where there is none of that name.
const Kernel* find_kernel(const std::string& name);

// Why no kernel takes a job, of which `job.others` has all that were asked.
std::string why_none(const Job& job);

// Why a graph has no kernel for one of its nodes on this target, naming the node; nothing where it has all. Kernels are
// asked as the scheduler asks them; no code is written.
std::optional<std::string> refusal(const TBGraph& graph, const Target& target);

// What a job takes that memory bounds: all that its nodes touch comes at what a worker gets of memory.
MPK_KERNEL_API double memory_ns(const Schedule& schedule, const Job& job);

// What a launch takes, as its kernels expect: its jobs, one behind the other, and the ways from phase to phase. Nothing
// where no kernel takes one of the jobs.
std::optional<double> launch_ns(const Schedule& schedule);

}  // namespace mpk
