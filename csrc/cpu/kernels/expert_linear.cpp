#include <algorithm>
#include <cstring>

#include "torch_mpk/cpu/kernel.h"

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
  ExpertLinear(const Node& node, const Microkernels& microkernels) {
    const Operand &x = node.operand("x"), &ids = node.operand("ids"), &y = node.operand("y");
    const Operand *weight = node.find("weight"), *transposed = node.find("transposed");
    if ((weight == nullptr) == (transposed == nullptr)) fail(node, "expected weight or transposed, and not both");
    const Operand& matrices = weight != nullptr ? *weight : *transposed;
    const DType dtype = float_dtype(node, x);
    for (const Operand* o : {&matrices, &y}) float_dtype(node, *o, &x);
    if (ids.tensor.dtype != DType::kI64)
      fail(node, "ids is " + std::string(info(ids.tensor.dtype).name) + ", expected int64");
    for (const Operand* o : {&x, &matrices, &y}) require_inner_stride(node, *o);
    x_ = View(x.tensor), ids_ = View(ids.tensor), matrices_ = View(matrices.tensor), y_ = View(y.tensor);
    element_bytes_ = size_bytes(dtype);
    num_choices_ = x.tensor.shape[1], depth_ = x.tensor.shape[2];
    num_pairs_ = x.tensor.shape[0] * num_choices_;
    num_experts_ = matrices.tensor.shape[0], num_columns_ = y.tensor.shape[2];
    is_transposed_ = transposed != nullptr;
    const int d = static_cast<int>(dtype);
    const bool is_many = x.tensor.shape[0] > kMaxFewRows && !is_transposed_ && microkernels.linear_many[d] != nullptr;
    run_ = is_transposed_ ? microkernels.linear_transposed[d]
           : is_many      ? microkernels.linear_many[d]
                          : microkernels.linear[d];
    block_ = std::min(num_pairs_, is_many ? kMaxManyRows : static_cast<int64_t>(kLinearRowBlock));
    plan(is_many);
    order_bytes_ = round_up((num_experts_ + num_pairs_) * static_cast<int64_t>(sizeof(int32_t)), 64);
    x_bytes_ = round_up(block_ * depth_ * element_bytes_, 64);
    y_bytes_ = round_up(block_ * num_columns_ * element_bytes_, 64);
    scratch_bytes_ = order_bytes_ + x_bytes_ + y_bytes_ +
                     (is_many ? microkernels.linear_many_scratch_bytes[d](block_, depth_)
                              : microkernels.linear_scratch_bytes(block_, depth_));
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    auto* ends = reinterpret_cast<int32_t*>(scratch);
    int32_t* order = ends + num_experts_;
    const int64_t column = begin * columns_per_unit_, last = std::min(end * columns_per_unit_, num_columns_);
    sort_pairs(frame, ends, order, column, last);
    int32_t first = 0;
    for (int64_t expert = 0; expert < num_experts_; first = ends[expert++])
      for (int64_t i = first; i < ends[expert]; i += block_)
        multiply(frame, expert, order + i, std::min<int64_t>(block_, ends[expert] - i), column, last, scratch);
  }

 private:
  void plan(bool is_many) {
    const int64_t most = is_many ? num_columns_ : kMaxColumnsPerUnit,
                  wanted = is_many ? kWantedManyUnits : kWantedUnits;
    columns_per_unit_ = std::clamp(num_columns_ / wanted / kMinColumnsPerUnit * kMinColumnsPerUnit, kMinColumnsPerUnit,
                                   std::max(most, kMinColumnsPerUnit));
    // Units read a row of a transposed weight in turns, each some whole cache lines.
    if (is_transposed_) columns_per_unit_ = round_up(columns_per_unit_, 128 / element_bytes_);
    num_units_ = num_pairs_ == 0 ? 0 : (num_columns_ + columns_per_unit_ - 1) / columns_per_unit_;
    const double elements = static_cast<double>(columns_per_unit_ * depth_);
    const double read = elements * static_cast<double>(std::min(num_pairs_, num_experts_) * element_bytes_);
    unit_cost_ = std::max(read / kBytesPerNs, 2 * elements * static_cast<double>(num_pairs_) / kFlopsPerNs);
  }

  // Sorts (row, choice) pairs by expert, in ascending order. Those of expert e end at ends[e]. Columns of pairs that
  // name no expert become zeros.
  void sort_pairs(const Frame& frame, int32_t* ends, int32_t* order, int64_t column, int64_t last) const {
    const auto expert_of = [&](int64_t pair) {
      int64_t id;
      std::memcpy(&id, ids_.at(frame, pair / num_choices_, pair % num_choices_), sizeof(id));
      return id >= 0 && id < num_experts_ ? id : -1;
    };
    std::fill(ends, ends + num_experts_, 0);
    for (int64_t pair = 0; pair < num_pairs_; pair++) {
      const int64_t expert = expert_of(pair);
      if (expert >= 0)
        ends[expert]++;
      else
        std::memset(y_at(frame, pair, column), 0, (last - column) * element_bytes_);
    }
    int32_t begin = 0;
    for (int64_t expert = 0; expert < num_experts_; expert++) {
      const int32_t size = ends[expert];
      ends[expert] = begin;
      begin += size;
    }
    for (int64_t pair = 0; pair < num_pairs_; pair++)
      if (const int64_t expert = expert_of(pair); expert >= 0) order[ends[expert]++] = static_cast<int32_t>(pair);
  }

  // Computes columns [column, last) of `count` pairs that chose one expert. Several rows are gathered first, since
  // microkernels take rows at one stride.
  void multiply(const Frame& frame, int64_t expert, const int32_t* pairs, int64_t count, int64_t column, int64_t last,
                uint8_t* scratch) const {
    uint8_t *x = scratch + order_bytes_, *y = x + x_bytes_;
    const int64_t x_bytes = depth_ * element_bytes_, y_bytes = (last - column) * element_bytes_;
    LinearArgs args = {};
    args.k = depth_, args.num_rows = count, args.end = last - column, args.scratch = y + y_bytes_;
    args.weight =
        matrices_.at(frame, expert, is_transposed_ ? 0 : column) + (is_transposed_ ? column * element_bytes_ : 0);
    args.weight_stride = matrices_.strides[1];
    args.x = count == 1 ? x_at(frame, pairs[0]) : x;
    args.y = count == 1 ? y_at(frame, pairs[0], column) : y;
    args.x_stride = x_bytes, args.y_stride = y_bytes;
    if (count == 1) return run_(args);
    for (int64_t i = 0; i < count; i++) std::memcpy(x + i * x_bytes, x_at(frame, pairs[i]), x_bytes);
    run_(args);
    for (int64_t i = 0; i < count; i++) std::memcpy(y_at(frame, pairs[i], column), y + i * y_bytes, y_bytes);
  }

  const uint8_t* x_at(const Frame& frame, int64_t pair) const {
    return x_.at(frame, pair / num_choices_, pair % num_choices_);
  }
  uint8_t* y_at(const Frame& frame, int64_t pair, int64_t column) const {
    return y_.at(frame, pair / num_choices_, pair % num_choices_) + column * element_bytes_;
  }

  Microkernels::Linear run_;
  View x_, ids_, matrices_, y_;
  bool is_transposed_;
  int64_t num_pairs_, num_choices_, num_experts_, num_columns_, depth_, element_bytes_, block_, columns_per_unit_;
  int64_t order_bytes_, x_bytes_, y_bytes_;
};

[[maybe_unused]] const bool kRegistered = KernelRegistry::global().add(
    "expert_linear", [](const Node& n, const Microkernels& k) { return std::make_unique<ExpertLinear>(n, k); });

}  // namespace
}  // namespace mpk::cpu
