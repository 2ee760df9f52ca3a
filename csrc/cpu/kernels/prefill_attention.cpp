#include <algorithm>
#include <cstring>
#include <limits>

#include "attention.h"
#include "torch_mpk/cpu/kernel.h"

namespace mpk::cpu {
namespace {

// One unit is a run of query positions of one sequence with all heads that share a key head.
class PrefillAttention : public Kernel {
 public:
  PrefillAttention(const Node& node, const Microkernels& microkernels) {
    const Operand &q = node.operand("q"), &k = node.operand("k"), &v = node.operand("v"), &y = node.operand("y");
    const Operand *mask = node.find("mask"), *limit = node.find("limit");
    const DType dtype = float_dtype(node, q);
    for (const Operand* o : {&k, &v, &y}) float_dtype(node, *o, &q);
    for (const Operand* o : {&q, &k, &v, &y}) require_inner_stride(node, *o);
    if (limit != nullptr && limit->tensor.dtype != DType::kI64)
      fail(node, std::string("limit is ") + info(limit->tensor.dtype).name + ", expected int64");
    run_ = microkernels.prefill_attention[static_cast<int>(dtype)];
    batch_ = q.tensor.shape[0], num_positions_ = q.tensor.shape[1];
    const int64_t num_heads = q.tensor.shape[2];
    num_groups_ = k.tensor.shape[1], length_ = k.tensor.shape[2];
    if (num_groups_ == 0 || num_heads % num_groups_ != 0)
      fail(node, "H=" + std::to_string(num_heads) + " is not a multiple of G=" + std::to_string(num_groups_));
    heads_per_group_ = num_heads / num_groups_;
    const std::string style = node.string_attr("style");
    if (style != "sdpa" && style != "eager") fail(node, "style is '" + style + "', expected 'sdpa' or 'eager'");
    q_ = View(q.tensor), k_ = View(k.tensor), v_ = View(v.tensor), y_ = View(y.tensor);
    args_.head_dim = q.tensor.shape[3], args_.value_dim = v.tensor.shape[3];
    args_.k_stride = k_.strides[2], args_.v_stride = v_.strides[2];
    args_.scale = node.float_attr("scale"), args_.softcap = node.float_attr("softcap", 0);
    if (const Operand* sinks = node.find("sinks")) sinks_ = Sinks(node, microkernels, *sinks);
    args_.without_keys = style == "sdpa" ? 0 : std::numeric_limits<double>::quiet_NaN();
    if (limit != nullptr) limit_ = View(limit->tensor);
    if (mask != nullptr) {
      const DType type = mask->tensor.dtype;
      if (type != DType::kBool && !is_float(type))
        fail(node, std::string("mask is ") + info(type).name + ", expected bool or a floating dtype");
      mask_ = View(mask->tensor);
      args_.load_mask = microkernels.load_of(type), args_.mask_class = class_of(type);
      args_.mask_bytes = size_bytes(type), args_.mask_stride = mask_.strides[3] / size_bytes(type);
    }
    positions_per_unit_ = std::clamp<int64_t>(kPackedRowsPerUnit / std::max<int64_t>(1, heads_per_group_), 1,
                                              std::max<int64_t>(1, num_positions_));
    tiles_ = (num_positions_ + positions_per_unit_ - 1) / positions_per_unit_;
    num_units_ = batch_ * num_groups_ * tiles_;
    const int64_t rows = positions_per_unit_ * heads_per_group_;
    unit_cost_ = static_cast<double>(rows * length_ * (args_.head_dim + args_.value_dim)) / kPackedFlopsPerNs;
    pointers_bytes_ = round_up(5 * rows * static_cast<int64_t>(sizeof(void*)), 64);
    scratch_bytes_ = pointers_bytes_ + microkernels.prefill_scratch_bytes[static_cast<int>(dtype)](
                                           static_cast<int>(rows), args_.head_dim, args_.value_dim);
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t tile = unit % tiles_, g = unit / tiles_ % num_groups_, b = unit / tiles_ / num_groups_;
      attend(frame, b, g, tile * positions_per_unit_, scratch);
    }
  }

 private:
  void attend(const Frame& frame, int64_t b, int64_t g, int64_t first, uint8_t* scratch) const {
    const int64_t array_bytes = positions_per_unit_ * heads_per_group_ * static_cast<int64_t>(sizeof(void*));
    auto** q = reinterpret_cast<const uint8_t**>(scratch);
    auto** y = reinterpret_cast<uint8_t**>(scratch + array_bytes);
    auto** mask = reinterpret_cast<const uint8_t**>(scratch + 2 * array_bytes);
    auto* limits = reinterpret_cast<int64_t*>(scratch + 3 * array_bytes);
    auto* sinks = reinterpret_cast<double*>(scratch + 4 * array_bytes);
    int rows = 0;
    for (int64_t s = first; s < std::min(first + positions_per_unit_, num_positions_); s++) {
      int64_t limit = length_;
      if (limit_) std::memcpy(&limit, limit_.at(frame, b, s), sizeof limit);
      for (int64_t h = g * heads_per_group_; h < (g + 1) * heads_per_group_; h++, rows++) {
        q[rows] = q_.at(frame, b, s, h);
        y[rows] = y_.at(frame, b, s, h);
        limits[rows] = std::clamp<int64_t>(limit, 0, length_);
        if (mask_) mask[rows] = mask_.at(frame, b, h, s);
        if (sinks_) sinks[rows] = sinks_.at(frame, h);
      }
    }
    PrefillArgs args = args_;
    args.q = q, args.y = y, args.limits = limits, args.num_rows = rows;
    args.mask = mask_ ? mask : nullptr;
    args.sinks = sinks_ ? sinks : nullptr;
    args.k = k_.at(frame, b, g), args.v = v_.at(frame, b, g);
    args.scratch = scratch + pointers_bytes_;
    run_(args);
  }

  Microkernels::Prefill run_;
  PrefillArgs args_ = {};
  View q_, k_, v_, y_, mask_, limit_;
  Sinks sinks_;
  int64_t batch_, num_positions_, num_groups_, heads_per_group_, length_;
  int64_t positions_per_unit_, tiles_, pointers_bytes_;
};

[[maybe_unused]] const bool kRegistered = KernelRegistry::global().add(
    "prefill_attention", [](const Node& n, const Microkernels& k) { return std::make_unique<PrefillAttention>(n, k); });

}  // namespace
}  // namespace mpk::cpu
