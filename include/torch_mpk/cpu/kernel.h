// A kernel executes one node of the task graph on the CPU.
//
// Its work is cut into units, which any thread may take. A unit's results, and the order of its sums, depend on the
// node alone, so any number of threads gives the same bits.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "torch_mpk/cpu/microkernels.h"
#include "torch_mpk/graph/experts.h"

namespace mpk {
struct TileCode;
}

namespace mpk::cpu {

class Exchanges;

// A run's state: the buffers' addresses, the call's scalars, the flag of a division by zero, and the exchanges with
// other ranks, if any.
struct Frame {
  uint8_t* const* buffers;
  const int64_t* scalars;
  std::atomic<bool>* divided_by_zero;
  Exchanges* exchanges = nullptr;
};

// An operand's place: resolved against the frame of each run.
struct Place {
  int buffer = -1;
  int64_t offset_bytes = 0;

  Place() = default;
  explicit Place(const Tensor& t) : buffer(t.buffer), offset_bytes(t.offset * size_bytes(t.dtype)) {}
  explicit operator bool() const { return buffer >= 0; }
  uint8_t* at(const Frame& frame) const { return buffer < 0 ? nullptr : frame.buffers[buffer] + offset_bytes; }
};

// An operand with its byte strides.
struct View {
  Place place;
  int64_t strides[4] = {};

  View() = default;
  explicit View(const Tensor& t) : place(t) {
    for (size_t d = 0; d < t.strides.size(); d++) strides[d] = t.strides[d] * size_bytes(t.dtype);
  }
  explicit operator bool() const { return static_cast<bool>(place); }
  uint8_t* at(const Frame& frame, int64_t i, int64_t j = 0, int64_t k = 0) const {
    return place.at(frame) + i * strides[0] + j * strides[1] + k * strides[2];
  }
};

class Kernel {
 public:
  virtual ~Kernel() = default;
  // Leaves in scratch what all units need. Each thread calls it before run, and need not again until another kernel has
  // had its scratch, or the launch ends.
  virtual void prepare(const Frame&, uint8_t* /*scratch*/) {}

  // Computes units [begin, end). `scratch`: the calling thread's own, of scratch_bytes(), aligned to 64 bytes.
  virtual void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) = 0;

  // Called after an aborted run: forgets what its units left behind.
  virtual void reset() {}

  // The experts that it chooses from, and for a recording, how many pairs of a row and a choice chose each of them.
  virtual ExpertStack experts() const { return {}; }
  virtual void count_pairs(const Frame&, int64_t* /*pairs*/) const {}

  int64_t num_units() const { return num_units_; }
  double unit_cost() const { return unit_cost_; }  // nanoseconds on one thread, roughly: balances the threads
  int64_t scratch_bytes() const { return scratch_bytes_; }

 protected:
  int64_t num_units_ = 1;
  double unit_cost_ = 0;
  int64_t scratch_bytes_ = 0;
};

// What one core moves or computes, for unit_cost.
inline constexpr double kBytesPerNs = 16;
inline constexpr double kPointsPerNs = 2;

using KernelFactory = std::function<std::unique_ptr<Kernel>(const Node&, const Microkernels&)>;

// Kernels by task name; programs (roles pointwise and reduce) have one kernel for all.
class KernelRegistry {
 public:
  static KernelRegistry& global();
  bool add(const std::string& task, KernelFactory factory);  // returns true, for use in a static initialiser
  const KernelFactory* find(const TaskDef& def) const;       // nullptr when the task has no kernel

 private:
  std::map<std::string, KernelFactory> factories_;
};

// The kernel of a tile task whose code was compiled for this node.
std::unique_ptr<Kernel> make_tile_kernel(const Node& node, const TileCode& code);

// Throws std::invalid_argument: "<task> (<label>): <what>".
[[noreturn]] void fail(const Node& node, const std::string& what);

// The operand's dtype, which must be one of the floating types; with `like`, that operand's dtype.
DType float_dtype(const Node& node, const Operand& operand, const Operand* like = nullptr);

// Requires the operand's last dimension to have stride 1 (or at most one element).
void require_inner_stride(const Node& node, const Operand& operand);

// Counts the units of a result. The last to arrive combines their partial results, in a fixed order.
class Arrivals {
 public:
  Arrivals(int64_t num_results, int64_t num_units) : counts_(num_results), num_units_(num_units) {}
  bool is_last(int64_t result) {
    if (num_units_ == 1) return true;
    if (counts_[result].fetch_add(1, std::memory_order_acq_rel) + 1 < num_units_) return false;
    counts_[result].store(0, std::memory_order_relaxed);
    return true;
  }
  void reset() {
    for (auto& count : counts_) count.store(0, std::memory_order_relaxed);
  }

 private:
  std::vector<std::atomic<int64_t>> counts_;
  int64_t num_units_;
};

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace mpk::cpu
