// varlen_attention: rows of keys and values that the loader finds by a list, and rows of queries that are read where
// they are.
#include <algorithm>

#include "../../arch/arch.h"
#include "../checks.h"
#include "../emitter.h"
#include "../pattern.h"
#include "../text.h"

namespace mpk::codegen {
namespace {

class VarlenAttentionWriter {
 public:
  explicit VarlenAttentionWriter(const JobPlace& place)
      : context_(place.context),
        job_(place.job),
        node_(place.node()),
        q_(node_.operand("q").tensor),
        y_(node_.operands.back().tensor),
        code_{"VarlenAttention", "varlen_attention::compute", "varlen_attention::load", "", "", {node_.def->header}},
        refs_(context_, code_.refs) {}

  JobCode run() {
    check();
    write_sizes();
    for (const char* name : {"q", "k_new", "v_new"}) write_rows(name, "uint32_t t", "t");
    for (const char* name : {"k_cache", "v_cache"}) write_rows(name, "int64_t row", "row");
    write_numbers("row", "int64_t", node_.operand("read_index"), DType::kI64);
    write_numbers("end_q", "int32_t", node_.operand("cu_seq_lens_q"), DType::kI32);
    write_numbers("end_k", "int32_t", node_.operand("cu_seq_lens_k"), DType::kI32);
    return std::move(code_);
  }

 private:
  void check() const {
    require(q_.dtype == DType::kBF16 || q_.dtype == DType::kF16, node_,
            "q is " + std::string(info(q_.dtype).name) + ", and tensor cores take bfloat16 and float16 alone");
    require(arch_of(context_.schedule.target.arch).has_warpgroup_products, node_,
            "it needs a GPU of compute capability 9.0");
    require(groups() > 0 && heads() >= groups() && heads() % groups() == 0, node_,
            str(heads()) + " heads are no multiple of " + str(groups()) + " groups");
    require(size() == 64 || size() == 128, node_, "the head size must be 64 or 128, got " + str(size()));
    require(cache().shape[0] > 0, node_, "the cache is empty");
    for (const int64_t rows : {cache().shape[0], node_.operand("read_index").tensor.shape[0]})
      require(rows < (int64_t(1) << 31), node_, str(rows) + " rows of a cache are not supported");
    for (const Operand& operand : node_.operands)
      if (is_float(operand.tensor.dtype)) require_dtype(node_, operand, q_.dtype), require_inner_stride(node_, operand);
    for (const char* name : {"k_new", "v_new", "k_cache", "v_cache"})
      require(context_.aligned_rows(node_.operand(name).tensor, false), node_,
              "rows of " + std::string(name) + " do not begin at multiples of 16 bytes");
    require(job_.queries.has_value(), node_, "the schedule does not cut it");
  }

  void write_sizes() {
    code_.body = "  using T = " + std::string(cuda_type(q_.dtype)) + ";\n" + constant("kTokens", q_.shape[0]) +
                 constant("kBlocks", job_.queries->ragged_tiles(q_.shape[0])) + constant("kGroups", groups()) +
                 constant("kHeads", job_.queries->heads) + constant("kSize", size()) +
                 constant("kEnds", job_.queries->ends) + constant("kWindow", node_.int_attr("window")) +
                 constant("kRows", job_.queries->rows) + constant("kKeys", job_.queries->positions) +
                 "  static constexpr float kScale = " + float_literal(node_.float_attr("scale")) + ";\n" +
                 flag("kZeroWithoutKeys", true) + flag("kHasMask", false) +
                 flag("kAlignedQ", context_.aligned_rows(q_, true)) +
                 flag("kAlignedY", context_.aligned_rows(y_, true)) +
                 returning("T*", "y(const Job& job, uint32_t t, uint32_t h)",
                           refs_.pointer(node_, y_, true) + element_at(y_, {"t", "h"}));
    code_.body +=
        returning("int32_t", "num_read(const Job& job)", refs_.number(node_.operand("read_index").tensor.shape[0]));
    code_.body += returning("int32_t", "cache_rows(const Job& job)", refs_.number(cache().shape[0]));
    code_.num_small_workers = static_cast<uint32_t>(std::min<int64_t>(job_.num_tiles, 1 << 20));
    code_.staged_bytes = "prefill_attention::Shape<V>::kStagedBytes";
  }

  // Of one token, or one row of the cache, a head's.
  void write_rows(const std::string& name, const std::string& parameter, const std::string& index) {
    const Tensor& t = node_.operand(name).tensor;
    code_.body += returning("const T*", name + "(const Job& job, " + parameter + ", uint32_t h)",
                            refs_.pointer(node_, t) + element_at(t, {index, "h"}));
  }

  void write_numbers(const std::string& name, const std::string& type, const Operand& operand, DType dtype) {
    require_dtype(node_, operand, dtype);
    code_.body += returning(type, name + "(const Job& job, uint32_t i)",
                            "*(" + refs_.pointer(node_, operand.tensor) + element_at(operand.tensor, {"i"}) + ")");
  }

  const Tensor& cache() const { return node_.operand("k_cache").tensor; }
  int64_t heads() const { return q_.shape[1]; }
  int64_t size() const { return q_.shape[2]; }
  int64_t groups() const { return cache().shape[1]; }

  KernelContext& context_;
  const Job& job_;
  const Node& node_;
  const Tensor &q_, &y_;
  JobCode code_;
  Refs refs_;
};

class VarlenAttentionJob : public Emitter {
  JobCode emit(const JobPlace& place) const override { return VarlenAttentionWriter(place).run(); }
};

const VarlenAttentionJob kEmitter{};
[[maybe_unused]] const bool kRegistered = emitters().add("varlen_attention", kEmitter);

}  // namespace
}  // namespace mpk::codegen
