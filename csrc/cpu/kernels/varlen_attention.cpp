#include <algorithm>
#include <cstring>

#include "attention.h"
#include "torch_mpk/cpu/kernel.h"

namespace mpk::cpu {
namespace {

// One unit is a run of tokens, possibly of several sequences, with all heads that share a key head.
class VarlenAttention : public Kernel {
 public:
  VarlenAttention(const Node& node, const Microkernels& microkernels) {
    const Operand& q = node.operand("q");
    const DType dtype = float_dtype(node, q);
    const auto matrix = [&](const char* name) {
      const Operand& o = node.operand(name);
      float_dtype(node, o, &q);
      require_inner_stride(node, o);
      return View(o.tensor);
    };
    q_ = matrix("q"), y_ = matrix("y");
    k_new_ = matrix("k_new"), v_new_ = matrix("v_new"), k_cache_ = matrix("k_cache"), v_cache_ = matrix("v_cache");
    read_index_ = integers(node, "read_index", DType::kI64);
    ends_q_ = integers(node, "cu_seq_lens_q", DType::kI32), ends_k_ = integers(node, "cu_seq_lens_k", DType::kI32);
    if (read_index_.strides[0] != size_bytes(DType::kI64) && node.operand("read_index").tensor.shape[0] > 1)
      fail(node, "read_index is not contiguous");

    num_tokens_ = q.tensor.shape[0];
    const int64_t head_dim = q.tensor.shape[2], value_dim = node.operand("v_cache").tensor.shape[2];
    num_groups_ = node.operand("k_cache").tensor.shape[1];
    const int64_t num_heads = q.tensor.shape[1];
    if (num_groups_ == 0 || num_heads % num_groups_ != 0)
      fail(node, "H=" + std::to_string(num_heads) + " is not a multiple of G=" + std::to_string(num_groups_));
    heads_per_group_ = num_heads / num_groups_;
    num_read_ = node.operand("read_index").tensor.shape[0];
    num_sequences_ = std::max<int64_t>(0, node.operand("cu_seq_lens_q").tensor.shape[0] - 1);
    window_ = node.int_attr("window");
    row_bytes_ = value_dim * size_bytes(dtype);
    run_ = microkernels.prefill_attention[static_cast<int>(dtype)];
    args_.head_dim = head_dim, args_.value_dim = value_dim;
    args_.scale = node.float_attr("scale"), args_.softcap = node.float_attr("softcap", 0);
    if (const Operand* sinks = node.find("sinks")) sinks_ = Sinks(node, microkernels, *sinks);
    args_.k_stride = k_cache_.strides[0], args_.v_stride = v_cache_.strides[0];
    args_.k_new_stride = k_new_.strides[0], args_.v_new_stride = v_new_.strides[0];
    args_.cache_rows = node.operand("k_cache").tensor.shape[0];

    tokens_per_unit_ = std::clamp<int64_t>(kPackedRowsPerUnit / std::max<int64_t>(1, heads_per_group_), 1,
                                           std::max<int64_t>(1, num_tokens_));
    num_blocks_ = (num_tokens_ + tokens_per_unit_ - 1) / tokens_per_unit_;
    num_units_ = num_blocks_ * num_groups_;
    const int64_t rows = tokens_per_unit_ * heads_per_group_;
    unit_cost_ = static_cast<double>(rows * num_tokens_ * (head_dim + value_dim)) / kPackedFlopsPerNs;
    array_bytes_ = round_up(rows * static_cast<int64_t>(sizeof(void*)), 64);
    scratch_bytes_ = 5 * array_bytes_ + microkernels.prefill_scratch_bytes[static_cast<int>(dtype)](
                                            static_cast<int>(rows), head_dim, value_dim);
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t first = unit % num_blocks_ * tokens_per_unit_, g = unit / num_blocks_;
      const int64_t last = std::min(first + tokens_per_unit_, num_tokens_);
      for (int64_t t = first; t < last; t++)  // tokens without a sequence stay so
        for (int64_t h = 0; h < heads_per_group_; h++)
          std::memset(y_.at(frame, t, g * heads_per_group_ + h), 0, row_bytes_);
      for (int64_t i = 0; i < num_sequences_; i++) {
        const int64_t begin_q = read(ends_q_, frame, i), end_q = read(ends_q_, frame, i + 1);
        const int64_t from = std::max(first, begin_q), to = std::min(last, end_q);
        if (from < to) attend(frame, i, g, begin_q, end_q, from, to, scratch);
      }
    }
  }

