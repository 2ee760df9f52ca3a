#include "torch_mpk/cpu/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace mpk::cpu {
namespace {

using Clock = std::chrono::steady_clock;

// A waiting thread spins, then yields its processor, then sleeps. Spinning covers a phase that is nearly done. Yielding
// costs nothing on an idle machine, and much less than spinning on a busy one. Both together last about as long as the
// time between two decode steps.
constexpr auto kSpinTime = std::chrono::microseconds(20);
constexpr auto kReadyTime = std::chrono::microseconds(100);
constexpr int kPausesPerCheck = 64;
constexpr int kMaxThreads = 4095;  // limited by the command word, beside the generation

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until word differs from old. Sleep comes last: waking a thread takes tens of microseconds.
uint32_t await_change(std::atomic<uint32_t>& word, uint32_t old) {
  const auto start = Clock::now();
  for (auto waited = Clock::duration::zero(); waited < kReadyTime; waited = Clock::now() - start) {
    for (int i = 0; i < kPausesPerCheck; i++) {
      const uint32_t now = word.load(std::memory_order_acquire);
      if (now != old) return now;
      pause();
    }
    if (waited > kSpinTime) std::this_thread::yield();
  }
  word.wait(old, std::memory_order_acquire);
  return word.load(std::memory_order_acquire);
}

class ThreadPool {
 public:
  void run(int num_threads, const std::function<void(int)>& fn) {
    std::lock_guard lock(mutex_);
    grow(num_threads);
    task_ = &fn;
    pending_.store(num_threads - 1, std::memory_order_relaxed);
    // The word names both the run and its size, so a worker outside of it reads nothing else.
    generation_ = (generation_ + 1) & 0xfffff;
    command_.store(generation_ << 12 | static_cast<uint32_t>(num_threads), std::memory_order_release);
    command_.notify_all();
    fn(0);
    uint32_t left = pending_.load(std::memory_order_acquire);
    while (left != 0) left = await_change(pending_, left);
  }

 private:
  void grow(int num_threads) {
    for (; num_workers_ < num_threads - 1; num_workers_++)
      std::thread([this, id = num_workers_ + 1, seen = command_.load()] {
        work(static_cast<uint32_t>(id), seen);
      }).detach();
  }

  void work(uint32_t id, uint32_t seen) {
    for (;;) {
      seen = await_change(command_, seen);
      if (id >= (seen & 0xfff)) continue;
      (*task_)(static_cast<int>(id));
      if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) pending_.notify_one();
    }
  }

  std::mutex mutex_;
  const std::function<void(int)>* task_ = nullptr;
  uint32_t generation_ = 0;
  int num_workers_ = 0;
  alignas(64) std::atomic<uint32_t> command_{0};
  alignas(64) std::atomic<uint32_t> pending_{0};
};

std::atomic<ThreadPool*> pool{nullptr};
std::atomic<int> generation{0};
thread_local bool inside_run = false;

// Never destroyed: its threads wait in it until the process ends. The child of a fork has no such threads, and makes
// its own.
ThreadPool& global_pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    pool.store(nullptr);
    generation.fetch_add(1);
  });
  if (registered != 0) throw std::runtime_error("cannot register the CPU runtime's fork handler");
  ThreadPool* current = pool.load();
  if (current == nullptr) {
    auto fresh = std::make_unique<ThreadPool>();
    if (pool.compare_exchange_strong(current, fresh.get())) current = fresh.release();
  }
  return *current;
}

}  // namespace

bool SpinBarrier::arrive_and_wait() {
  const uint32_t epoch = epoch_.load(std::memory_order_acquire);
  if (aborted_.load(std::memory_order_acquire)) return false;
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_acq_rel);
    epoch_.notify_all();
  } else {
    await_change(epoch_, epoch);
  }
  return !aborted_.load(std::memory_order_acquire);
}

void SpinBarrier::abort() {
  aborted_.store(true, std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_acq_rel);
  epoch_.notify_all();
}

void parallel_run(int num_threads, const std::function<void(int, SpinBarrier&)>& fn) {
  if (num_threads < 1 || num_threads > kMaxThreads)
    throw std::invalid_argument("the CPU runtime runs on 1 to " + std::to_string(kMaxThreads) + " threads, not " +
                                std::to_string(num_threads));
  SpinBarrier barrier(num_threads);
  std::exception_ptr error;
  std::once_flag first;
  const auto catching = [&](int worker) {
    const bool outer = inside_run;
    inside_run = true;
    try {
      fn(worker, barrier);
    } catch (...) {
      std::call_once(first, [&] { error = std::current_exception(); });
      barrier.abort();
    }
    inside_run = outer;
  };
  if (num_threads == 1) {
    catching(0);
  } else if (inside_run) {
    throw std::logic_error("the CPU runtime's threads are busy with the run that called this one: use one thread");
  } else {
    global_pool().run(num_threads, catching);
  }
  if (error) std::rethrow_exception(error);
}

bool inside_parallel_run() { return inside_run; }

void enter_parallel_run() { inside_run = true; }

int num_available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

int fork_generation() {
  global_pool();  // registers the handler
  return generation.load();
}

}  // namespace mpk::cpu
