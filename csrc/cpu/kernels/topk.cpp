#include <algorithm>

#include "torch_mpk/cpu/kernel.h"

namespace mpk::cpu {
namespace {

// The largest elements of each row; a unit is a row. V is the type that elements are compared in.
template <class V>
class TopK : public Kernel {
 public:
  TopK(const Node& node, const Microkernels& microkernels) {
    const Operand &x = node.operand("x"), &values = node.operand("values"), &ids = node.operand("ids");
    const DType dtype = float_dtype(node, x);
    float_dtype(node, values, &x);
    if (ids.tensor.dtype != DType::kI64)
      fail(node, "ids is " + std::string(info(ids.tensor.dtype).name) + ", expected int64");
    for (const Operand* o : {&x, &values, &ids}) require_inner_stride(node, *o);
    size_ = x.tensor.shape.back();
    num_ = node.int_attr("num");
    if (num_ < 1 || num_ > size_)
      fail(node, "num is " + std::to_string(num_) + ", expected 1 to " + std::to_string(size_));
    load_ = microkernels.load_of(dtype), store_ = microkernels.store_of(dtype);
    x_ = Rows(x.tensor), values_ = Rows(values.tensor), ids_ = Rows(ids.tensor);
    num_units_ = size_ == 0 ? 0 : x.tensor.numel() / size_;
    unit_cost_ = static_cast<double>(8 * size_) / kPointsPerNs;
    index_bytes_ = round_up(size_ * static_cast<int64_t>(sizeof(int64_t)), 64);
    row_bytes_ = round_up(size_ * static_cast<int64_t>(sizeof(V)), 64);
    scratch_bytes_ = index_bytes_ + 2 * row_bytes_;
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    auto* order = reinterpret_cast<int64_t*>(scratch);
    V* row = reinterpret_cast<V*>(scratch + index_bytes_);
    V* found = reinterpret_cast<V*>(scratch + index_bytes_ + row_bytes_);
    // NaN first, then by value, then by index.
    const auto is_before = [&](int64_t i, int64_t j) {
      const V a = row[i], b = row[j];
      if (a != a || b != b) return a != a && (b == b || i < j);
      return a > b || (a == b && i < j);
    };
    for (int64_t unit = begin; unit < end; unit++) {
      load_(x_.at(frame, unit), 1, row, static_cast<int>(size_));
      for (int64_t i = 0; i < size_; i++) order[i] = i;
      std::partial_sort(order, order + num_, order + size_, is_before);
      for (int64_t i = 0; i < num_; i++) found[i] = row[order[i]];
      store_(found, values_.at(frame, unit), 1, static_cast<int>(num_));
      std::copy(order, order + num_, reinterpret_cast<int64_t*>(ids_.at(frame, unit)));
    }
  }

 private:
  // The rows of a tensor, in row-major order of its leading dimensions.
  class Rows {
   public:
    Rows() = default;
    explicit Rows(const Tensor& t) : place_(t), shape_(t.shape.begin(), t.shape.end() - 1), strides_(t.strides) {
      for (int64_t& stride : strides_) stride *= size_bytes(t.dtype);
    }
    uint8_t* at(const Frame& frame, int64_t row) const {
      uint8_t* p = place_.at(frame);
      for (size_t d = shape_.size(); d-- > 0; row /= shape_[d]) p += row % shape_[d] * strides_[d];
      return p;
    }

   private:
    Place place_;
    std::vector<int64_t> shape_, strides_;
  };

  Microkernels::Load load_;
  Microkernels::Store store_;
  Rows x_, values_, ids_;
  int64_t size_, num_, index_bytes_, row_bytes_;
};

[[maybe_unused]] const bool kRegistered =
    KernelRegistry::global().add("topk", [](const Node& n, const Microkernels& k) -> std::unique_ptr<Kernel> {
      if (n.operand("x").tensor.dtype == DType::kF64) return std::make_unique<TopK<double>>(n, k);
      return std::make_unique<TopK<float>>(n, k);
    });

}  // namespace
}  // namespace mpk::cpu