 private:
  static View integers(const Node& node, const char* name, DType dtype) {
    const Operand& o = node.operand(name);
    if (o.tensor.dtype != dtype)
      fail(node, std::string(name) + " is " + info(o.tensor.dtype).name + ", expected " + info(dtype).name);
    return View(o.tensor);
  }

  static int64_t read(const View& ends, const Frame& frame, int64_t i) {
    int32_t value;
    std::memcpy(&value, ends.at(frame, i), sizeof value);
    return value;
  }

  // Attends for tokens [from, to) of sequence i, whose tokens are [begin_q, end_q), to its positions.
  void attend(const Frame& frame, int64_t i, int64_t g, int64_t begin_q, int64_t end_q, int64_t from, int64_t to,
              uint8_t* scratch) const {
    const int64_t begin_k = std::clamp<int64_t>(read(ends_k_, frame, i), 0, num_read_);
    const int64_t num_keys = read(ends_k_, frame, i + 1) - begin_k;
    const int64_t num_cached = std::clamp<int64_t>(num_keys - (end_q - begin_q), 0, num_read_ - begin_k);
    auto** q = reinterpret_cast<const uint8_t**>(scratch);
    auto** y = reinterpret_cast<uint8_t**>(scratch + array_bytes_);
    auto* starts = reinterpret_cast<int64_t*>(scratch + 2 * array_bytes_);
    auto* limits = reinterpret_cast<int64_t*>(scratch + 3 * array_bytes_);
    auto* sinks = reinterpret_cast<double*>(scratch + 4 * array_bytes_);
    int rows = 0;
    for (int64_t t = from; t < to; t++) {
      const int64_t limit = num_cached + t - begin_q + 1;
      for (int64_t h = g * heads_per_group_; h < (g + 1) * heads_per_group_; h++, rows++) {
        q[rows] = q_.at(frame, t, h);
        y[rows] = y_.at(frame, t, h);
        starts[rows] = window_ > 0 ? std::max<int64_t>(0, limit - window_) : 0;
        limits[rows] = limit;
        if (sinks_) sinks[rows] = sinks_.at(frame, h);
      }
    }
    PrefillArgs args = args_;
    args.q = q, args.y = y, args.starts = starts, args.limits = limits, args.num_rows = rows;
    args.sinks = sinks_ ? sinks : nullptr;
    args.k = k_cache_.at(frame, 0, g), args.v = v_cache_.at(frame, 0, g);
    args.list = reinterpret_cast<const int64_t*>(read_index_.at(frame, begin_k)), args.num_listed = num_cached;
    args.k_new = k_new_.at(frame, begin_q, g), args.v_new = v_new_.at(frame, begin_q, g);
    args.scratch = scratch + 5 * array_bytes_;
    run_(args);
  }

  Microkernels::Prefill run_;
  PrefillArgs args_ = {};
  View q_, y_, k_new_, v_new_, k_cache_, v_cache_, read_index_, ends_q_, ends_k_;
  Sinks sinks_;
  int64_t num_tokens_, num_groups_, heads_per_group_, num_read_, num_sequences_, window_;
  int64_t row_bytes_, array_bytes_, tokens_per_unit_, num_blocks_;
};

[[maybe_unused]] const bool kRegistered = KernelRegistry::global().add(
    "varlen_attention", [](const Node& n, const Microkernels& k) { return std::make_unique<VarlenAttention>(n, k); });

}  // namespace
}  // namespace mpk::cpu
