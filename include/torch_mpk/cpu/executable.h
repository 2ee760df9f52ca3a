// Runs a Schedule on the CPU: persistent worker threads walk through its phases. Each has a share of every phase, and
// takes from the others' when it is done with its own: cores are slowed down by what else a machine does.
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

#include "torch_mpk/cpu/body.h"
#include "torch_mpk/cpu/exchanges.h"
#include "torch_mpk/launch_times.h"
#include "torch_mpk/schedule/schedule.h"

namespace mpk {
struct TileCode;
}

namespace mpk::cpu {

// Executes a node of a phase whose task has no CPU body; `operands` are the addresses of the node's operands, in order.
using Reference = std::function<void(const Node& node, size_t phase, std::span<uint8_t* const> operands)>;

// Elements of an input that each run must find in [0, bound), or it throws std::out_of_range with `message` and the
// element before it writes anything. Where a number of the run's counts: there are `num_elements` for each of its
// units, or so much less than `bound` is left.
struct IndexBound {
  int input = 0;  // among the run's inputs
  int64_t num_elements = 0;
  int64_t stride = 1;     // from one to the next, in elements
  int element_bytes = 8;  // 8 (int64) or 4 (int32)
  int64_t bound = 0;
  std::string message;
  int times = -1;  // among the run's scalars, as is the next; -1: none
  int less = -1;
};

class CpuExecutable {
 public:
  // num_threads 0: one per processor this process may use. isa "": the fastest tier of this machine. `compiled`: code
  // of tile tasks, by node; it must outlive this object. Throws std::invalid_argument for a fused schedule, or a node
  // its body cannot execute.
  CpuExecutable(Schedule schedule, int num_threads = 0, const std::string& isa = "",
                const std::map<int, const TileCode*>& compiled = {});

  // Throws std::invalid_argument when a pointer or scalar is missing, std::out_of_range as expect_index says. One run
  // at a time: a second caller waits; a run from within a run, by a reference, throws std::logic_error. After all else,
  // throws std::runtime_error where an integer was divided by zero.
  void run(std::span<void* const> inputs, std::span<void* const> outputs, std::span<const int64_t> scalars);

  // Throws std::invalid_argument for an input or element size that there is not.
  void expect_index(IndexBound bound);

  // Call before `run`, with the callers' lock on this object held. In a forked child, the thread that held the run lock
  // may not exist; the lock is then made anew.
  void forget_lock_of_another_process();

  // The mailboxes of a group's ranks, of which this process is number `rank`: what exchanges go through from now on,
  // and they begin anew. All ranks have run the same schedule equally often since theirs did. `watchdog_ns`: how long a
  // run waits for another rank, 0 for ever, before it throws RankLost. `look`: what is called now and then while it
  // waits, and may throw. Throws std::invalid_argument where these are not as many as the schedule says.
  void join(int rank, std::vector<uint8_t*> bases, int64_t watchdog_ns, std::function<void()> look);
  const Mailboxes& mailboxes() const { return mailboxes_; }

  // What executes the nodes of a task without a CPU body. It is called on the thread that calls `run`.
  void set_reference(const std::string& task, Reference reference);
  std::vector<std::string> missing_references() const;

  // What the runs between the two calls did when; one that throws leaves nothing.
  void start_recording();
  std::vector<LaunchTimes> stop_recording();

  // Whether nothing was written behind the scratch memory of the last worker: tile tasks say themselves how much of it
  // they need.
  bool scratch_is_intact() const;

  int num_threads() const { return num_threads_; }
  Isa isa() const { return kernels_.isa; }
  const Schedule& schedule() const { return schedule_; }
  int num_inputs() const { return num_inputs_; }
  int num_outputs() const { return num_outputs_; }

 private:
  struct Chunk {
    Body* body;
    int64_t begin, end;
  };
  // The chunks [begin, end) of a phase are one worker's share; `next` is the first that nobody has taken.
  struct alignas(64) Share {
    std::atomic<int> next{0};
    int begin = 0, end = 0;
  };
  struct PhasePlan {
    std::vector<Chunk> chunks;
    std::vector<Share> shares;            // by worker; none where the phase is too short for more than worker 0
    std::vector<const Node*> references;  // run by worker 0, and so are these, in this order on every rank
    std::vector<Body*> exchanges;

    bool parallel() const { return !shares.empty(); }
    void offer_shares(int worker, int num_workers);
  };
  struct FreeAligned {
    void operator()(uint8_t* p) const { std::free(p); }
  };

  void plan_phase(const Phase& phase, const std::map<int, const TileCode*>& compiled);
  void work(const Frame& frame, int worker, int num_workers, class SpinBarrier& barrier, PhaseTimes* times);
  void compute(const Frame& frame, size_t phase, int worker);
  void call_reference(const Frame& frame, const Node& node, size_t phase);
  void fill_frame(std::span<void* const> inputs, std::span<void* const> outputs, std::span<const int64_t> scalars);
  void move_weights();
  static std::unique_ptr<uint8_t, FreeAligned> allocate(int64_t bytes);

  Schedule schedule_;
  const Kernels& kernels_;
  int num_threads_;
  std::vector<std::unique_ptr<Body>> bodies_;
  std::vector<PhasePlan> phases_;
  Mailboxes mailboxes_;
  std::optional<Exchanges> exchanges_;           // once joined
  std::map<std::string, Reference> references_;  // of each task without a body; empty until set
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
