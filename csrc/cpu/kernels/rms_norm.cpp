#include <algorithm>
#include <cmath>

#include "torch_mpk/cpu/kernel.h"

namespace mpk::cpu {
namespace {

enum class Style { kLlama, kTorch, kGemma };

Style parse_style(const Node& node) {
  const std::string name = node.string_attr("style");
  if (name == "llama") return Style::kLlama;
  if (name == "torch") return Style::kTorch;
  if (name == "gemma") return Style::kGemma;
  fail(node, "style is '" + name + "', expected 'llama', 'torch' or 'gemma'");
}

// One unit is one row. V is the type it computes in: float, or double for float64.
template <class V>
class RmsNorm : public Kernel {
 public:
  RmsNorm(const Node& node, const Microkernels& microkernels)
      : microkernels_(microkernels), style_(parse_style(node)), eps_(static_cast<V>(node.float_attr("eps"))) {
    const Operand &x = node.operand("x"), &y = node.operand("y");
    const Operand* weight = node.find("weight");
    dtype_ = float_dtype(node, x);
    y_dtype_ = float_dtype(node, y);
    weight_dtype_ = weight == nullptr ? dtype_ : float_dtype(node, *weight);
    for (const Operand* o : {&x, weight, &y}) {
      if (o == nullptr) continue;
      if (class_of(o->tensor.dtype) != class_of(dtype_))
        fail(node, o->name + " and x must both be float64, or neither");
      require_inner_stride(node, *o);
    }
    x_ = Place(x.tensor), y_ = Place(y.tensor);
    if (weight != nullptr) weight_ = Place(weight->tensor);
    x_stride_ = x.tensor.strides[0] * size_bytes(dtype_);
    y_stride_ = y.tensor.strides[0] * size_bytes(y_dtype_);
    size_ = x.tensor.shape[1];
    num_units_ = x.tensor.shape[0];
    unit_cost_ = static_cast<double>(size_) / kPointsPerNs;
    scratch_bytes_ = 2 * round_up(size_ * static_cast<int64_t>(sizeof(V)), 64);
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    const int n = static_cast<int>(size_);
    V* row = reinterpret_cast<V*>(scratch);
    V* weight = reinterpret_cast<V*>(scratch + scratch_bytes_ / 2);
    if (weight_) {
      microkernels_.load_of(weight_dtype_)(weight_.at(frame), 1, weight, n);
      if (style_ == Style::kGemma)
        for (int i = 0; i < n; i++) weight[i] += 1;
    }
    const auto sum = microkernels_.reduce[static_cast<int>(Reduction::kSum)][class_of(dtype_)];
    for (int64_t r = begin; r < end; r++) {
      microkernels_.load_of(dtype_)(x_.at(frame) + r * x_stride_, 1, row, n);
      alignas(64) V lanes[kReduceLanes] = {};
      alignas(64) V squares[kBlock];
      for (int first = 0; first < n; first += kBlock) {
        const int count = std::min(kBlock, n - first);
        for (int i = 0; i < count; i++) squares[i] = row[first + i] * row[first + i];
        sum(lanes, squares, count);
      }
      for (int width = kReduceLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
      const V scale = 1 / std::sqrt(lanes[0] / static_cast<V>(n) + eps_);
      for (int i = 0; i < n; i++) row[i] *= scale;
      if (style_ == Style::kLlama) round(dtype_, row, n);
      if (weight_)
        for (int i = 0; i < n; i++) row[i] *= weight[i];
      microkernels_.store_of(y_dtype_)(row, y_.at(frame) + r * y_stride_, 1, n);
    }
  }

 private:
  void round(DType dtype, V* values, int n) const {
    if (microkernels_.round_of(dtype) != nullptr) microkernels_.round_of(dtype)(values, n);
  }

  const Microkernels& microkernels_;
  Style style_;
  V eps_;
  DType dtype_, y_dtype_, weight_dtype_;
  Place x_, weight_, y_;
  int64_t x_stride_, y_stride_, size_;
};

std::unique_ptr<Kernel> make(const Node& node, const Microkernels& microkernels) {
  if (node.operand("x").tensor.dtype == DType::kF64) return std::make_unique<RmsNorm<double>>(node, microkernels);
  return std::make_unique<RmsNorm<float>>(node, microkernels);
}

[[maybe_unused]] const bool kRegistered = KernelRegistry::global().add("rms_norm", make);

}  // namespace
}  // namespace mpk::cpu
