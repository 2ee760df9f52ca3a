#include "torch_mpk/cpu/kernel.h"

namespace mpk::cpu {
namespace {

// One unit is one head of one batch row. V is the type it computes in: float, or double for float64.
template <class V>
class Rope : public Kernel {
 public:
  Rope(const Node& node, const Microkernels& microkernels) : microkernels_(microkernels) {
    const Operand &x = node.operand("x"), &cos = node.operand("cos"), &sin = node.operand("sin"),
                  &y = node.operand("y");
    dtype_ = float_dtype(node, x);
    for (const Operand* o : {&cos, &sin, &y}) float_dtype(node, *o, &x);
    for (const Operand* o : {&x, &cos, &sin, &y}) require_inner_stride(node, *o);
    const int64_t bytes = size_bytes(dtype_);
    x_ = Place(x.tensor), cos_ = Place(cos.tensor), sin_ = Place(sin.tensor), y_ = Place(y.tensor);
    for (int d = 0; d < 2; d++) {
      x_strides_[d] = x.tensor.strides[d] * bytes;
      y_strides_[d] = y.tensor.strides[d] * bytes;
    }
    cos_stride_ = cos.tensor.strides[0] * bytes;
    sin_stride_ = sin.tensor.strides[0] * bytes;
    num_heads_ = x.tensor.shape[1];
    head_dim_ = x.tensor.shape[2];
    if (head_dim_ % 2 != 0) fail(node, "D is " + std::to_string(head_dim_) + ", expected an even head size");
    num_units_ = x.tensor.shape[0] * num_heads_;
    unit_cost_ = static_cast<double>(4 * head_dim_) / kPointsPerNs;
    vector_bytes_ = round_up(head_dim_ * static_cast<int64_t>(sizeof(V)), 64);
    scratch_bytes_ = 4 * vector_bytes_;
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    const int n = static_cast<int>(head_dim_), half = n / 2;
    const auto load = microkernels_.load_of(dtype_);
    const auto round = [&](V* values) {
      if (microkernels_.round_of(dtype_) != nullptr) microkernels_.round_of(dtype_)(values, n);
    };
    V* x = reinterpret_cast<V*>(scratch);
    V* cos = reinterpret_cast<V*>(scratch + vector_bytes_);
    V* sin = reinterpret_cast<V*>(scratch + 2 * vector_bytes_);
    V* turned = reinterpret_cast<V*>(scratch + 3 * vector_bytes_);
    int64_t loaded = -1;
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t b = unit / num_heads_, h = unit % num_heads_;
      if (b != loaded) {
        load(cos_.at(frame) + b * cos_stride_, 1, cos, n);
        load(sin_.at(frame) + b * sin_stride_, 1, sin, n);
        loaded = b;
      }
      load(x_.at(frame) + b * x_strides_[0] + h * x_strides_[1], 1, x, n);
      for (int i = 0; i < half; i++) {
        turned[i] = -x[half + i] * sin[i];
        turned[half + i] = x[i] * sin[half + i];
      }
      for (int i = 0; i < n; i++) x[i] *= cos[i];
      round(turned);
      round(x);
      for (int i = 0; i < n; i++) x[i] += turned[i];
      microkernels_.store_of(dtype_)(x, y_.at(frame) + b * y_strides_[0] + h * y_strides_[1], 1, n);
    }
  }

 private:
  const Microkernels& microkernels_;
  DType dtype_;
  Place x_, cos_, sin_, y_;
  int64_t x_strides_[2], y_strides_[2], cos_stride_, sin_stride_, num_heads_, head_dim_, vector_bytes_;
};

std::unique_ptr<Kernel> make(const Node& node, const Microkernels& microkernels) {
  if (node.operand("x").tensor.dtype == DType::kF64) return std::make_unique<Rope<double>>(node, microkernels);
  return std::make_unique<Rope<float>>(node, microkernels);
}

[[maybe_unused]] const bool kRegistered = KernelRegistry::global().add("rope", make);

}  // namespace
}  // namespace mpk::cpu
