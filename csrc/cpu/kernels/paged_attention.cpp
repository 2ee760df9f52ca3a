#include <algorithm>
#include <cstring>
#include <numeric>

#include "attention.h"

namespace mpk::cpu {
namespace {

// A page's positions are one or several tiles of the online softmax, since each page has its own address. Rows are
// split as if each were alone, so a request's bits do not depend on how many others there are.
template <class C>
class PagedAttention : public AttentionKernel<C> {
 public:
  PagedAttention(const Node& node, const Microkernels& microkernels)
      : AttentionKernel<C>(node, microkernels, node.operand("k_pages"), node.operand("v_pages"),
                           node.operand("k_pages").tensor.shape[2],
                           node.operand("block_table").tensor.shape[1] * node.operand("k_pages").tensor.shape[1],
                           node.operand("k_pages").tensor.shape[2]) {
    const Operand &table = node.operand("block_table"), &length = node.operand("length");
    if (static_cast<bool>(this->k_new_) != static_cast<bool>(this->v_new_))
      fail(node, "expected both of k_new and v_new, or neither");
    for (const Operand* o : {&table, &length})
      if (o->tensor.dtype != DType::kI32)
        fail(node, o->name + " is " + info(o->tensor.dtype).name + ", expected int32");
    num_pages_ = node.operand("k_pages").tensor.shape[0], page_size_ = node.operand("k_pages").tensor.shape[1];
    table_ = View(table.tensor), length_ = View(length.tensor);
    std::iota(positions_, positions_ + kAttentionTile, 0);
  }

 private:
  using typename AttentionKernel<C>::Range;

  static int64_t read(const uint8_t* at) {
    int32_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }

  // The page of a position of row b, or -1.
  int64_t page_of(const Frame& frame, int64_t b, int64_t position) const {
    const int64_t page = read(table_.at(frame, b, position / page_size_));
    return page < num_pages_ ? page : -1;
  }

  static uint8_t* row(const View& pages, const Frame& frame, int64_t page, int64_t offset, int64_t g) {
    return pages.at(frame, page, offset) + g * pages.strides[2];
  }

  int64_t live_positions(const Frame& frame, int64_t b) const override {
    return std::clamp<int64_t>(read(length_.at(frame, b)), 0, this->capacity_);
  }

  int64_t new_position(const Frame& frame, int64_t b) const override {
    const int64_t position = read(length_.at(frame, b)) - 1;
    return this->k_new_ && position < this->capacity_ ? position : -1;
  }

  void write(const Frame& frame, int64_t b, int64_t g, int64_t position) const override {
    const int64_t page = page_of(frame, b, position), offset = position % page_size_;
    if (page < 0) return;
    this->write_rows(frame, b, g, row(this->k_, frame, page, offset, g), row(this->v_, frame, page, offset, g));
  }

  void attend_to(const Frame& frame, const Range& range, AttentionTileArgs& args, C*) const override {
    args.k_stride = this->k_.strides[1], args.v_stride = this->v_.strides[1];
    args.positions = positions_;
    for (int64_t first = range.begin; first < range.end; first += args.num_positions) {
      const int64_t offset = first % page_size_, left = std::min(range.end - first, page_size_ - offset);
      args.num_positions = static_cast<int>(std::min<int64_t>(kAttentionTile, left));
      const int64_t page = page_of(frame, range.b, first);
      if (page < 0) continue;
      args.k = row(this->k_, frame, page, offset, range.g), args.v = row(this->v_, frame, page, offset, range.g);
      this->step(args);
    }
  }

  View table_, length_;
  int64_t num_pages_, page_size_;
  int32_t positions_[kAttentionTile];
};

std::unique_ptr<Kernel> make(const Node& node, const Microkernels& microkernels) {
  if (node.operand("q").tensor.dtype == DType::kF64)
    return std::make_unique<PagedAttention<double>>(node, microkernels);
  return std::make_unique<PagedAttention<float>>(node, microkernels);
}

[[maybe_unused]] const bool kRegistered = KernelRegistry::global().add("paged_attention", make);

}  // namespace
}  // namespace mpk::cpu
