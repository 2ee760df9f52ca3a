// prefill_attention: the loader copies keys and values as boxes; queries are read in place.
#include "../../codegen/job_code.h"
#include "../../codegen/pattern.h"
#include "../../codegen/text.h"
#include "../../schedule/staging.h"
#include "flash.h"
#include "key_rows.h"
#include "scores.h"

namespace mpk {
namespace {

using namespace codegen;

class PrefillAttentionWriter {
 public:
  explicit PrefillAttentionWriter(const JobPlace& place)
      : context_(place.context),
        job_(place.job),
        own_(fields_of<FlashFields>(job_.cut)),
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
    write_sizes();
    write_keys();
    write_rows();
    write_visible();
    return std::move(code_);
  }

 private:
  void write_sizes() {
    code_.body = "  using T = " + std::string(cuda_type(q_.tensor.dtype)) + ";\n" +
                 constant("kBatch", q_.tensor.shape[0]) + constant("kPositions", q_.tensor.shape[1]) +
                 constant("kGroups", groups()) + constants(own_) + constant("kSize", q_.tensor.shape[3]) +
                 constant("kValueSize", y_.shape[3]) + constant("kLength", k_.tensor.shape[2]) +
                 scores(refs_, node_, node_.string_attr("style") == "sdpa");
    code_.num_small_workers = static_cast<uint32_t>(std::min<int64_t>(job_.cut.num_tiles, 1 << 20));
    if (job_.cut.staged_bytes > 0) code_.staged_bytes = "prefill_attention::Shape<V>::kStagedBytes";
  }

  void write_keys() {
    for (const Operand* operand : {&k_, &v_}) {
      const KeyRows rows = *key_rows(operand->tensor);
      context_.aligned_rows(rows.matrix, false);
      const int64_t columns = rows.in_blocks ? operand->tensor.shape[3] : kBoxColumns;
      const MapLayout layout = rows.in_blocks ? kMapOfBlocks : kMapOfColumns;
      const std::string number = str(refs_.add_map(node_, rows.matrix, own_.positions, columns, layout));
      code_.body +=
          returning("mpk::prefill_attention::Keys", operand->name + "(const Job& job, uint32_t b, uint32_t g)",
                    "{reinterpret_cast<const void*>(job.refs()[" + number + "]), int(b) * " + str(rows.rows_of_batch) +
                        " + int(g) * " + str(rows.rows_of_group) + ", int(g) * " +
                        str(rows.columns_of_group / (rows.in_blocks ? kBoxColumns : 1)) + "}");
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
    code_.body += flag("kHasLimit", limit_ != nullptr);
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
  int64_t groups() const { return k_.tensor.shape[1]; }

  KernelContext& context_;
  const Job& job_;
  const FlashFields own_;
  const Node& node_;
  const Operand &q_, &k_, &v_;
  const Operand *mask_, *limit_;  // null where absent
  const Tensor& y_;
  JobCode code_;
  Refs refs_;
};

class PrefillAttention : public FlashKernel {
 public:
  PrefillAttention() : FlashKernel("prefill_attention.flash") {}

 private:
  static constexpr int64_t kMostParts = 4;

  std::optional<std::string> refuses_products(const Node& node) const override {
    const Operand &k = node.operand("k"), &v = node.operand("v");
    if (const auto refusal = refuses_queries(node, k.tensor.shape[1])) return refusal;
    for (const Operand* operand : {&k, &v})
      if (!key_rows(operand->tensor))
        return "operand " + operand->name +
               " is no matrix of positions: its strides must be multiples of that from position to position, or that "
               "from group to group stay within a position, and all multiples of 16 bytes, or of 64 elements where "
               "heads are";
    return std::nullopt;
  }

  std::optional<std::string> refuses_own(const Node& node) const override {
    const Operand* limit = node.find("limit");
    return limit == nullptr ? std::nullopt : refuses_dtype(*limit, DType::kI64);
  }

  static int64_t count(const Node& node, const FlashFields& own) {
    const Tensor& q = node.operand("q").tensor;
    return q.shape[0] * (q.shape[2] / own.heads) * ((q.shape[1] * own.heads + own.rows - 1) / own.rows);
  }

  static int64_t staged_bytes(const WarpLayout& warps, const Node& node, const FlashFields& own) {
    return flash_bytes(warps, HeadSizes::of(node), own.rows < kWarpRows * warps.consumers);
  }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    const Node& node = schedule.graph.nodes()[job.body.front()];
    const WarpLayout& warps = schedule.warps;
    const Tensor &q = node.operand("q").tensor, &k = node.operand("k").tensor;
    FlashFields own = flash_fields(warps, q.shape[2] / k.shape[1], HeadSizes::of(node), false);
    const auto halved = [&] {
      FlashFields half = own;
      half.rows /= 2;
      return half;
    };
    // Smaller tiles, whose warps share the keys, while no worker has more than one tile and every warp has keys.
    const int64_t most_parts = std::min(kMostParts, (q.shape[1] + own.positions - 1) / own.positions);
    while (kWarpRows * warps.consumers / own.rows * 2 <= most_parts &&
           count(node, halved()) <= schedule.target.num_workers)
      own = halved();
    Cut cut = job.cut;
    cut.staged_bytes = staged_bytes(warps, node, own);
    if (cut.staged_bytes > room(schedule)) return {};
    cut.num_tiles = count(node, own);
    cut.fields = list_fields(own);
    // With limits: as if each saw those before it, from the first on.
    const double all = double(k.shape[2]);
    cut.cost_ns = flash_ns(schedule, job, node.find("limit") ? std::min(all, double(q.shape[1] + 1) / 2) : all);
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    const auto own = fields_of<FlashFields>(proof.cut());
    const Node& node = proof.first();
    const WarpLayout& warps = proof.schedule().warps;
    const Tensor& y = output(node).tensor;
    for (const Operand& operand : node.operands)
      proof.require(!loader_reads(warps, node, operand) || operand.tensor.dtype != y.dtype ||
                        key_rows(operand.tensor).has_value(),
                    name_buffer(proof.schedule(), operand.tensor.buffer) + " cannot come in boxes of positions");
    const int64_t entry = HeadSizes::of(node).entry_bytes(own.positions, false);
    const bool is_cut = own.heads > 0 && own.rows > 0;
    prove_flash(proof, own, y.shape[2], is_cut ? count(node, own) : 0, staged_bytes(warps, node, own), entry);
  }

  JobCode emit(const JobPlace& place) const override { return PrefillAttentionWriter(place).run(); }
};

const PrefillAttention kKernel{};
[[maybe_unused]] const bool kRegistered = add_kernel("prefill_attention", kKernel);

}  // namespace
}  // namespace mpk
