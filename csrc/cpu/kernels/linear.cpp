#include <algorithm>

#include "torch_mpk/cpu/kernel.h"

namespace mpk::cpu {
namespace {

// Weight rows of a unit: enough to be worth preparing x for, unless that leaves too few units to share.
constexpr int64_t kMinRowsPerUnit = 8, kMaxRowsPerUnit = 32, kWantedUnits = 64;

// With many rows of x, a unit is a packed block of them, and enough weight rows to be worth packing it for.
constexpr int64_t kPackedElements = 1 << 19, kMaxBlock = 512;
constexpr int64_t kManyRowsPerUnit = 256, kMaxManyRowsPerUnit = 512, kWantedManyUnits = 16;
constexpr double kFlopsPerNs = 200;

class Linear : public Kernel {
 public:
  Linear(const Node& node, const Microkernels& microkernels) {
    const Operand &x = node.operand("x"), &weight = node.operand("weight"), &y = node.operand("y");
    const Operand* bias = node.find("bias");
    const DType dtype = float_dtype(node, x);
    for (const Operand* o : {&weight, bias, &y})
      if (o != nullptr) float_dtype(node, *o, &x);
    for (const Operand* o : {&x, &weight, bias, &y})
      if (o != nullptr) require_inner_stride(node, *o);
    const int64_t bytes = size_bytes(dtype);
    x_ = Place(x.tensor), weight_ = Place(weight.tensor), y_ = Place(y.tensor);
    if (bias != nullptr) bias_ = Place(bias->tensor);
    args_.x_stride = x.tensor.strides[0] * bytes;
    args_.weight_stride = weight.tensor.strides[0] * bytes;
    args_.y_stride = y.tensor.strides[0] * bytes;
    args_.num_rows = x.tensor.shape[0];
    args_.k = x.tensor.shape[1];
    num_weight_rows_ = weight.tensor.shape[0];
    const bool is_many =
        args_.num_rows > kLinearRowBlock && microkernels.linear_many[static_cast<int>(dtype)] != nullptr;
    run_ = (is_many ? microkernels.linear_many : microkernels.linear)[static_cast<int>(dtype)];
    if (is_many)
      plan_many(microkernels, dtype);
    else
      plan_few(microkernels, bytes);
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    while (begin < end) {  // units of one block of rows are neighbours
      const int64_t block = begin / units_per_block_;
      const int64_t last = std::min(end, (block + 1) * units_per_block_);
      LinearArgs args = args_;
      const int64_t first_row = block * block_rows_;
      args.num_rows = std::min(block_rows_, args_.num_rows - first_row);
      args.x = x_.at(frame) + first_row * args_.x_stride;
      args.weight = weight_.at(frame);
      args.bias = bias_.at(frame);
      args.y = y_.at(frame) + first_row * args_.y_stride;
      args.begin = (begin - block * units_per_block_) * rows_per_unit_;
      args.end = std::min((last - block * units_per_block_) * rows_per_unit_, num_weight_rows_);
      args.scratch = scratch;
      run_(args);
      begin = last;
    }
  }

 private:
  void plan_few(const Microkernels& microkernels, int64_t bytes) {
    rows_per_unit_ = std::clamp(num_weight_rows_ / kWantedUnits / kMinRowsPerUnit * kMinRowsPerUnit, kMinRowsPerUnit,
                                kMaxRowsPerUnit);
    block_rows_ = args_.num_rows;
    units_per_block_ = std::max<int64_t>(1, (num_weight_rows_ + rows_per_unit_ - 1) / rows_per_unit_);
    num_units_ = args_.num_rows == 0 ? 0 : (num_weight_rows_ + rows_per_unit_ - 1) / rows_per_unit_;
    unit_cost_ =
        static_cast<double>(rows_per_unit_ * args_.k * bytes) * std::max(1.0, args_.num_rows / 4.0) / kBytesPerNs;
    scratch_bytes_ = microkernels.linear_scratch_bytes(args_.num_rows, args_.k);
  }

  void plan_many(const Microkernels& microkernels, DType dtype) {
    block_rows_ = std::clamp<int64_t>(kPackedElements / std::max<int64_t>(1, args_.k) / 32 * 32, 32, kMaxBlock);
    const int64_t num_blocks = (args_.num_rows + block_rows_ - 1) / block_rows_;
    block_rows_ = round_up((args_.num_rows + num_blocks - 1) / num_blocks, 32);
    rows_per_unit_ =
        std::clamp(num_weight_rows_ * num_blocks / kWantedManyUnits / 32 * 32, kManyRowsPerUnit, kMaxManyRowsPerUnit);
    units_per_block_ = std::max<int64_t>(1, (num_weight_rows_ + rows_per_unit_ - 1) / rows_per_unit_);
    num_units_ = num_weight_rows_ == 0 ? 0 : units_per_block_ * ((args_.num_rows + block_rows_ - 1) / block_rows_);
    unit_cost_ = 2.0 * static_cast<double>(rows_per_unit_ * args_.k * block_rows_) / kFlopsPerNs;
    scratch_bytes_ = microkernels.linear_many_scratch_bytes[static_cast<int>(dtype)](block_rows_, args_.k);
  }

  Microkernels::Linear run_;
  Place x_, weight_, bias_, y_;
  LinearArgs args_ = {};
  int64_t num_weight_rows_, rows_per_unit_, units_per_block_, block_rows_;
};

[[maybe_unused]] const bool kRegistered = KernelRegistry::global().add(
    "linear", [](const Node& n, const Microkernels& k) { return std::make_unique<Linear>(n, k); });

}  // namespace
}  // namespace mpk::cpu
