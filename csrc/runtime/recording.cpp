// Reads the stamps of a profiled kernel's launches from the device, and puts them on one time axis.
#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "torch_mpk/runtime/cuda_executable.h"

namespace mpk {
namespace {

// A role's stamps in order, as cycles since its worker's beginning.
class Unwrapped {
 public:
  explicit Unwrapped(uint32_t begin) : last_(begin) {}

  // The clock wraps, but not twice between two stamps. The loader's first stamp may be slightly before the beginning.
  int64_t operator()(uint32_t stamp) {
    const uint32_t passed = stamp - std::exchange(last_, stamp);
    cycles_ += std::exchange(is_first_, false) ? static_cast<int32_t>(passed) : static_cast<int64_t>(passed);
    return cycles_;
  }

 private:
  uint32_t last_;
  int64_t cycles_ = 0;
  bool is_first_ = true;
};

// Converts cycles to nanoseconds of the shared clock, between a worker's two moments by both clocks.
struct Axis {
  int64_t begin_ns;
  double ns_per_cycle;

  int64_t duration(int64_t cycles) const { return std::llround(static_cast<double>(cycles) * ns_per_cycle); }
  int64_t operator()(int64_t cycles) const { return begin_ns + duration(cycles); }
};

// `phases` and `loaders` are a worker's. Returns how to convert its cycles.
Axis put_on_axis(const WorkerStamps& worker, const PhaseStamps* phases, const LoaderStamps* loaders,
                 std::span<PhaseTimes> times) {
  Unwrapped consumer(worker.begin), loader(worker.begin);
  const auto put = [](Unwrapped& cycles, int64_t& time, uint32_t stamp) { time = stamp == 0 ? 0 : cycles(stamp); };
  for (size_t p = 0; p < times.size(); p++) {
    PhaseTimes& t = times[p];
    put(consumer, t.begin, phases[p].begin);
    put(consumer, t.joined, phases[p].joined);
    put(consumer, t.ready, phases[p].ready);
    put(consumer, t.staged, phases[p].staged);
    put(consumer, t.computed, phases[p].computed);
    put(loader, t.load_begin, loaders[p].begin);
    put(loader, t.described, loaders[p].described);
    put(loader, t.waits, loaders[p].waits);
    put(loader, t.awaited, loaders[p].awaited);
    put(loader, t.loaded, loaders[p].loaded);
    t.loaded_bytes = loaders[p].bytes;
  }
  const double cycles = static_cast<double>(std::max<int64_t>(1, consumer(worker.end)));
  const Axis axis{static_cast<int64_t>(worker.begin_ns), static_cast<double>(worker.end_ns - worker.begin_ns) / cycles};
  for (PhaseTimes& t : times)
    for (int64_t PhaseTimes::* time : {&PhaseTimes::begin, &PhaseTimes::joined, &PhaseTimes::ready, &PhaseTimes::staged,
                                       &PhaseTimes::computed, &PhaseTimes::load_begin, &PhaseTimes::described,
                                       &PhaseTimes::waits, &PhaseTimes::awaited, &PhaseTimes::loaded})
      if (t.*time != 0) t.*time = axis(t.*time);
  return axis;
}

// Launches are counted while the stream lives, so their number wraps.
bool is_after(uint32_t launch, uint32_t other) { return static_cast<int32_t>(launch - other) > 0; }

}  // namespace

void CudaExecutable::start_recording() {
  if (stamps_offset_ == 0)
    throw std::invalid_argument("kernel " + kernel_name_ + " was not built with options={'profile': True}");
  const std::lock_guard lock(mutex_);
  collect();
  recorded_.clear();
  recording_ = true;
}

std::vector<LaunchTimes> CudaExecutable::stop_recording() {
  const std::lock_guard lock(mutex_);
  if (recording_) collect();
  recording_ = false;
  return std::exchange(recorded_, {});
}

// Makes room for the stamps of another launch.
void CudaExecutable::make_room() {
  if (num_uncollected_ == kLaunchesKept) collect();
  num_uncollected_++;
}

// Waits for all launches. The caller holds the mutex. Launches in graph captures are not recorded: nobody knows when
// they run.
void CudaExecutable::collect() {
  const cu::ContextGuard current(driver_, context_);
  const cu::RelaxedCaptureGuard relaxed(driver_);
  driver_.check(driver_.ctx_synchronize(), "cuCtxSynchronize");
  num_uncollected_ = 0;
  const auto num_phases = static_cast<int64_t>(phase_names_.size());
  const int64_t launch_bytes = launch_stamps_bytes(num_workers_, num_phases);
  const int64_t rank_bytes = rank_stamps_bytes(num_workers_, num_phases, ranks_);
  const int64_t num_experts = most_experts(phase_experts_), pair_bytes = pair_stamps_bytes(num_phases, num_experts);
  std::vector<uint8_t> bytes(kLaunchesKept * (launch_bytes + rank_bytes + pair_bytes));
  for (Lane& lane : lanes_) {
    if (lane.capture) continue;
    driver_.check(driver_.memcpy_dtoh_async(bytes.data(), lane.memory + stamps_offset_, bytes.size(), service_stream_),
                  "cuMemcpyDtoHAsync");
    driver_.check(driver_.stream_synchronize(service_stream_), "cuStreamSynchronize");
    const uint32_t before = lane.collected;
    for (int place = 0; place < kLaunchesKept; place++) {
      const uint8_t* launch = bytes.data() + place * launch_bytes;
      const auto* workers = reinterpret_cast<const WorkerStamps*>(launch);
      const uint32_t number = workers[0].launch;
      const auto is_done = [&](const WorkerStamps& worker) { return worker.launch == number; };
      if (!is_after(number, before) || !std::all_of(workers, workers + num_workers_, is_done)) continue;
      if (is_after(number, lane.collected)) lane.collected = number;
      const auto* waited =
          reinterpret_cast<const uint32_t*>(bytes.data() + kLaunchesKept * launch_bytes + place * rank_bytes);
      LaunchTimes& times = recorded_.emplace_back(num_workers_, num_phases, ranks_, num_experts);
      const auto* pairs = reinterpret_cast<const uint32_t*>(bytes.data() + kLaunchesKept * (launch_bytes + rank_bytes) +
                                                            place * pair_bytes);
      std::copy_n(pairs, times.pairs.size(), times.pairs.begin());
      const auto waits = static_cast<int64_t>(times.waited.size()) / num_workers_;  // of a worker
      for (int w = 0; w < num_workers_; w++) {
        const auto* phases = reinterpret_cast<const PhaseStamps*>(launch + phase_stamps_offset(num_workers_));
        const auto* loaders =
            reinterpret_cast<const LoaderStamps*>(launch + loader_stamps_offset(num_workers_, num_phases));
        const Axis axis = put_on_axis(workers[w], phases + w * num_phases, loaders + w * num_phases,
                                      std::span(times.phases).subspan(w * num_phases, num_phases));
        for (int64_t i = w * waits; i < (w + 1) * waits; i++) times.waited[i] = axis.duration(waited[i]);
      }
    }
  }
}

}  // namespace mpk
