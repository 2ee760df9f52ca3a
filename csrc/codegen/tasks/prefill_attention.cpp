// prefill_attention: keys and values that the loader brings in boxes, and rows of queries that are read where they are.
#include "../../arch/arch.h"
#include "../../schedule/key_rows.h"
#include "../checks.h"
#include "../emitter.h"
#include "../pattern.h"
#include "../text.h"

namespace mpk::codegen {
namespace {

class PrefillAttentionWriter {
 public:
  explicit PrefillAttentionWriter(const JobPlace& place)
      : context_(place.context),
        job_(place.job),
        node_(place.node()),
        q_(node_.operand("q")),
        k_(node_.operand("k")),
        v_(node_.operand("v")),
        mask_(node_.find("mask")),
        limit_(node_.find("limit")),
        y_(node_.operands.back().tensor),
        code_{"PrefillAttention", "prefill_attention::compute", "prefill_attention::load", "", "", {node_.def->header}},
        refs_(context_, code_.refs) {}

  JobCode run() {
    check_operands();
    check_sizes();
    write_sizes();
    write_keys();
    write_rows();
    write_visible();
    return std::move(code_);
  }

 private:
  void check_operands() const {
    const DType dtype = q_.tensor.dtype;
    require(dtype == DType::kBF16 || dtype == DType::kF16, node_,
            "q is " + std::string(info(dtype).name) + ", and tensor cores take bfloat16 and float16 alone");
    require(arch_of(context_.schedule.target.arch).has_warpgroup_products, node_,
            "it needs a GPU of compute capability 9.0");
    for (const Operand& operand : node_.operands) {
      if (&operand == limit_)
        require_dtype(node_, operand, DType::kI64);
      else if (&operand != mask_)
        require_dtype(node_, operand, dtype), require_inner_stride(node_, operand);
    }
    if (mask_)
      require(mask_->tensor.dtype == DType::kBool || is_row_dtype(mask_->tensor.dtype), node_,
              "the mask must be bool, float32, float16 or bfloat16");
    const std::string style = node_.string_attr("style");
    require(style == "sdpa" || style == "eager", node_, "the style must be sdpa or eager, got " + style);
  }

  void check_sizes() const {
    require(groups() > 0 && heads() >= groups() && heads() % groups() == 0, node_,
            str(heads()) + " heads are no multiple of " + str(groups()) + " groups");
    require(size() == 64 || size() == 128, node_, "the head size must be 64 or 128, got " + str(size()));
    for (const Operand* operand : {&k_, &v_})
      require(
          key_rows(operand->tensor).has_value(), node_,
          "operand " + operand->name +
              " is no matrix of positions: its strides must be multiples of that from position to position, or that "
              "from group to group a multiple of 64 within a position, and all of 16 bytes");
    require(job_.queries.has_value(), node_, "the schedule does not cut it");
  }

  void write_sizes() {
    code_.body = "  using T = " + std::string(cuda_type(q_.tensor.dtype)) + ";\n" +
                 constant("kBatch", q_.tensor.shape[0]) + constant("kPositions", q_.tensor.shape[1]) +
                 constant("kGroups", groups()) + constant("kHeads", job_.queries->heads) + constant("kSize", size()) +
                 constant("kLength", k_.tensor.shape[2]) + constant("kRows", job_.queries->rows) +
                 constant("kKeys", job_.queries->positions) +
                 "  static constexpr float kScale = " + float_literal(node_.float_attr("scale")) + ";\n" +
                 flag("kZeroWithoutKeys", node_.string_attr("style") == "sdpa");
    code_.num_small_workers = static_cast<uint32_t>(std::min<int64_t>(job_.num_tiles, 1 << 20));
    if (job_.staged_bytes > 0) code_.staged_bytes = "prefill_attention::Shape<V>::kStagedBytes";
  }

  void write_keys() {
    for (const Operand* operand : {&k_, &v_}) {
      const KeyRows rows = *key_rows(operand->tensor);
      context_.aligned_rows(rows.matrix, false);
      const std::string number = str(refs_.add_map(node_, rows.matrix, job_.queries->positions, size()));
      code_.body +=
          returning("mpk::prefill_attention::Keys", operand->name + "(const Job& job, uint32_t b, uint32_t g)",
                    "{reinterpret_cast<const void*>(job.refs()[" + number + "]), int(b) * " + str(rows.rows_of_batch) +
                        " + int(g) * " + str(rows.rows_of_group) + ", int(g) * " +
                        str(rows.columns_of_group / kBoxColumns) + "}");
    }
  }

  void write_rows() {
    const auto row = [&](const Tensor& t, bool writable) {
      return refs_.pointer(node_, t, writable) + element_at(t, {"b", "s", "h"});
    };
    const std::string at = "(const Job& job, uint32_t b, uint32_t s, uint32_t h)";
    code_.body += flag("kAlignedQ", context_.aligned_rows(q_.tensor, true)) +
                  returning("const T*", "q" + at, row(q_.tensor, false)) +
                  flag("kAlignedY", context_.aligned_rows(y_, true)) + returning("T*", "y" + at, row(y_, true));
  }

  void write_visible() {
    code_.body += flag("kHasLimit", limit_ != nullptr) + flag("kHasMask", mask_ != nullptr);
    if (limit_)
      code_.body +=
          returning("int64_t", "limit(const Job& job, uint32_t b, uint32_t s)",
                    "*(" + refs_.pointer(node_, limit_->tensor) + element_at(limit_->tensor, {"b", "s"}) + ")");
    if (!mask_) return;
    const Tensor& m = mask_->tensor;
    const std::string pointer = refs_.pointer(node_, m);
    const std::string at = "*(" + pointer + element_at(m, {"b", "h", "s", "position"}) + ")";
    code_.body += returning("float", "mask(const Job& job, uint32_t b, uint32_t h, uint32_t s, uint32_t position)",
                            m.dtype == DType::kBool ? at + " ? 0.0f : -infinity()" : "to_float(" + at + ")");
  }

  int64_t heads() const { return q_.tensor.shape[2]; }
  int64_t size() const { return q_.tensor.shape[3]; }
  int64_t groups() const { return k_.tensor.shape[1]; }

  KernelContext& context_;
  const Job& job_;
  const Node& node_;
  const Operand &q_, &k_, &v_;
  const Operand *mask_, *limit_;  // null where absent
  const Tensor& y_;
  JobCode code_;
  Refs refs_;
};

class PrefillAttentionJob : public Emitter {
  JobCode emit(const JobPlace& place) const override { return PrefillAttentionWriter(place).run(); }
};

const PrefillAttentionJob kEmitter{};
[[maybe_unused]] const bool kRegistered = emitters().add("prefill_attention", kEmitter);

}  // namespace
}  // namespace mpk::codegen
