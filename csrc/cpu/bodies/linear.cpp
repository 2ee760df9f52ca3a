#include <algorithm>

#include "torch_mpk/cpu/body.h"

namespace mpk::cpu {
namespace {

// Rows of weights that a unit has: enough to be worth preparing x for, unless that left too few units to share.
constexpr int64_t kMinRowsPerUnit = 8, kMaxRowsPerUnit = 32, kWantedUnits = 64;

class Linear : public Body {
 public:
  Linear(const Node& node, const Kernels& kernels) {
    const Operand &x = node.operand("x"), &weight = node.operand("weight"), &y = node.operand("y");
    const Operand* bias = node.find("bias");
    const DType dtype = float_dtype(node, x);
    for (const Operand* o : {&weight, bias, &y})
      if (o != nullptr) float_dtype(node, *o, &x);
    for (const Operand* o : {&x, &weight, bias, &y})
      if (o != nullptr) require_inner_stride(node, *o);
    const int64_t bytes = size_bytes(dtype);
    run_ = kernels.linear[static_cast<int>(dtype)];
    x_ = Place(x.tensor), weight_ = Place(weight.tensor), y_ = Place(y.tensor);
    if (bias != nullptr) bias_ = Place(bias->tensor);
    args_.x_stride = x.tensor.strides[0] * bytes;
    args_.weight_stride = weight.tensor.strides[0] * bytes;
    args_.y_stride = y.tensor.strides[0] * bytes;
    args_.num_rows = x.tensor.shape[0];
    args_.k = x.tensor.shape[1];
    num_weight_rows_ = weight.tensor.shape[0];
    rows_per_unit_ = std::clamp(num_weight_rows_ / kWantedUnits / kMinRowsPerUnit * kMinRowsPerUnit, kMinRowsPerUnit,
                                kMaxRowsPerUnit);
    num_units_ = args_.num_rows == 0 ? 0 : (num_weight_rows_ + rows_per_unit_ - 1) / rows_per_unit_;
    unit_cost_ =
        static_cast<double>(rows_per_unit_ * args_.k * bytes) * std::max(1.0, args_.num_rows / 4.0) / kBytesPerNs;
    scratch_bytes_ = kernels.linear_scratch_bytes(args_.num_rows, args_.k);
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    LinearArgs args = args_;
    args.x = x_.at(frame);
    args.weight = weight_.at(frame);
    args.bias = bias_.at(frame);
    args.y = y_.at(frame);
    args.begin = begin * rows_per_unit_;
    args.end = std::min(end * rows_per_unit_, num_weight_rows_);
    args.scratch = scratch;
    run_(args);
  }

 private:
  Kernels::Linear run_;
  Place x_, weight_, bias_, y_;
  LinearArgs args_ = {};
  int64_t num_weight_rows_, rows_per_unit_;
};

[[maybe_unused]] const bool kRegistered = BodyRegistry::global().add(
    "linear", [](const Node& n, const Kernels& k) { return std::make_unique<Linear>(n, k); });

}  // namespace
}  // namespace mpk::cpu
