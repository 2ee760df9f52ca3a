#include "torch_mpk/cpu/executable.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "torch_mpk/cpu/huge_pages.h"
#include "torch_mpk/cpu/thread_pool.h"

namespace mpk::cpu {
namespace {

constexpr double kMinParallelNs = 4000;  // a phase shorter than this is faster on one thread than behind a barrier
constexpr double kChunkNs = 16000;       // long beside claiming it, short beside a phase
constexpr int64_t kCanaryBytes = 65536;
constexpr uint8_t kCanary = 0xa5;

void check_indices(const IndexBound& expected, const uint8_t* elements, std::span<const int64_t> scalars) {
  const int64_t num_elements = expected.num_elements * (expected.times < 0 ? 1 : scalars[expected.times]);
  const int64_t bound = expected.bound - (expected.less < 0 ? 0 : scalars[expected.less]);
  for (int64_t i = 0; i < num_elements; i++, elements += expected.stride * expected.element_bytes) {
    int64_t index;
    if (expected.element_bytes == 8) {
      std::memcpy(&index, elements, 8);
    } else {
      int32_t narrow;
      std::memcpy(&narrow, elements, 4);
      index = narrow;
    }
    if (index < 0 || index >= bound) throw std::out_of_range(expected.message + ", got " + std::to_string(index));
  }
}

int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Records the thread that is inside a run.
class Running {
 public:
  explicit Running(std::atomic<std::thread::id>& on) : on_(on) { on_.store(std::this_thread::get_id()); }
  ~Running() { on_.store({}); }
  Running(const Running&) = delete;

