// Sums, or gathered rows, over all ranks of a group. A rank pushes all of its data before it waits.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "torch_mpk/cpu/exchanges.h"
#include "torch_mpk/cpu/kernel.h"

namespace mpk::cpu {
namespace {

constexpr int64_t kBlock = 512;  // elements

// Pushes x, which is contiguous, or is copied to be so.
class Exchange : public Kernel {
 public:
  explicit Exchange(const Node& node) : node_(node), x_(node.operand("x")), y_(node.operand("y")) {
    dtype_ = float_dtype(node, x_);
    float_dtype(node, y_, &x_);
    if (!x_.tensor.is_contiguous() || !y_.tensor.is_contiguous()) fail(node, "x and y must be contiguous");
    element_ = size_bytes(dtype_);
    numel_ = x_.tensor.numel();
    num_units_ = numel_ == 0 ? 0 : 1;
    unit_cost_ = static_cast<double>(numel_ * element_ * node.int_attr("ranks")) / kBytesPerNs;
  }

 protected:
  uint8_t* x(const Frame& frame) const { return Place(x_.tensor).at(frame); }
  uint8_t* y(const Frame& frame) const { return Place(y_.tensor).at(frame); }
  bool is_alone() const { return node_.int_attr("ranks") == 1; }

  const Node node_;
  const Operand x_, y_;
  DType dtype_;
  int64_t element_, numel_;
};

// C: the type of sums.
template <class C>
class AllReduce : public Exchange {
 public:
  AllReduce(const Node& node, const Microkernels& microkernels)
      : Exchange(node),
        load_(microkernels.load_of(dtype_)),
        store_(microkernels.store_of(dtype_)),
        round_(microkernels.round_of(dtype_)) {
    scratch_bytes_ = kBlock * static_cast<int64_t>(sizeof(double) + 2 * sizeof(C));
  }

  void run(const Frame& frame, int64_t, int64_t, uint8_t* scratch) override {
    if (is_alone()) {
      std::memcpy(y(frame), x(frame), numel_ * element_);
      return;
    }
    Exchanges& exchanges = *frame.exchanges;
    exchanges.push(node_.id, x(frame), numel_ * element_);
    uint8_t* part = scratch;
    C* values = reinterpret_cast<C*>(scratch + kBlock * sizeof(double));
    C* sums = values + kBlock;
    for (int64_t first = 0; first < numel_; first += kBlock) {
      const auto count = static_cast<int>(std::min(kBlock, numel_ - first));
      const int64_t begin = first * element_, end = begin + count * element_;
      for (int r = 0; r < exchanges.ranks(); r++) {
        const bool is_own = r == exchanges.rank();
        if (!is_own) exchanges.take(node_, r, begin, end, part);
        load_(is_own ? x(frame) + begin : part, 1, r == 0 ? sums : values, count);
        for (int i = 0; r > 0 && i < count; i++) sums[i] += values[i];
      }
      if (round_ != nullptr) round_(sums, count);
      store_(sums, y(frame) + begin, 1, count);
    }
  }

 private:
  Microkernels::Load load_;
  Microkernels::Store store_;
  Microkernels::Round round_;
};

class AllGather : public Exchange {
 public:
  explicit AllGather(const Node& node) : Exchange(node) {
    row_ = x_.tensor.shape.back() * element_;
    if (row_ % static_cast<int64_t>(sizeof(uint32_t)) != 0) fail(node, "rows must be of whole 4-byte words");
    if (y_.tensor.numel() != numel_ * node.int_attr("ranks")) fail(node, "y is not as large as all ranks' x");
  }

  void run(const Frame& frame, int64_t, int64_t, uint8_t*) override {
    const auto ranks = static_cast<int>(node_.int_attr("ranks"));
    if (!is_alone()) frame.exchanges->push(node_.id, x(frame), numel_ * element_);
    const int own = is_alone() ? 0 : frame.exchanges->rank();
    for (int64_t begin = 0, row = 0; begin < numel_ * element_; begin += row_, row++)
      for (int r = 0; r < ranks; r++) {
        uint8_t* to = y(frame) + (row * ranks + r) * row_;
        if (r == own)
          std::memcpy(to, x(frame) + begin, row_);
        else
          frame.exchanges->take(node_, r, begin, begin + row_, to);
      }
  }

 private:
  int64_t row_;
};

[[maybe_unused]] const bool kRegistered =
    KernelRegistry::global().add("all_reduce",
                                 [](const Node& n, const Microkernels& k) -> std::unique_ptr<Kernel> {
                                   if (n.operand("x").tensor.dtype == DType::kF64)
                                     return std::make_unique<AllReduce<double>>(n, k);
                                   return std::make_unique<AllReduce<float>>(n, k);
                                 }) &&
    KernelRegistry::global().add("all_gather",
                                 [](const Node& n, const Microkernels&) { return std::make_unique<AllGather>(n); });

}  // namespace
}  // namespace mpk::cpu
