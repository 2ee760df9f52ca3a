// The threads that execute schedules: one pool per process, shared by all executables.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace mpk::cpu {

// Separates the phases of one run. Waiting threads spin, then yield, then sleep.
class SpinBarrier {
 public:
  explicit SpinBarrier(int num_threads) : num_threads_(num_threads) {}
  // Returns false when the run was aborted: the caller must leave.
  bool arrive_and_wait();
  void abort();

 private:
  const int num_threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<bool> aborted_{false};
};

// Calls fn(worker, barrier) on `num_threads` threads, of which worker 0 is the caller, and returns when all have
// returned. The first exception aborts the barrier and is rethrown here. Runs of several threads queue for the pool. A
// run inside a run (by a task's reference) may use one thread only. In the child of a fork, the pool starts anew.
void parallel_run(int num_threads, const std::function<void(int, SpinBarrier&)>& fn);
bool inside_parallel_run();
void enter_parallel_run();  // for good: this thread works for a run that it did not begin

// Processors this process may run on.
int num_available_cpus();

// How often this process was forked from one that had loaded this library. A thread that does not exist may hold a lock
// of another generation.
int fork_generation();

}  // namespace mpk::cpu
