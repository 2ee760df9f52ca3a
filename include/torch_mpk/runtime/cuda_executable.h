// A megakernel loaded on one device, and its launches.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "torch_mpk/abi/launch.h"
#include "torch_mpk/codegen/cuda.h"
#include "torch_mpk/launch_times.h"
#include "torch_mpk/runtime/driver.h"

namespace mpk {

// The kernel's watchdog aborted a launch. what(): which worker waited for what.
struct LaunchAborted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The kernel's only parameter. The caller of `run` fills in scalars and pointers, `run` the rest.
struct LaunchBlock {
  LaunchParams params;
  uint64_t pointers[(kMaxLaunchBytes - sizeof(LaunchParams)) / sizeof(uint64_t)];  // inputs, then outputs
};

// Launches are asynchronous, from any thread, on any stream of the device. Each stream has a workspace and a control
// block of its own. So has each stream of each graph capture, because a captured launch may run beside any other. A
// destroyed stream must have finished its work before another gets its handle. Graphs that launch it share in it, and
// it must be a shared_ptr's.
class CudaExecutable : public std::enable_shared_from_this<CudaExecutable> {
 public:
  // Loads `image` (a cubin, or PTX text) and allocates everything a launch needs. `watchdog_ns` 0: wait forever.
  // Throws cu::Error when there is no driver, when the image does not load, or when the workers do not all fit on the
  // device at once; std::invalid_argument when the program and the image do not belong together.
  CudaExecutable(const CudaProgram& program, const std::string& image, int device, uint64_t watchdog_ns);
  ~CudaExecutable();
  CudaExecutable(const CudaExecutable&) = delete;
  CudaExecutable& operator=(const CudaExecutable&) = delete;

  int num_inputs() const { return num_inputs_; }
  int num_outputs() const { return num_outputs_; }
  int num_scalars() const { return num_scalars_; }
  const std::vector<std::string>& phase_names() const { return phase_names_; }

  // The number of ranks that exchange, by the program.
  int ranks() const { return ranks_; }
  const std::string& group() const { return group_; }
  const std::string& exchange_key() const { return exchange_key_; }
  int64_t mailbox_bytes() const { return mailbox_bytes_; }
  // From now on, launches exchange through these mailboxes, and are counted anew. No rank may have a launch in flight.
  // `owner`: what the mailboxes live as long as; this executable keeps it. Throws std::invalid_argument if the
  // mailboxes are not as many as the program's ranks.
  void join(int rank, const std::vector<uint64_t>& mailboxes, std::shared_ptr<void> owner);
  // Whether an abort was reported since, so that ranks must join again.
  bool is_torn() const { return is_torn_; }

  // Throws std::invalid_argument for a pointer that is null or not aligned; LaunchAborted if an earlier launch was
  // aborted (this launch is then not made, and the next may be); cu::Error if the driver refuses, or in the child of a
  // fork.
  void run(LaunchBlock& block, cu::Stream stream);

  const std::vector<ExpertStack>& phase_experts() const { return phase_experts_; }
  bool is_profiled() const { return stamps_offset_ != 0; }
  // For profiled programs: the stamps of the launches between the two calls, in any order, without graphs' launches and
  // aborted ones. Both calls wait for all launches, and in between every kLaunchesKept'th launch does. Throws
  // std::invalid_argument if the program is not profiled.
  void start_recording();
  std::vector<LaunchTimes> stop_recording();

  // Throws LaunchAborted when a launch was aborted since the last call. Does not wait for launches in flight.
  void check();

  // Waits for the launches of all executables that are in a graph, and of those that were; frees what graphs kept that
  // are gone. Throws as `check` does. Returns how many such executables there still are.
  static size_t synchronize_captured();

  std::atomic<uint32_t> jitter{0};  // see LaunchParams

  // The device address of the control block that launches on `stream` use, for tests that damage it.
  cu::DevicePtr control_address(cu::Stream stream);

 private:
  struct Lane {
    cu::Stream stream;
    uint64_t capture;      // id of the graph capture; 0 for launches made directly
    cu::DevicePtr memory;  // the control block, then the workspace
    uint64_t last_used;
    uint32_t collected = 0;  // number behind the latest launch whose stamps were read
  };

  // The maps of a launch's matrices, on the device.
  struct Maps {
    std::vector<uint64_t> bases;  // of the matrices, see MatrixMap
    cu::DevicePtr memory;
    bool captured;  // belongs to a graph while this executable lives
    uint64_t last_used;
  };

  size_t param_bytes() const { return sizeof(LaunchParams) + (num_inputs_ + num_outputs_) * sizeof(uint64_t); }
  void load(const std::string& image);
  void check_residency();
  void check_process() const;
  void check_pointers(const LaunchBlock& block) const;
  void check_stream(cu::Stream stream) const;
  cu::DevicePtr allocate();
  cu::DevicePtr memory_of(cu::Stream stream, uint64_t capture);
  cu::DevicePtr memory_of_ranks(cu::Stream stream, uint64_t capture);
  void live_as_long_as(cu::Graph graph, uint64_t capture);
  void synchronize();
  void make_room();
  void collect();
  cu::DevicePtr maps_of(const LaunchBlock& block, bool captured);
  void write_maps(Maps& maps);
  bool aborted() const;
  [[noreturn]] void report_abort();
  void release() noexcept;

  const cu::Driver& driver_;
  const cu::DeviceInfo device_;
  const std::string kernel_name_;
  const std::vector<std::string> phase_names_;
  const std::vector<ExpertStack> phase_experts_;
  const std::vector<int> input_alignment_;
  const std::vector<MatrixMap> matrices_;
  const int num_inputs_, num_outputs_, num_scalars_, num_workers_, num_threads_;
  const int64_t smem_bytes_, workspace_bytes_, control_bytes_, stalls_offset_, stamps_offset_;
  const uint64_t watchdog_ns_;
  const int ranks_;
  const std::string group_, exchange_key_;
  const int64_t mailbox_bytes_;
  const pid_t process_;  // which loaded it

  std::mutex mutex_;  // of everything below; never held by a thread that waits for Python's lock
  cu::Context context_ = nullptr;
  cu::Module module_ = nullptr;
  cu::Function function_ = nullptr;
  cu::Stream service_stream_ = nullptr;  // for the host's own copies
  cu::DevicePtr table_ = 0;
  cu::DevicePtr mailboxes_ = 0;  // the mailboxes' addresses, once joined
  std::shared_ptr<void> owner_;  // of the mailboxes
  std::atomic<bool> is_torn_{false};
  int rank_ = 0;
  uint32_t* host_abort_ = nullptr;
  cu::DevicePtr host_abort_on_device_ = 0;
  cu::DevicePtr spare_ = 0;  // for a capture, which should allocate nothing
  std::vector<Lane> lanes_;
  std::vector<Maps> maps_;
  uint64_t num_runs_ = 0;
  uint64_t kept_for_ = 0;  // id of the latest capture whose graph keeps this executable
  bool recording_ = false;
  int num_uncollected_ = 0;  // launches recorded, but not read yet
  std::vector<LaunchTimes> recorded_;
};

}  // namespace mpk
