// Runs a Schedule on the CPU: persistent worker threads go through its phases. Each has a share of every phase, and
// takes from other shares once its own is done, since other load slows some cores down.
#pragma once

#include <atomic>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "torch_mpk/cpu/exchanges.h"
#include "torch_mpk/cpu/kernel.h"
#include "torch_mpk/launch_times.h"
#include "torch_mpk/schedule/schedule.h"

namespace mpk {
struct TileCode;
}

namespace mpk::cpu {

// Executes a node of a phase whose task has no CPU kernel; `operands` are the addresses of the node's operands, in
// order.
using Reference = std::function<void(const Node& node, size_t phase, std::span<uint8_t* const> operands)>;

// Elements of an input that each run must find in [0, bound). Otherwise it throws std::out_of_range with `message` and
// the element, before it writes anything. With `times`, a scalar of the run counts: there are `num_elements` for each
// of its units, or so much less than `bound` is left.
struct IndexBound {
  int input = 0;  // among the run's inputs
  int64_t num_elements = 0;
  int64_t stride = 1;     // between elements, in elements
  int element_bytes = 8;  // 8 (int64) or 4 (int32)
  int64_t bound = 0;
  std::string message;
  int times = -1;  // among the run's scalars, like the next; -1: none
  int less = -1;
};

class CpuExecutable {
 public:
  // num_threads 0: one per processor this process may use. isa "": the fastest tier of this machine. `compiled`: code
  // of tile tasks, by node; it must outlive this object. Throws std::invalid_argument for a fused schedule, or a node
  // its kernel cannot execute.
  CpuExecutable(Schedule schedule, int num_threads = 0, const std::string& isa = "",
                const std::map<int, const TileCode*>& compiled = {});

  // Throws std::invalid_argument if a pointer or scalar is missing, std::out_of_range as expect_index says, and at the
  // end std::runtime_error if an integer was divided by zero. One run at a time: a second caller waits. A run within a
  // run, by a reference, throws std::logic_error.
  void run(std::span<void* const> inputs, std::span<void* const> outputs, std::span<const int64_t> scalars);

  // Throws std::invalid_argument for an unknown input or element size.
  void expect_index(IndexBound bound);

  // Call before `run`, with the callers' lock on this object held. In a forked child, the thread that held the run lock
  // may not exist. The lock is then made anew.
  void forget_lock_of_another_process();

  // Joins a group's ranks as number `rank`: exchanges use these mailboxes from now on, and begin anew. All ranks must
  // have run the schedule equally often since they joined. `watchdog_ns`: how long a run waits for another rank before
  // it throws RankLost; 0: forever. `look`: called now and then during waits; may throw. Throws std::invalid_argument
  // if the mailboxes are not as many as the schedule's ranks.
  void join(int rank, std::vector<uint8_t*> bases, int64_t watchdog_ns, std::function<void()> look);
  const Mailboxes& mailboxes() const { return mailboxes_; }
  // Whether a run has not come to its end since, so that ranks must join again.
  bool is_torn() const { return exchanges_ && exchanges_->is_aborted(); }

  // Sets what executes the nodes of a task without a CPU kernel. It is called on the thread that calls `run`.
  void set_reference(const std::string& task, Reference reference);
  std::vector<std::string> missing_references() const;

  // Records the times of the runs between the two calls; a run that throws leaves none.
  void start_recording();
  std::vector<LaunchTimes> stop_recording();
  // The experts that each phase chooses from. Where several nodes choose, the first's pairs are recorded.
  std::vector<ExpertStack> phase_experts() const;

  // Whether nothing was written behind the last worker's scratch memory: tile tasks themselves say how much of it they
  // need.
  bool scratch_is_intact() const;

  int num_threads() const { return num_threads_; }
  Isa isa() const { return microkernels_.isa; }
  const Schedule& schedule() const { return schedule_; }
  int num_inputs() const { return num_inputs_; }
  int num_outputs() const { return num_outputs_; }

 private:
  struct Chunk {
    Kernel* kernel;
    int64_t begin, end;
  };
  // The chunks [begin, end) of a phase are one worker's share; `next` is the first that nobody has taken.
  struct alignas(64) Share {
    std::atomic<int> next{0};
    int begin = 0, end = 0;
  };
  struct PhasePlan {
    std::vector<Chunk> chunks;
    std::vector<Share> shares;            // by worker; none if the phase is too short to share
    std::vector<const Node*> references;  // worker 0 runs these, too, in this order on every rank
    std::vector<Kernel*> exchanges;
    const Kernel* chooses = nullptr;  // the first of experts' products
    ExpertStack experts;

    bool parallel() const { return !shares.empty(); }
    void offer_shares(int worker, int num_workers);
    void add_experts(const Kernel& kernel);
  };
  struct FreeAligned {
    void operator()(uint8_t* p) const { std::free(p); }
  };

  void plan_phase(const Phase& phase, const std::map<int, const TileCode*>& compiled);
  void work(const Frame& frame, int worker, int num_workers, class SpinBarrier& barrier, LaunchTimes* launch);
  void compute(const Frame& frame, size_t phase, int worker);
  void call_reference(const Frame& frame, const Node& node, size_t phase);
  void fill_frame(std::span<void* const> inputs, std::span<void* const> outputs, std::span<const int64_t> scalars);
  void move_weights();
  static std::unique_ptr<uint8_t, FreeAligned> allocate(int64_t bytes);

  Schedule schedule_;
  const Microkernels& microkernels_;
  int num_threads_;
  std::vector<std::unique_ptr<Kernel>> kernels_;
  std::vector<PhasePlan> phases_;
  int64_t num_experts_ = 0;  // of the phase with most
  Mailboxes mailboxes_;
  std::optional<Exchanges> exchanges_;           // once joined
  std::map<std::string, Reference> references_;  // of each task without a kernel; empty until set
  std::vector<IndexBound> index_bounds_;
  std::vector<bool> used_;  // buffers with at least one element that some node touches
  int num_inputs_ = 0, num_outputs_ = 0, num_scalars_ = 0;
  std::unique_ptr<uint8_t, FreeAligned> workspace_;
  std::unique_ptr<uint8_t, FreeAligned> scratch_;  // one part per worker
  int64_t scratch_bytes_ = 0;
  std::vector<uint8_t*> buffers_;
  std::vector<int64_t> scalars_;
  bool weights_moved_ = false;
  bool recording_ = false;
  std::vector<LaunchTimes> recorded_;
  std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();
  std::atomic<std::thread::id> running_on_;  // the thread inside `run`
  int generation_;
};

}  // namespace mpk::cpu
