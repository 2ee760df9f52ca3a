#include "torch_mpk/runtime/cuda_executable.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <utility>

#include "../arch/arch.h"
#include "stall_report.h"
#include "torch_mpk/abi/table.h"
#include "torch_mpk/runtime/kept_by_graphs.h"

namespace mpk {
namespace {

constexpr size_t kMaxStreams = 16;  // lanes kept for direct launches; beyond, the least recently used lane moves
constexpr size_t kMaxMaps = 4;      // sets of maps kept beside those of captures
constexpr int64_t kAlignment = 256;

static_assert(sizeof(cu::TensorMap) == kMapBytes);

int64_t round_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

uint64_t base_of(const LaunchBlock& block, const MatrixMap& matrix) {
  return matrix.base == kWorkspaceIndex ? reinterpret_cast<uint64_t>(block.params.workspace)
                                        : block.pointers[matrix.base];
}

// The executables that were captured, some of which nobody has but graphs.
struct CapturedExecutables {
  std::mutex mutex;
  std::vector<std::weak_ptr<CudaExecutable>> all;
};

CapturedExecutables& captured_executables() {
  static auto* executables = new CapturedExecutables;  // never freed: threads may end after static objects
  return *executables;
}

}  // namespace

CudaExecutable::CudaExecutable(const CudaProgram& program, const std::string& image, int device, uint64_t watchdog_ns)
    : driver_(cu::driver()),
      device_(cu::device_info(device)),
      kernel_name_(program.kernel_name),
      phase_names_(program.phase_names),
      phase_experts_(program.phase_experts),
      input_alignment_(program.input_alignment),
      matrices_(program.maps),
      num_inputs_(program.num_inputs),
      num_outputs_(program.num_outputs),
      num_scalars_(program.num_scalars),
      num_workers_(program.num_workers),
      num_threads_(program.num_threads),
      smem_bytes_(program.smem_bytes),
      workspace_bytes_(program.workspace_bytes),
      control_bytes_(program.control_bytes),
      stalls_offset_(program.stalls_offset),
      stamps_offset_(program.stamps_offset),
      watchdog_ns_(watchdog_ns),
      ranks_(program.ranks),
      group_(program.group),
      exchange_key_(program.exchange_key),
      mailbox_bytes_(program.mailbox_bytes),
      process_(getpid()) {
  const size_t num_pointers = num_inputs_ + num_outputs_;
  if (num_pointers > std::size(LaunchBlock{}.pointers) || num_scalars_ > kMaxScalars)
    throw std::invalid_argument("a launch takes at most " + std::to_string(std::size(LaunchBlock{}.pointers)) +
                                " tensors and " + std::to_string(kMaxScalars) + " sizes, this graph has " +
                                std::to_string(num_pointers) + " and " + std::to_string(num_scalars_) +
                                ": split the model into several compiled parts");
  if (input_alignment_.size() != static_cast<size_t>(num_inputs_))
    throw std::invalid_argument("CudaProgram: input_alignment has " + std::to_string(input_alignment_.size()) +
                                " entries for " + std::to_string(num_inputs_) + " inputs");
  for (int alignment : input_alignment_)
    if (alignment < 1 || (alignment & (alignment - 1)))
      throw std::invalid_argument("CudaProgram: an input alignment of " + std::to_string(alignment) +
                                  " bytes is not a power of two");
  if (stalls_offset_ + num_workers_ * static_cast<int64_t>(sizeof(StallRecord)) > control_bytes_)
    throw std::invalid_argument("CudaProgram: the control block has no room for one StallRecord a worker");
  cu::Device handle;
  driver_.check(driver_.device_get(&handle, device), "cuDeviceGet");
  driver_.check(driver_.primary_ctx_retain(&context_, handle), "cuDevicePrimaryCtxRetain");
  try {
    const cu::ContextGuard current(driver_, context_);
    const cu::RelaxedCaptureGuard relaxed(driver_);
    load(image);
    check_residency();
    driver_.check(driver_.stream_create(&service_stream_, cu::kStreamNonBlocking), "cuStreamCreate");
    void* flag = nullptr;
    driver_.check(driver_.mem_host_alloc(&flag, sizeof(uint32_t), cu::kHostAllocPortable | cu::kHostAllocDeviceMap),
                  "cuMemHostAlloc");
    host_abort_ = static_cast<uint32_t*>(flag);
    *host_abort_ = 0;
    driver_.check(driver_.mem_host_get_device_pointer(&host_abort_on_device_, flag, 0), "cuMemHostGetDevicePointer");
    if (!program.table.empty()) {
      driver_.check(driver_.mem_alloc(&table_, program.table.size()), "allocating the kernel's table");
      driver_.check(driver_.memcpy_htod_async(table_, program.table.data(), program.table.size(), service_stream_),
                    "cuMemcpyHtoDAsync");
      driver_.check(driver_.stream_synchronize(service_stream_), "cuStreamSynchronize");
    }
    spare_ = allocate();
  } catch (...) {
    release();
    throw;
  }
}

CudaExecutable::~CudaExecutable() { release(); }

void CudaExecutable::load(const std::string& image) {
  char log[4096] = {};
  int options[] = {cu::kJitErrorLogBuffer, cu::kJitErrorLogBufferSizeBytes};
  void* values[] = {log, reinterpret_cast<void*>(sizeof(log) - 1)};
  const cu::Result loaded = driver_.module_load_data_ex(&module_, image.c_str(), 2, options, values);
  const std::string where = " on " + device_.name + " (compute capability " + capability_text(device_.arch) + ")";
  driver_.check(loaded, "loading kernel " + kernel_name_ + where + (log[0] ? " [" + std::string(log) + "]" : ""));
  driver_.check(driver_.module_get_function(&function_, module_, kernel_name_.c_str()),
                "finding kernel " + kernel_name_);
  // Lazy loading would otherwise load it at the first launch, which may be inside a graph capture.
  if (driver_.func_load) driver_.check(driver_.func_load(function_), "loading kernel " + kernel_name_ + where);
  if (driver_.func_get_param_info) {
    size_t offset = 0, size = 0;
    driver_.check(driver_.func_get_param_info(function_, 0, &offset, &size), "cuFuncGetParamInfo");
    if (size != param_bytes())
      throw std::invalid_argument("kernel " + kernel_name_ + " takes " + std::to_string(size) +
                                  " bytes of parameters, a launch has " + std::to_string(param_bytes()));
  }
}

void CudaExecutable::check_residency() {
  const auto attribute = [&](int id) {
    int value = 0;
    driver_.check(driver_.func_get_attribute(&value, id, function_), "cuFuncGetAttribute");
    return value;
  };
  const int64_t static_bytes = attribute(cu::kFuncAttributeSharedSizeBytes);
  if (smem_bytes_ + static_bytes > device_.smem_optin_bytes)
    throw cu::Error("kernel " + kernel_name_ + " needs " + std::to_string(smem_bytes_) + " + " +
                    std::to_string(static_bytes) + " bytes of shared memory, " + device_.name + " has " +
                    std::to_string(device_.smem_optin_bytes) + ": compile the model for this device");
  driver_.check(driver_.func_set_attribute(function_, cu::kFuncAttributeMaxDynamicSharedSizeBytes, smem_bytes_),
                "cuFuncSetAttribute");
  // Workers wait for each other, so every one must be resident: one on each multiprocessor.
  int per_sm = 0;
  driver_.check(driver_.occupancy(&per_sm, function_, num_threads_, smem_bytes_),
                "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  if (per_sm < 1)
    throw cu::Error("kernel " + kernel_name_ + " does not fit on a multiprocessor of " + device_.name + ": " +
                    std::to_string(num_threads_) + " threads of " +
                    std::to_string(attribute(cu::kFuncAttributeNumRegs)) + " registers, " +
                    std::to_string(smem_bytes_ + static_bytes) + " bytes of shared memory");
  if (num_workers_ < 1 || num_workers_ > device_.num_sms)
    throw cu::Error("kernel " + kernel_name_ + " has " + std::to_string(num_workers_) +
                    " workers, one for each multiprocessor, but " + device_.name + " has " +
                    std::to_string(device_.num_sms) + ": compile the model for this device");
}

cu::DevicePtr CudaExecutable::allocate() {
  const cu::RelaxedCaptureGuard relaxed(driver_);
  cu::DevicePtr memory = 0;
  const int64_t bytes = round_up(control_bytes_) + workspace_bytes_;
  driver_.check(driver_.mem_alloc(&memory, bytes), "allocating " + std::to_string(bytes) + " bytes of workspace");
  try {
    driver_.check(driver_.memset_d8_async(memory, 0, bytes, service_stream_), "cuMemsetD8Async");
    driver_.check(driver_.stream_synchronize(service_stream_), "cuStreamSynchronize");
  } catch (...) {
    driver_.mem_free(memory);
    throw;
  }
  return memory;
}

cu::DevicePtr CudaExecutable::memory_of(cu::Stream stream, uint64_t capture) {
  size_t num_streams = 0;
  Lane* oldest = nullptr;
  for (Lane& lane : lanes_) {
    if (lane.stream == stream && lane.capture == capture) {
      lane.last_used = ++num_runs_;
      return lane.memory;
    }
    if (lane.capture) continue;  // belongs to its graph while this executable lives
    num_streams++;
    if (!oldest || lane.last_used < oldest->last_used) oldest = &lane;
  }
  if (!capture && num_streams >= kMaxStreams) {
    const cu::RelaxedCaptureGuard relaxed(driver_);
    driver_.check(driver_.ctx_synchronize(), "cuCtxSynchronize");  // the oldest lane's stream may no longer exist
    oldest->stream = stream;
    oldest->last_used = ++num_runs_;
    return oldest->memory;
  }
  lanes_.reserve(lanes_.size() + 1);
  cu::DevicePtr memory = capture ? std::exchange(spare_, 0) : 0;
  if (!memory) memory = allocate();
  lanes_.push_back(Lane{stream, capture, memory, ++num_runs_});
  return memory;
}

// All ranks must count launches alike, so all streams and captures share one counter, and another stream waits for the
// launches of the one before.
cu::DevicePtr CudaExecutable::memory_of_ranks(cu::Stream stream, uint64_t capture) {
  if (lanes_.empty()) {
    if (capture)
      throw cu::Error("the first launch of kernel " + kernel_name_ + " of several ranks is in a graph capture");
    lanes_.push_back(Lane{stream, 0, std::exchange(spare_, 0), 0});
  }
  Lane& only = lanes_.front();
  if (only.stream != stream && !capture) {
    driver_.check(driver_.ctx_synchronize(), "cuCtxSynchronize");
    only.stream = stream;
  }
  only.last_used = ++num_runs_;
  return only.memory;
}

// Without this the graph would launch a kernel that is unloaded, with memory that is freed.
void CudaExecutable::live_as_long_as(cu::Graph graph, uint64_t capture) {
  if (kept_for_ == capture) return;
  const cu::RelaxedCaptureGuard relaxed(driver_);
  keep_for(driver_, graph, shared_from_this());
  if (kept_for_ == 0) {
    CapturedExecutables& captured = captured_executables();
    const std::lock_guard lock(captured.mutex);
    captured.all.push_back(weak_from_this());
  }
  kept_for_ = capture;
}

void CudaExecutable::join(int rank, const std::vector<uint64_t>& mailboxes, std::shared_ptr<void> owner) {
  check_process();
  const std::lock_guard lock(mutex_);
  if (static_cast<int>(mailboxes.size()) != ranks_ || rank < 0 || rank >= ranks_)
    throw std::invalid_argument("join: rank " + std::to_string(rank) + " of " + std::to_string(mailboxes.size()) +
                                ", but the megakernel is for " + std::to_string(ranks_) + " ranks");
  const cu::ContextGuard current(driver_, context_);
  const size_t bytes = mailboxes.size() * sizeof(uint64_t);
  if (mailboxes_ == 0) driver_.check(driver_.mem_alloc(&mailboxes_, bytes), "allocating the addresses of mailboxes");
  driver_.check(driver_.ctx_synchronize(), "cuCtxSynchronize");
  driver_.check(driver_.memcpy_htod_async(mailboxes_, mailboxes.data(), bytes, service_stream_), "cuMemcpyHtoDAsync");
  for (const Lane& lane : lanes_)
    driver_.check(driver_.memset_d8_async(lane.memory, 0, round_up(control_bytes_) + workspace_bytes_, service_stream_),
                  "cuMemsetD8Async");
  driver_.check(driver_.stream_synchronize(service_stream_), "cuStreamSynchronize");
  std::atomic_ref<uint32_t>(*host_abort_).store(0, std::memory_order_release);
  owner_.swap(owner);  // what it was is dropped behind the lock, since that may wait for Python's
  rank_ = rank;
  is_torn_ = false;
}

// Weights rarely move, so the latest sets of maps are kept. Launches in flight may read theirs.
cu::DevicePtr CudaExecutable::maps_of(const LaunchBlock& block, bool captured) {
  if (matrices_.empty()) return 0;
  size_t num_free = 0;  // of captures
  Maps* oldest = nullptr;
  for (Maps& maps : maps_) {
    const auto is_there = [&](size_t i) { return maps.bases[i] == base_of(block, matrices_[i]); };
    size_t i = 0;
    while (i < matrices_.size() && is_there(i)) i++;
    if (i == matrices_.size()) {
      maps.captured |= captured;
      maps.last_used = num_runs_;
      return maps.memory;
    }
    if (maps.captured) continue;
    num_free++;
    if (!oldest || maps.last_used < oldest->last_used) oldest = &maps;
  }
  const cu::RelaxedCaptureGuard relaxed(driver_);
  if (num_free < kMaxMaps) {
    maps_.reserve(maps_.size() + 1);
    cu::DevicePtr memory = 0;
    driver_.check(driver_.mem_alloc(&memory, matrices_.size() * kMapBytes), "allocating maps of matrices");
    maps_.push_back({{}, memory, false, 0});
    oldest = &maps_.back();
  } else {
    driver_.check(driver_.ctx_synchronize(), "cuCtxSynchronize");  // launches in flight may read them
  }
  oldest->bases.clear();  // invalid if this fails
  oldest->bases.resize(matrices_.size());
  for (size_t i = 0; i < matrices_.size(); i++) oldest->bases[i] = base_of(block, matrices_[i]);
  try {
    write_maps(*oldest);
  } catch (...) {
    std::fill(oldest->bases.begin(), oldest->bases.end(), 0);
    throw;
  }
  oldest->captured = captured;
  oldest->last_used = num_runs_;
  return oldest->memory;
}

// Swizzled maps have blocks of 64 columns as their outermost dimension, so that one copy loads several of them.
void CudaExecutable::write_maps(Maps& maps) {
  std::vector<cu::TensorMap> encoded(matrices_.size());
  for (size_t i = 0; i < matrices_.size(); i++) {
    const MatrixMap& m = matrices_[i];
    const bool in_blocks = m.layout == kMapOfBlocks;
    const int64_t columns = in_blocks ? 64 : m.columns, box_columns = in_blocks ? 64 : m.box_columns;
    const uint64_t sizes[] = {static_cast<uint64_t>(columns), static_cast<uint64_t>(m.rows),
                              static_cast<uint64_t>(m.columns / columns)};
    const uint64_t strides[] = {static_cast<uint64_t>(m.pitch), static_cast<uint64_t>(in_blocks ? 128 : m.pitch)};
    const unsigned box[] = {static_cast<unsigned>(box_columns), static_cast<unsigned>(m.box_rows),
                            static_cast<unsigned>(m.box_columns / box_columns)};
    const unsigned steps[] = {1, 1, 1};
    // With narrow boxes, L2 also loads the columns beside them, which are next.
    const int promotion = m.box_columns <= 64 ? cu::kTensorMapPromotion256 : 0;
    driver_.check(
        driver_.tensor_map_encode(
            &encoded[i], cu::kTensorMapUint16, 3, reinterpret_cast<void*>(maps.bases[i] + m.offset), sizes, strides,
            box, steps, 0, m.layout == kMapOfRows ? cu::kTensorMapPlain : cu::kTensorMapSwizzle128, promotion, 0),
        "cuTensorMapEncodeTiled");
  }
  driver_.check(driver_.memcpy_htod_async(maps.memory, encoded.data(), encoded.size() * kMapBytes, service_stream_),
                "cuMemcpyHtoDAsync");
  driver_.check(driver_.stream_synchronize(service_stream_), "cuStreamSynchronize");
}

// Checked before anything is locked: in the child of a fork, the thread that held the lock may not exist.
void CudaExecutable::check_process() const {
  if (getpid() != process_)
    throw cu::Error("kernel " + kernel_name_ +
                    " was loaded by the process that this one was forked from, and CUDA does not survive fork(): start "
                    "processes with the spawn method, and compile the model in each");
}

// Stream 0 belongs to the current context. With a green context, that is not the kernel's context.
void CudaExecutable::check_stream(cu::Stream stream) const {
  if (stream != nullptr) return;
  cu::Context current = nullptr;
  driver_.ctx_get_current(&current);
  if (current == nullptr || current == context_) return;
  cu::Device device = -1;
  if (driver_.ctx_get_device(&device) == 0 && device == device_.ordinal)
    throw cu::Error("launching kernel " + kernel_name_ +
                    ": another context of the device is current, a green context perhaps, and a megakernel needs all "
                    "multiprocessors: leave that context, or launch on a stream that was made outside of it");
}

void CudaExecutable::run(LaunchBlock& block, cu::Stream stream) {
  check_process();
  check_pointers(block);
  check_stream(stream);
  const cu::ContextGuard current(driver_, context_);
  int status = cu::kCaptureStatusNone;
  uint64_t capture = 0;
  cu::Graph graph = nullptr;
  driver_.check(driver_.stream_get_capture_info(stream, &status, &capture, &graph, nullptr, nullptr),
                "cuStreamGetCaptureInfo");
  if (status == cu::kCaptureStatusNone) capture = 0;
  if (!capture) drop_released();
  const std::lock_guard lock(mutex_);
  if (aborted()) {
    if (capture)
      throw LaunchAborted(
          "an earlier launch of this megakernel was aborted, and a graph capture cannot report it: call "
          "torch_mpk.synchronize() before the capture");
    report_abort();
  }
  if (!capture && !spare_ && (ranks_ == 1 || lanes_.empty())) spare_ = allocate();

  if (recording_ && !capture) make_room();
  if (ranks_ > 1 && mailboxes_ == 0)
    throw std::invalid_argument("the megakernel exchanges with " + std::to_string(ranks_ - 1) +
                                " other ranks: call join first");
  const cu::DevicePtr memory = ranks_ > 1 ? memory_of_ranks(stream, capture) : memory_of(stream, capture);
  block.params.table = reinterpret_cast<const void*>(table_);
  block.params.workspace = reinterpret_cast<uint8_t*>(memory + round_up(control_bytes_));
  block.params.control = reinterpret_cast<Control*>(memory);
  block.params.maps = reinterpret_cast<const void*>(maps_of(block, capture != 0));
  block.params.host_abort = reinterpret_cast<uint32_t*>(host_abort_on_device_);
  block.params.watchdog_ns = watchdog_ns_;
  block.params.jitter = jitter.load(std::memory_order_relaxed);
  block.params.rank = static_cast<uint16_t>(rank_);
  block.params.ranks = static_cast<uint16_t>(mailboxes_ != 0 ? ranks_ : 1);
  block.params.mailboxes = reinterpret_cast<uint8_t* const*>(mailboxes_);
  if (capture) live_as_long_as(graph, capture);

  cu::LaunchAttribute cooperative{};
  cooperative.id = cu::kLaunchAttributeCooperative;
  cooperative.value.cooperative = 1;
  const cu::LaunchConfig config{
      .grid = {static_cast<unsigned>(num_workers_), 1, 1},
      .block = {static_cast<unsigned>(num_threads_), 1, 1},
      .shared_bytes = static_cast<unsigned>(smem_bytes_),
      .stream = stream,
      .attributes = &cooperative,
      .num_attributes = 1,
  };
  void* parameters[] = {&block};
  driver_.check(driver_.launch_kernel_ex(&config, function_, parameters, nullptr), "launching kernel " + kernel_name_);
}

cu::DevicePtr CudaExecutable::control_address(cu::Stream stream) {
  const std::lock_guard lock(mutex_);
  const cu::ContextGuard current(driver_, context_);
  return memory_of(stream, 0);
}

void CudaExecutable::check_pointers(const LaunchBlock& block) const {
  for (int i = 0; i < num_inputs_ + num_outputs_; i++) {
    const bool is_input = i < num_inputs_;
    const uint64_t pointer = block.pointers[i];
    const uint64_t alignment = is_input ? input_alignment_[i] : 1;
    if (pointer != 0 && (pointer & (alignment - 1)) == 0) continue;
    const std::string name = (is_input ? "input " : "output ") + std::to_string(is_input ? i : i - num_inputs_);
    if (pointer == 0)
      throw std::invalid_argument(name +
                                  " of the megakernel has a null address: pass a tensor with at least one element");
    throw std::invalid_argument(name + " of the megakernel: expected an address that is a multiple of " +
                                std::to_string(alignment) + " bytes, got one that is " +
                                std::to_string(pointer % alignment) +
                                " bytes past it (a slice of a larger tensor?): pass tensor.clone()");
  }
}

void CudaExecutable::check() {
  check_process();
  const std::lock_guard lock(mutex_);
  if (!aborted()) return;
  const cu::ContextGuard current(driver_, context_);
  report_abort();
}

void CudaExecutable::synchronize() {
  check_process();
  {
    const cu::ContextGuard current(driver_, context_);
    driver_.check(driver_.ctx_synchronize(), "cuCtxSynchronize");
  }
  check();
}

size_t CudaExecutable::synchronize_captured() {
  drop_released();
  std::vector<std::shared_ptr<CudaExecutable>> executables;
  {
    CapturedExecutables& captured = captured_executables();
    const std::lock_guard lock(captured.mutex);
    std::erase_if(captured.all, [&](const std::weak_ptr<CudaExecutable>& each) {
      std::shared_ptr<CudaExecutable> executable = each.lock();
      const bool is_gone = !executable;
      if (executable) executables.push_back(std::move(executable));
      return is_gone;
    });
  }
  for (const auto& executable : executables) executable->synchronize();
  return executables.size();
}

// The kernel writes the flag while other threads of this process read it.
bool CudaExecutable::aborted() const {
  return std::atomic_ref<uint32_t>(*host_abort_).load(std::memory_order_acquire) != 0;
}

// Where ranks exchange, control blocks stay aborted until `join`. A launch that were counted from 0 before that, as
// graphs may have it, might take words of an early launch of other ranks for theirs.
void CudaExecutable::report_abort() {
  const cu::RelaxedCaptureGuard relaxed(driver_);
  driver_.check(driver_.ctx_synchronize(), "waiting for an aborted megakernel");
  std::string text;
  for (Lane& lane : lanes_) {
    std::vector<uint8_t> bytes(control_bytes_);
    driver_.check(driver_.memcpy_dtoh_async(bytes.data(), lane.memory, bytes.size(), service_stream_),
                  "cuMemcpyDtoHAsync");
    driver_.check(driver_.stream_synchronize(service_stream_), "cuStreamSynchronize");
    Control control;
    std::memcpy(&control, bytes.data(), sizeof(control));
    if (!control.aborted) continue;
    lane.collected = 0;
    std::vector<StallRecord> stalls(num_workers_);
    std::memcpy(stalls.data(), bytes.data() + stalls_offset_, num_workers_ * sizeof(StallRecord));
    text += describe_stalls(stalls, phase_names_);
    if (ranks_ > 1) continue;
    driver_.check(driver_.memset_d8_async(lane.memory, 0, round_up(control_bytes_) + workspace_bytes_, service_stream_),
                  "cuMemsetD8Async");
    driver_.check(driver_.stream_synchronize(service_stream_), "cuStreamSynchronize");
  }
  std::atomic_ref<uint32_t>(*host_abort_).store(0, std::memory_order_release);
  const std::string kernel = "kernel " + kernel_name_ + " on " + device_.name;
  if (is_torn_.exchange(ranks_ > 1))
    throw LaunchAborted(
        kernel + ", which exchanges with other ranks, has not begun anew since a launch was aborted, so a " +
        "CUDA graph with it does nothing: call what was compiled on all ranks before they replay graphs");
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g", watchdog_ns_ / 1e9);
  const std::string why = " made no progress for " + std::string(seconds) + " s" +
                          (ranks_ > 1 ? ", or was told that another rank's had been aborted," : "") +
                          " and was aborted";
  const std::string next =
      ranks_ > 1 ? "Every rank must make the same calls, and replay a CUDA graph as often. The next call waits for all "
                   "ranks to come, and begins anew. Where a rank is only late, raise watchdog_seconds"
                 : "The next call runs normally. If this repeats without a debugger or other work on the device, "
                   "please report it with the files that TORCH_MPK_DUMP=<folder> leaves";
  throw LaunchAborted(kernel + why + ": the outputs of that launch, and of later ones on its stream, are not valid.\n" +
                      text + next);
}

void CudaExecutable::release() noexcept {
  if (getpid() != process_) return;
  // At exit the driver may be gone already; every call then fails, which is as good.
  cu::Context popped;
  if (driver_.ctx_push_current(context_) != 0) return;
  {
    const cu::RelaxedCaptureGuard relaxed(driver_);
    driver_.ctx_synchronize();
    for (const Lane& lane : lanes_) driver_.mem_free(lane.memory);
    for (const Maps& maps : maps_) driver_.mem_free(maps.memory);
    if (spare_) driver_.mem_free(spare_);
    if (table_) driver_.mem_free(table_);
    if (mailboxes_) driver_.mem_free(mailboxes_);
    if (host_abort_) driver_.mem_free_host(host_abort_);
    if (service_stream_) driver_.stream_destroy(service_stream_);
    if (module_) driver_.module_unload(module_);
  }
  driver_.ctx_pop_current(&popped);
  driver_.primary_ctx_release(device_.ordinal);
}

}  // namespace mpk
