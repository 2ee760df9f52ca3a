#include <algorithm>
#include <cstring>

#include "expert_pairs.h"

namespace mpk::cpu {
namespace {

// Rows of x above which products use the microkernel for many rows. A row's result then depends on the number of rows,
// but not on the other rows.
constexpr int64_t kMaxFewRows = 64, kMaxManyRows = 512;
constexpr int64_t kMinColumnsPerUnit = 8, kMaxColumnsPerUnit = 32, kWantedUnits = 64, kWantedManyUnits = 16;
constexpr double kFlopsPerNs = 200;

// A unit is some columns of y for all experts, so all units have equal work, whatever was chosen.
class ExpertLinear : public Kernel {
 public:
  ExpertLinear(const Node& node, const Microkernels& microkernels) : pairs_(node) {
    const Operand &x = node.operand("x"), &y = node.operand("y");
    const Operand *weight = node.find("weight"), *transposed = node.find("transposed");
    if ((weight == nullptr) == (transposed == nullptr)) fail(node, "expected weight or transposed, and not both");
    const Operand& matrices = weight != nullptr ? *weight : *transposed;
    const DType dtype = float_dtype(node, x);
    for (const Operand* o : {&matrices, &y}) float_dtype(node, *o, &x);
    for (const Operand* o : {&x, &matrices, &y}) require_inner_stride(node, *o);
    matrices_ = View(matrices.tensor);
    element_bytes_ = size_bytes(dtype);
    depth_ = x.tensor.shape[2], num_columns_ = y.tensor.shape[2];
    is_transposed_ = transposed != nullptr;
    const int d = static_cast<int>(dtype);
    const bool is_many = x.tensor.shape[0] > kMaxFewRows && !is_transposed_ && microkernels.linear_many[d] != nullptr;
    run_ = is_transposed_ ? microkernels.linear_transposed[d]
           : is_many      ? microkernels.linear_many[d]
                          : microkernels.linear[d];
    block_ = std::min(pairs_.size(), is_many ? kMaxManyRows : static_cast<int64_t>(kLinearRowBlock));
    plan(is_many);
    x_bytes_ = round_up(block_ * depth_ * element_bytes_, 64);
    y_bytes_ = round_up(block_ * num_columns_ * element_bytes_, 64);
    scratch_bytes_ = pairs_.scratch_bytes() + x_bytes_ + y_bytes_ +
                     (is_many ? microkernels.linear_many_scratch_bytes[d](block_, depth_)
                              : microkernels.linear_scratch_bytes(block_, depth_));
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    const int64_t column = begin * columns_per_unit_, last = std::min(end * columns_per_unit_, num_columns_);
    uint8_t* own = scratch + pairs_.scratch_bytes();
    pairs_.for_each(frame, column, last, block_, scratch, [&](int64_t expert, const int32_t* pairs, int64_t count) {
      multiply(frame, expert, pairs, count, column, last, own);
    });
  }

  ExpertStack experts() const override { return pairs_.stack(); }
  void count_pairs(const Frame& frame, int64_t* pairs) const override { pairs_.count(frame, pairs); }

 private:
  void plan(bool is_many) {
    const int64_t most = is_many ? num_columns_ : kMaxColumnsPerUnit,
                  wanted = is_many ? kWantedManyUnits : kWantedUnits;
    columns_per_unit_ = std::clamp(num_columns_ / wanted / kMinColumnsPerUnit * kMinColumnsPerUnit, kMinColumnsPerUnit,
                                   std::max(most, kMinColumnsPerUnit));
    // Units read a row of a transposed weight in turns, each some whole cache lines.
    if (is_transposed_) columns_per_unit_ = round_up(columns_per_unit_, 128 / element_bytes_);
    num_units_ = pairs_.size() == 0 ? 0 : (num_columns_ + columns_per_unit_ - 1) / columns_per_unit_;
    const double elements = static_cast<double>(columns_per_unit_ * depth_);
    const double read = elements * static_cast<double>(std::min(pairs_.size(), pairs_.num_experts()) * element_bytes_);
    unit_cost_ = std::max(read / kBytesPerNs, 2 * elements * static_cast<double>(pairs_.size()) / kFlopsPerNs);
  }

  // Computes columns [column, last) of `count` pairs that chose one expert. Several rows are gathered first, since
  // microkernels take rows at one stride.
  void multiply(const Frame& frame, int64_t expert, const int32_t* pairs, int64_t count, int64_t column, int64_t last,
                uint8_t* scratch) const {
    uint8_t *x = scratch, *y = x + x_bytes_;
    const int64_t x_bytes = depth_ * element_bytes_, y_bytes = (last - column) * element_bytes_;
    const int64_t before = column * element_bytes_;  // of a row of y
    LinearArgs args = {};
    args.k = depth_, args.num_rows = count, args.end = last - column, args.scratch = y + y_bytes_;
    args.weight = matrices_.at(frame, expert, is_transposed_ ? 0 : column) + (is_transposed_ ? before : 0);
    args.weight_stride = matrices_.strides[1];
    args.x = count == 1 ? pairs_.x(frame, pairs[0]) : x;
    args.y = count == 1 ? pairs_.y(frame, pairs[0]) + before : y;
    args.x_stride = x_bytes, args.y_stride = y_bytes;
    if (count == 1) return run_(args);
    for (int64_t i = 0; i < count; i++) std::memcpy(x + i * x_bytes, pairs_.x(frame, pairs[i]), x_bytes);
    run_(args);
    for (int64_t i = 0; i < count; i++) std::memcpy(pairs_.y(frame, pairs[i]) + before, y + i * y_bytes, y_bytes);
  }

  const ExpertPairs pairs_;
  Microkernels::Linear run_;
  View matrices_;
  bool is_transposed_;
  int64_t num_columns_, depth_, element_bytes_, block_, columns_per_unit_, x_bytes_, y_bytes_;
};

[[maybe_unused]] const bool kRegistered = KernelRegistry::global().add(
    "expert_linear", [](const Node& n, const Microkernels& k) { return std::make_unique<ExpertLinear>(n, k); });

}  // namespace
}  // namespace mpk::cpu
