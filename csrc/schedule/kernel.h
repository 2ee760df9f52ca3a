// A kernel is one way to compute a task's jobs on a GPU: which jobs it accepts, how it cuts them, the cost, the proof
// of the cut, and the code. A task, or a role, may have several; `choose_kernels` takes the cheapest. Each is a file of
// csrc/kernels that registers itself.
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

// More polls than this delay each other, and an event is cheaper.
inline constexpr int64_t kMaxPolledElements = 49152;

// A kernel's demands on the launch's warps and ring, beyond the default. All jobs of a launch share its warps, so
// the pass `choose_warps` joins its kernels' demands.
struct Demands {
  int consumers = 0;       // warps; 0: as many as registers allow
  int registers = 0;       // of each of their threads; 0: the default
  int64_t slot_bytes = 0;  // of the ring; 0: what weight rows fill best
  bool moves_registers = false, all_read_entries = false, loads_inputs = false, hands_over_rows = false;  // WarpLayout
};

class CutProof;

class MPK_KERNEL_API Kernel {
 public:
  explicit Kernel(std::string name) : name_(std::move(name)) {}
  virtual ~Kernel() = default;
  Kernel(const Kernel&) = delete;

  // The name in schedules: "linear.rows".
  const std::string& name() const { return name_; }

  // Why it refuses every job with this node, in any launch; nothing if it may accept one.
  virtual std::optional<std::string> refuses_node(const Node&, const Target&) const { return std::nullopt; }

  // Why it refuses a job whose nodes it accepts; nothing if it accepts the job.
  virtual std::optional<std::string> refuses(const Schedule&, const Job&) const { return std::nullopt; }

  // Both of these.
  std::optional<std::string> refusal(const Schedule& schedule, const Job& job) const;

  // The ways to cut a job that it accepts, each with its cost in nanoseconds; none if none fits shared memory. The job
  // comes with the default number of tiles and input.
  virtual std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const = 0;

  // Throws by `proof.fail` if its fields, or its demands on other fields, do not hold.
  virtual void prove(const CutProof& proof) const = 0;

  // Throws Unsupported naming the node when the job cannot be generated.
  virtual codegen::JobCode emit(const codegen::JobPlace& place) const = 0;

  // The code that variants of this kernel share in a launch, if any.
  virtual std::optional<codegen::SharedCode> share(const std::vector<codegen::Variant>& variants) const;

  // A run that begins with this node: nodes in program order, each dependent on others of them, that the kernel
  // computes in one job. Empty if there is none. Called for kernels added by `add_run_kernel`. Whether a launch takes
  // their runs depends on the whole launch's cost, see choose_runs. A run is a job by itself: it has no prologue and no
  // epilogue, and neither its inputs nor its results are polled.
  virtual std::vector<int> find_run(const TBGraph&, int /*first*/) const { return {}; }

  // Whether the nodes of its runs pass values on through the workspace, in sequence. Otherwise values inside a run have
  // no place there, and no node may overwrite what another touches.
  virtual bool stores_values() const { return false; }

  // Whether jobs may have nodes beside the body's first.
  virtual bool takes_companions() const { return false; }

  // Questions of passes before jobs are cut, to all kernels of the task.

  // Its demands on a launch for a node that no other kernel of the task accepts; nothing: any launch will do, or it
  // refuses the node.
  virtual std::optional<Demands> demands(const TBGraph&, const Node&) const { return std::nullopt; }

  // The bytes of ring slots, each of `slot_bytes`, that a launch fills for a job; 0: no say.
  virtual double filled_bytes(const Schedule&, const Job&, int64_t /*slot_bytes*/) const { return 0; }

  // Whether such a job may end with a norm that leaves the rows' factors to its readers (Job::epilogue), and may read
  // such rows itself.
  virtual bool splits_norms(const Schedule&, const Job&) const { return false; }

  // Whether such a job may have row tasks in its epilogue that could be a phase of their own.
  virtual bool ends_with_rows(const Schedule&, const Job&) const { return false; }

  // Whether such a job may have the tile tasks in its epilogue: it computes them for each row that it makes.
  virtual bool ends_with_tiles(const Schedule&, const Job&) const { return false; }

  // The elements of a staged vector that each worker would poll, for a job that it accepts. More than
  // kMaxPolledElements: it must not be polled.
  virtual int64_t polled_elements(const Schedule&, const Job&, const Tensor& made) const { return made.numel(); }

 private:
  const std::string name_;
};

// The demands of kernels whose warpgroups multiply what the loader copies.
Demands of_warpgroups();

// Adds a kernel of a task, or of all tasks of a role without kernels of their own. Returns true, for a variable's
// initialiser. Throws std::logic_error if the name is taken.
MPK_KERNEL_API bool add_kernel(const std::string& task, const Kernel& kernel);
MPK_KERNEL_API bool add_kernel(Role role, const Kernel& kernel);
// Adds a kernel of runs of nodes.
MPK_KERNEL_API bool add_run_kernel(const Kernel& kernel);

// A task's kernels, by name. A tile task has its function besides.
std::vector<const Kernel*> kernels_of(const TaskDef& def);
// Kernels of runs.
const std::vector<const Kernel*>& run_kernels();
// A job's kernels: its run's, or those of its body's task.
std::vector<const Kernel*> kernels_of(const Schedule& schedule, const Job& job);

// Null if there is none of that name.
const Kernel* find_kernel(const std::string& name);

// Why no kernel accepts a job. `job.others` has each kernel's reason.
std::string why_none(const Job& job);

// Why a graph has no kernel for one of its nodes on this target, naming the node; nothing if it has all. It asks as the
// scheduler does, and writes no code.
std::optional<std::string> refusal(const TBGraph& graph, const Target& target);

// The time of a job bound by memory: all that its nodes touch, at a worker's share of the bandwidth.
MPK_KERNEL_API double memory_ns(const Schedule& schedule, const Job& job);

// The expected time of a launch: its jobs in sequence, and the hops between phases. Nothing if a job has no kernel.
std::optional<double> launch_ns(const Schedule& schedule);

}  // namespace mpk
