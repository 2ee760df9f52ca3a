// varlen_attention: the loader finds rows of keys and values by a list; queries are read in place.
#include <algorithm>

#include "../../codegen/job_code.h"
#include "../../codegen/pattern.h"
#include "../../codegen/text.h"
#include "../../schedule/refusals.h"
#include "../../schedule/staging.h"
#include "flash.h"
#include "scores.h"

namespace mpk {
namespace {

using namespace codegen;

// The lengths of sequences are known at run time only, so keys come row by row, and as many tiles may be partly empty.
int64_t num_ends(const Node& node) { return node.operand("cu_seq_lens_q").tensor.shape[0]; }

// The tiles of ragged sequences' tokens, for heads that share keys.
int64_t ragged_tiles(const Node& node, const FlashFields& own) {
  const int64_t tokens = node.operand("q").tensor.shape[0];
  return tokens * own.heads / own.rows + std::min(num_ends(node), tokens);
}

class VarlenAttentionWriter {
 public:
  explicit VarlenAttentionWriter(const JobPlace& place)
      : context_(place.context),
        job_(place.job),
        own_(fields_of<FlashFields>(job_.cut)),
        node_(place.node()),
        q_(node_.operand("q").tensor),
        y_(node_.operands.back().tensor),
        code_{"VarlenAttention", "varlen_attention::compute", "varlen_attention::load", "", "", {node_.def->header}},
        refs_(context_, code_.refs) {}

  JobCode run() {
    write_sizes();
    for (const char* name : {"q", "k_new", "v_new"}) write_rows(name, "uint32_t t", "t");
    for (const char* name : {"k_cache", "v_cache"}) write_rows(name, "int64_t row", "row");
    write_numbers("row", "int64_t", node_.operand("read_index"));
    write_numbers("end_q", "int32_t", node_.operand("cu_seq_lens_q"));
    write_numbers("end_k", "int32_t", node_.operand("cu_seq_lens_k"));
    return std::move(code_);
  }

 private:
  void write_sizes() {
    code_.body = "  using T = " + std::string(cuda_type(q_.dtype)) + ";\n" + constant("kTokens", q_.shape[0]) +
                 constant("kBlocks", ragged_tiles(node_, own_)) + constant("kGroups", groups()) + constants(own_) +
                 constant("kSize", q_.shape[2]) + constant("kValueSize", y_.shape[2]) +
                 constant("kEnds", num_ends(node_)) + constant("kWindow", node_.int_attr("window")) +
                 scores(refs_, node_, true) + flag("kAlignedQ", context_.aligned_rows(q_, true)) +
                 flag("kAlignedY", context_.aligned_rows(y_, true)) +
                 returning("T*", "y(const Job& job, uint32_t t, uint32_t h)",
                           refs_.pointer(node_, y_, true) + element_at(y_, {"t", "h"}));
    code_.body +=
        returning("int32_t", "num_read(const Job& job)", refs_.number(node_.operand("read_index").tensor.shape[0]));
    code_.body += returning("int32_t", "cache_rows(const Job& job)", refs_.number(cache().shape[0]));
    code_.num_small_workers = static_cast<uint32_t>(std::min<int64_t>(job_.cut.num_tiles, 1 << 20));
    code_.staged_bytes = "prefill_attention::Shape<V>::kStagedBytes";
  }

  // Addresses of a head's row, of a token or of the cache.
  void write_rows(const std::string& name, const std::string& parameter, const std::string& index) {
    const Tensor& t = node_.operand(name).tensor;
    if (name != "q") context_.aligned_rows(t, false);  // which it is, if its buffer is
    code_.body += returning("const T*", name + "(const Job& job, " + parameter + ", uint32_t h)",
                            refs_.pointer(node_, t) + element_at(t, {index, "h"}));
  }

  void write_numbers(const std::string& name, const std::string& type, const Operand& operand) {
    code_.body += returning(type, name + "(const Job& job, uint32_t i)",
                            "*(" + refs_.pointer(node_, operand.tensor) + element_at(operand.tensor, {"i"}) + ")");
  }

  const Tensor& cache() const { return node_.operand("k_cache").tensor; }
  int64_t heads() const { return q_.shape[1]; }
  int64_t groups() const { return cache().shape[1]; }

  KernelContext& context_;
  const Job& job_;
  const FlashFields own_;
  const Node& node_;
  const Tensor &q_, &y_;
  JobCode code_;
  Refs refs_;
};

class VarlenAttention : public FlashKernel {
 public:
  VarlenAttention() : FlashKernel("varlen_attention.flash") {}

 private:
  std::optional<std::string> refuses_products(const Node& node) const override {
    return refuses_queries(node, node.operand("k_cache").tensor.shape[1]);
  }

  std::optional<std::string> refuses_own(const Node& node) const override {
    const Tensor &cache = node.operand("k_cache").tensor, &list = node.operand("read_index").tensor;
    if (cache.shape[0] < 1) return "the cache is empty";
    for (const int64_t rows : {cache.shape[0], list.shape[0]})
      if (rows >= int64_t{1} << 31) return str(rows) + " rows of a cache are not supported";
    for (const char* name : {"k_new", "v_new", "k_cache", "v_cache"})
      if (!has_aligned_rows(node.operand(name).tensor))
        return "rows of " + std::string(name) + " do not begin at multiples of 16 bytes";
    if (auto why = refuses_dtype(node.operand("read_index"), DType::kI64)) return why;
    for (const char* name : {"cu_seq_lens_q", "cu_seq_lens_k"})
      if (auto why = refuses_dtype(node.operand(name), DType::kI32)) return why;
    return std::nullopt;
  }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    const Node& node = schedule.graph.nodes()[job.body.front()];
    const Tensor &q = node.operand("q").tensor, &k = node.operand("k_cache").tensor;
    const HeadSizes sizes = HeadSizes::of(node);
    const FlashFields own = flash_fields(schedule.warps, q.shape[1] / k.shape[1], sizes, true);
    Cut cut = job.cut;
    cut.num_tiles = k.shape[1] * ragged_tiles(node, own);
    cut.staged_bytes = flash_bytes(schedule.warps, sizes, true);
    if (cut.staged_bytes > room(schedule)) return {};
    cut.fields = list_fields(own);
    // As if all sequences were equally long and shared the listed rows.
    const auto listed = double(node.operand("read_index").tensor.shape[0]);
    const double each = listed / double(std::max<int64_t>(num_ends(node) - 1, 1));
    const int64_t window = node.int_attr("window");
    cut.cost_ns = flash_ns(schedule, job, window > 0 ? std::min(each, double(window)) : each);
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    const auto own = fields_of<FlashFields>(proof.cut());
    const Tensor& y = output(proof.first()).tensor;
    const HeadSizes sizes = HeadSizes::of(proof.first());
    const bool is_cut = own.heads > 0 && own.rows > 0;
    const int64_t tiles = is_cut ? y.shape[1] / own.heads * ragged_tiles(proof.first(), own) : 0;
    prove_flash(proof, own, y.shape[1], tiles, flash_bytes(proof.schedule().warps, sizes, true),
                sizes.entry_bytes(own.positions, true));
  }

  JobCode emit(const JobPlace& place) const override { return VarlenAttentionWriter(place).run(); }
};

const VarlenAttention kKernel{};
[[maybe_unused]] const bool kRegistered = add_kernel("varlen_attention", kKernel);

}  // namespace
}  // namespace mpk