 private:
  std::atomic<std::thread::id>& on_;
};

}  // namespace

CpuExecutable::CpuExecutable(Schedule schedule, int num_threads, const std::string& isa,
                             const std::map<int, const TileCode*>& compiled)
    : schedule_(std::move(schedule)),
      microkernels_(microkernels(parse_isa(isa))),
      num_threads_(num_threads == 0 ? num_available_cpus() : num_threads),
      mailboxes_(place_mailboxes(schedule_)),
      generation_(fork_generation()) {
  if (num_threads < 0)
    throw std::invalid_argument("num_threads is " + std::to_string(num_threads) +
                                ", expected 0 (all processors) or more");
  const TBGraph& graph = schedule_.graph;
  used_.resize(graph.buffers().size());
  for (const Node& node : graph.nodes()) {
    for (const Operand& operand : node.operands)
      if (operand.tensor.numel() > 0) used_[operand.tensor.buffer] = true;
    if (node.program)
      for (const Instr& instr : node.program->instrs)
        if (instr.op == Op::kSize) num_scalars_ = std::max(num_scalars_, instr.operand + 1);
  }
  for (const Buffer& buffer : graph.buffers()) {
    if (buffer.kind == BufferKind::kInput) num_inputs_ = std::max(num_inputs_, buffer.index + 1);
    if (buffer.kind == BufferKind::kOutput) num_outputs_ = std::max(num_outputs_, buffer.index + 1);
  }
  for (const Phase& phase : schedule_.phases) plan_phase(phase, compiled);
  for (const auto& kernel : kernels_) scratch_bytes_ = std::max(scratch_bytes_, round_up(kernel->scratch_bytes(), 64));
  workspace_ = allocate(schedule_.workspace_bytes);
  scratch_ = allocate(scratch_bytes_ * num_threads_ + kCanaryBytes);
  std::memset(scratch_.get() + scratch_bytes_ * num_threads_, kCanary, kCanaryBytes);
  buffers_.resize(graph.buffers().size());
  for (size_t b = 0; b < buffers_.size(); b++)
    if (schedule_.workspace_offsets[b] >= 0) buffers_[b] = workspace_.get() + schedule_.workspace_offsets[b];
}

std::unique_ptr<uint8_t, CpuExecutable::FreeAligned> CpuExecutable::allocate(int64_t bytes) {
  const int64_t alignment = bytes >= kHugePageBytes ? kHugePageBytes : 64;
  const int64_t size = round_up(std::max<int64_t>(bytes, 64), alignment);
  std::unique_ptr<uint8_t, FreeAligned> memory(static_cast<uint8_t*>(std::aligned_alloc(alignment, size)));
  if (memory == nullptr) throw std::bad_alloc();
  if (alignment == kHugePageBytes) madvise(memory.get(), size, MADV_HUGEPAGE);  // a hint: failure changes nothing
  return memory;
}

// Lays the units of all jobs of the phase end to end, weighted by cost, and cuts them into shares of chunks.
void CpuExecutable::plan_phase(const Phase& phase, const std::map<int, const TileCode*>& compiled) {
  PhasePlan plan;
  std::vector<Kernel*> kernels;
  int64_t num_units = 0;
  double total = 0;
  for (const Job& job : phase.jobs) {
    if (!job.prologue.empty() || !job.epilogue.empty() || !job.unstored.empty())
      throw std::invalid_argument("the CPU runs unfused schedules: make this one with Target(fuse=False)");
    for (int id : job.body) {
      const Node& node = schedule_.graph.nodes()[id];
      const KernelFactory* factory = KernelRegistry::global().find(*node.def);
      const auto tile = compiled.find(id);
      if (factory != nullptr || tile != compiled.end()) {
        kernels_.push_back(factory != nullptr ? (*factory)(node, microkernels_)
                                              : make_tile_kernel(node, *tile->second));
        if (is_exchange(node)) {
          plan.exchanges.push_back(kernels_.back().get());
          continue;
        }
        kernels.push_back(kernels_.back().get());
        plan.add_experts(*kernels_.back());
        num_units += kernels.back()->num_units();
        total += kernels.back()->unit_cost() * static_cast<double>(kernels.back()->num_units());
      } else {
        references_.try_emplace(node.def->name);
        plan.references.push_back(&node);
      }
    }
  }
  const int num_shares = total < kMinParallelNs ? 1 : static_cast<int>(std::clamp<int64_t>(num_units, 1, num_threads_));
  if (num_shares > 1) plan.shares = std::vector<Share>(num_shares);
  for (int w = 0; w < num_shares; w++) {
    const int first_chunk = static_cast<int>(plan.chunks.size());
    double start = 0;
    for (Kernel* kernel : kernels) {
      const double cost = std::max(kernel->unit_cost(), 1e-6);
      const auto boundary = [&](int share) -> int64_t {
        if (share == num_shares) return kernel->num_units();
        const double units = std::round((total * share / num_shares - start) / cost);
        return static_cast<int64_t>(std::clamp(units, 0.0, static_cast<double>(kernel->num_units())));
      };
      const int64_t end = boundary(w + 1), step = std::max<int64_t>(1, static_cast<int64_t>(kChunkNs / cost));
      for (int64_t begin = boundary(w); begin < end; begin += step)
        plan.chunks.push_back({kernel, begin, std::min(end, begin + step)});
      start += kernel->unit_cost() * static_cast<double>(kernel->num_units());
    }
    if (plan.parallel()) {
      plan.shares[w].begin = first_chunk;
      plan.shares[w].end = static_cast<int>(plan.chunks.size());
    }
  }
  num_experts_ = std::max(num_experts_, plan.experts.first);
  phases_.push_back(std::move(plan));
}

void CpuExecutable::PhasePlan::add_experts(const Kernel& kernel) {
  const auto [count, bytes] = kernel.experts();
  if (count == 0 || (chooses != nullptr && count != experts.first)) return;
  if (chooses == nullptr) chooses = &kernel;
  experts = {count, experts.second + bytes};
}

void CpuExecutable::PhasePlan::offer_shares(int worker, int num_workers) {
  for (size_t i = worker; i < shares.size(); i += num_workers)
    shares[i].next.store(shares[i].begin, std::memory_order_relaxed);
}

void CpuExecutable::set_reference(const std::string& task, Reference reference) {
  const auto found = references_.find(task);
  if (found == references_.end())
    throw std::invalid_argument("no node of this schedule needs a reference for task '" + task + "'");
  found->second = std::move(reference);
}

std::vector<std::string> CpuExecutable::missing_references() const {
  std::vector<std::string> missing;
  for (const auto& [task, reference] : references_)
    if (!reference) missing.push_back(task);
  return missing;
}

void CpuExecutable::join(int rank, std::vector<uint8_t*> bases, int64_t watchdog_ns, std::function<void()> look) {
  const std::lock_guard lock(*mutex_);
  if (static_cast<int>(bases.size()) != mailboxes_.ranks || rank < 0 || rank >= mailboxes_.ranks)
    throw std::invalid_argument("join: rank " + std::to_string(rank) + " of " + std::to_string(bases.size()) +
                                ", but the schedule is for " + std::to_string(mailboxes_.ranks) + " ranks");
  exchanges_.emplace(mailboxes_, rank, std::move(bases), watchdog_ns, std::move(look));
}

void CpuExecutable::expect_index(IndexBound bound) {
  if (bound.input < 0 || bound.input >= num_inputs_)
    throw std::invalid_argument("expect_index: input is " + std::to_string(bound.input) + ", expected 0 to " +
                                std::to_string(num_inputs_ - 1));
  if (bound.element_bytes != 4 && bound.element_bytes != 8)
    throw std::invalid_argument("expect_index: element_bytes is " + std::to_string(bound.element_bytes) +
                                ", expected 4 or 8");
  num_scalars_ = std::max({num_scalars_, bound.times + 1, bound.less + 1});
  index_bounds_.push_back(std::move(bound));
}

bool CpuExecutable::scratch_is_intact() const {
  const uint8_t* canary = scratch_.get() + scratch_bytes_ * num_threads_;
  return std::all_of(canary, canary + kCanaryBytes, [](uint8_t byte) { return byte == kCanary; });
}

void CpuExecutable::fill_frame(std::span<void* const> inputs, std::span<void* const> outputs,
                               std::span<const int64_t> scalars) {
  const auto check = [](const char* what, size_t got, int expected, bool more) {
    if (got == static_cast<size_t>(expected) || (more && got > static_cast<size_t>(expected))) return;
    throw std::invalid_argument("run: got " + std::to_string(got) + " " + what + ", expected " +
                                std::to_string(expected) + ", as the graph has");
  };
  check("inputs", inputs.size(), num_inputs_, false);
  check("outputs", outputs.size(), num_outputs_, false);
  check("scalars", scalars.size(), num_scalars_, true);
  const std::vector<Buffer>& list = schedule_.graph.buffers();
  for (size_t b = 0; b < list.size(); b++) {
    if (list[b].kind == BufferKind::kWorkspace) continue;
    const bool is_input = list[b].kind == BufferKind::kInput;
    void* pointer = (is_input ? inputs : outputs)[list[b].index];
    if (pointer == nullptr && used_[b])
      throw std::invalid_argument(std::string("run: ") + (is_input ? "input " : "output ") +
                                  std::to_string(list[b].index) + " ('" + list[b].name +
                                  "') has no memory: its data_ptr() is 0");
    buffers_[b] = static_cast<uint8_t*>(pointer);
  }
  for (const IndexBound& bound : index_bounds_)
    if (inputs[bound.input] != nullptr) check_indices(bound, static_cast<const uint8_t*>(inputs[bound.input]), scalars);
  scalars_.assign(scalars.begin(), scalars.end());
}

// Once, for the tensors of the first run: weights rarely move, and moving them takes longer than many steps.
void CpuExecutable::move_weights() {
  const std::vector<Buffer>& list = schedule_.graph.buffers();
  std::vector<bool> is_written(list.size());
  for (const Node& node : schedule_.graph.nodes())
    for (const Operand& operand : node.operands)
      if (operand.is_write) is_written[operand.tensor.buffer] = true;
  std::vector<std::span<const uint8_t>> weights;
  for (size_t b = 0; b < list.size(); b++)
    if (list[b].kind == BufferKind::kInput && !is_written[b] && used_[b])
      weights.emplace_back(buffers_[b], static_cast<size_t>(list[b].bytes));
  move_to_huge_pages(std::move(weights));
}

void CpuExecutable::forget_lock_of_another_process() {
  if (generation_ == fork_generation()) return;
  generation_ = fork_generation();
  mutex_.release();  // destroying a locked mutex is undefined: leak it
  mutex_ = std::make_unique<std::mutex>();
  running_on_.store({});
  for (const auto& kernel : kernels_) kernel->reset();
}

void CpuExecutable::run(std::span<void* const> inputs, std::span<void* const> outputs,
                        std::span<const int64_t> scalars) {
  if (running_on_.load() == std::this_thread::get_id())
    throw std::logic_error("run: a task's reference runs the executable it belongs to");
  std::lock_guard lock(*mutex_);
  const Running running(running_on_);
  if (const auto missing = missing_references(); !missing.empty())
    throw std::invalid_argument("task '" + missing.front() + "' has no CPU kernel: call set_reference('" +
                                missing.front() + "', fn) first");
  fill_frame(inputs, outputs, scalars);
  if (!std::exchange(weights_moved_, true)) move_weights();
  std::atomic<bool> divided_by_zero{false};
  if (mailboxes_.ranks > 1 && !exchanges_)
    throw std::invalid_argument("run: it exchanges with " + std::to_string(mailboxes_.ranks - 1) +
                                " other ranks: call join first");
  const Frame frame{buffers_.data(), scalars_.data(), &divided_by_zero, exchanges_ ? &*exchanges_ : nullptr};
  const int num_workers = inside_parallel_run() ? 1 : num_threads_;
  if (!phases_.empty()) phases_.front().offer_shares(0, 1);
  std::optional<LaunchTimes> times;
  if (recording_) times.emplace(num_threads_, phases_.size(), mailboxes_.ranks, num_experts_);
  try {
    parallel_run(num_workers, [&](int worker, SpinBarrier& barrier) {
      work(frame, worker, num_workers, barrier, times ? &*times : nullptr);
    });
  } catch (...) {
    for (const auto& kernel : kernels_) kernel->reset();
    if (exchanges_) exchanges_->abort();
    throw;
  }
  if (exchanges_) exchanges_->end_launch();
  if (divided_by_zero) throw std::runtime_error("ZeroDivisionError");  // eager's error
  if (recording_) recorded_.push_back(std::move(*times));
}

// `launch`: null if not recorded.
void CpuExecutable::work(const Frame& frame, int worker, int num_workers, SpinBarrier& barrier, LaunchTimes* launch) {
  if (phases_.empty()) return;
  PhaseTimes* times = launch == nullptr ? nullptr : launch->phases.data() + worker * phases_.size();
  if (times != nullptr) times[0].begin = times[0].joined = now_ns();
  for (size_t p = 0; p < phases_.size(); p++) {
    const PhasePlan& phase = phases_[p];
    if (times != nullptr) times[p].ready = now_ns();
    if (exchanges_ && worker == 0)  // which alone exchanges
      exchanges_->record(times == nullptr ? nullptr : times + p,
                         times == nullptr ? nullptr : launch->waited.data() + p * mailboxes_.ranks);
    compute(frame, p, worker);
    if (times != nullptr && (phase.parallel() || worker == 0)) times[p].computed = now_ns();
    if (times != nullptr && worker == 0 && phase.chooses != nullptr)
      phase.chooses->count_pairs(frame, launch->pairs.data() + p * num_experts_);
    if (p + 1 == phases_.size()) return;  // the run's end is the last phase's barrier
    if (times != nullptr) times[p + 1].begin = times[p + 1].joined = now_ns();
    phases_[p + 1].offer_shares(worker, num_workers);
    // Phases with worker 0 alone need no barrier in between.
    if (num_workers > 1 && (phase.parallel() || phases_[p + 1].parallel()) && !barrier.arrive_and_wait()) return;
  }
}

// Computes the worker's part of a phase.
void CpuExecutable::compute(const Frame& frame, size_t p, int worker) {
  uint8_t* scratch = scratch_.get() + worker * scratch_bytes_;
  const Kernel* prepared = nullptr;
  const auto run = [&](const Chunk& chunk) {
    if (std::exchange(prepared, chunk.kernel) != chunk.kernel) chunk.kernel->prepare(frame, scratch);
    chunk.kernel->run(frame, chunk.begin, chunk.end, scratch);
  };
  PhasePlan& phase = phases_[p];
  if (worker == 0) {
    for (const Node* node : phase.references) call_reference(frame, *node, p);
    for (Kernel* exchange : phase.exchanges) exchange->run(frame, 0, 1, scratch);
    if (!phase.parallel())
      for (const Chunk& chunk : phase.chunks) run(chunk);
  }
  for (size_t i = 0; i < phase.shares.size(); i++) {
    Share& share = phase.shares[(worker + i) % phase.shares.size()];
    for (int c; (c = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) run(phase.chunks[c]);
  }
}

void CpuExecutable::start_recording() {
  const std::lock_guard lock(*mutex_);
  recorded_.clear();
  recording_ = true;
}

std::vector<LaunchTimes> CpuExecutable::stop_recording() {
  const std::lock_guard lock(*mutex_);
  recording_ = false;
  return std::exchange(recorded_, {});
}

std::vector<ExpertStack> CpuExecutable::phase_experts() const {
  std::vector<ExpertStack> all;
  for (const PhasePlan& phase : phases_) all.push_back(phase.experts);
  return all;
}

void CpuExecutable::call_reference(const Frame& frame, const Node& node, size_t phase) {
  std::vector<uint8_t*> operands;
  for (const Operand& operand : node.operands) operands.push_back(Place(operand.tensor).at(frame));
  references_.at(node.def->name)(node, phase, operands);
}

}  // namespace mpk::cpu
