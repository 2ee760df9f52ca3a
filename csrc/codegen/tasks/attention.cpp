// attention: a cache that the loader streams, and rows of q and of the new position that come through chains of row
// tasks.
#include "../../schedule/staging.h"
#include "../chain.h"
#include "../checks.h"
#include "../emitter.h"
#include "../pattern.h"
#include "../text.h"

namespace mpk::codegen {
namespace {

class AttentionWriter {
 public:
  explicit AttentionWriter(const JobPlace& place)
      : context_(place.context),
        phase_(place.phase),
        job_(place.job),
        node_(place.node()),
        q_(node_.operand("q")),
        k_cache_(node_.operand("k_cache")),
        v_cache_(node_.operand("v_cache")),
        k_new_(node_.find("k_new")),
        v_new_(node_.find("v_new")),
        slot_(node_.find("slot")),
        mask_(node_.find("mask")),
        limit_(node_.find("limit")),
        y_(node_.operands.back().tensor),
        dtype_(q_.tensor.dtype),
        code_{"Attention", "attention::compute", "attention::load", "attention::Shape<V>::kStagedBytes",
              "",          {node_.def->header}},
        refs_(context_, code_.refs) {}

  JobCode run() {
    require(job_.body.size() == 1 && job_.epilogue.empty(), node_, "attention takes no companions and no epilogue");
    check_shapes();
    check_operands();
    write_sizes();
    write_caches();
    write_mask();
    write_result();
    write_chains();
    return std::move(code_);
  }

 private:
  void check_shapes() const {
    require_row_dtype(node_, dtype_);
    require(groups() > 0 && heads() % groups() == 0, node_,
            str(heads()) + " heads are no multiple of " + str(groups()) + " groups");
    require(job_.pieces.has_value(), node_, "it has no heads, or more than fit shared memory beside the ring");
    require(size() % 8 == 0 && size() >= 8 && size() <= 256, node_,
            "the head size must be a multiple of 8 up to 256, got " + str(size()));
    require(length() > 0 && length() < (int64_t(1) << 31), node_,
            "a cache of " + str(length()) + " positions is not supported");
    require((k_new_ == nullptr) == (v_new_ == nullptr) && (k_new_ == nullptr) == (slot_ == nullptr), node_,
            "k_new, v_new and slot go together");
    const std::string style = node_.string_attr("style");
    require(style == "sdpa" || style == "eager", node_, "the style must be sdpa or eager, got " + style);
  }

  void check_operands() {
    for (const Operand* cache : {&k_cache_, &v_cache_}) {
      require_dtype(node_, *cache, dtype_);
      require(context_.aligned_rows(cache->tensor, false) && has_short_rows(cache->tensor), node_,
              "operand " + cache->name +
                  " needs offsets and strides that are multiples of 16 bytes, and less than 4 GiB between positions");
    }
    for (const Operand& operand : node_.operands)
      if (&operand != mask_ && &operand != limit_ && &operand != slot_) require_inner_stride(node_, operand);
    for (const Operand* number : {slot_, limit_})
      if (number) require_dtype(node_, *number, DType::kI64);
    if (mask_)
      require(mask_->tensor.dtype == DType::kBool || is_row_dtype(mask_->tensor.dtype), node_,
              "the mask must be bool, float32, float16 or bfloat16");
  }

  void write_sizes() {
    const Pieces& pieces = *job_.pieces;
    const int64_t workers = context_.schedule.target.num_workers;
    code_.body =
        "  using T = " + std::string(cuda_type(dtype_)) + ";\n" + constant("kBatch", batch()) +
        constant("kGroups", groups()) + constant("kPasses", heads() / groups() / pieces.results) +
        constant("kHeads", pieces.results) + constant("kFewHeads", pieces.few_results) + constant("kSize", size()) +
        constant("kLength", length()) + flag("kZeroWithoutKeys", node_.string_attr("style") == "sdpa") +
        constant("kWorkers", workers) + returning("int64_t", "limit(const Job& job, uint32_t b)", limit()) +
        constant("kPartialBytes", pieces.result_bytes) +
        returning("uint8_t*", "partials(const Job& job)", refs_.partials(pieces)) +
        "  static constexpr float kScale = " + float_literal(node_.float_attr("scale")) + ";\n" +
        flag("kHasNew", k_new_ != nullptr) + flag("kHasMask", mask_ != nullptr) + flag("kOverlaps", pieces.overlap);
  }

  void write_caches() {
    code_.body +=
        "  static constexpr uint32_t kPitchK = " + str(pitch(k_cache_)) + ", kPitchV = " + str(pitch(v_cache_)) +
        ";\n" + returning("int64_t", "slot(const Job& job)", slot_ ? "*" + refs_.pointer(node_, slot_->tensor) : "-1");
    for (const Operand* cache : {&k_cache_, &v_cache_})
      code_.body += returning("T*", cache->name + "(const Job& job, uint32_t b, uint32_t g)",
                              refs_.pointer(node_, cache->tensor, true) + element_at(cache->tensor, {"b", "g"}));
  }

  void write_mask() {
    if (!mask_) return;
    const Tensor& m = mask_->tensor;
    const std::string pointer = refs_.pointer(node_, m);
    const std::string at = pointer + "[" + element_at(m, {"b", "h", "position"}).substr(3) + "]";
    code_.body += returning("float", "mask(const Job& job, uint32_t b, uint32_t h, uint32_t position)",
                            m.dtype == DType::kBool ? at + " ? 0.0f : -infinity()" : "to_float(" + at + ")");
  }

  void write_result() {
    code_.body +=
        flag("kPolled", context_.polled(y_.buffer)) +
        returning(context_.polled(y_.buffer) ? "uint16_t*" : "T*", "y(const Job& job, uint32_t b, uint32_t h)",
                  refs_.pointer(node_, y_, true) + element_at(y_, {"b", "h"}));
  }

  // How the rows of q, of k_new and of v_new come. Chains number their references from 0, so that equal chains have
  // equal code.
  void write_chains() {
    bool early = true;
    for (const Operand* first : {slot_, limit_})
      if (first) early &= context_.known_before(first->tensor.buffer, phase_);
    std::vector<ChainCode> chains;
    std::vector<bool> applies;
    using Named = std::pair<const char*, const Operand*>;
    for (const auto& [name, operand] : {Named{"Q", &q_}, Named{"K", k_new_}, Named{"V", v_new_}}) {
      if (!operand) continue;
      require_dtype(node_, *operand, dtype_);
      const Chain chain = find_chain(context_, job_.prologue, node_, operand->tensor);
      std::vector<uint64_t> numbered;
      Refs own(context_, numbered);
      chains.push_back(emit_chain(context_, own, node_, chain, {.phase = phase_, .batch_row = true}));
      applies.push_back(!chain.tasks.empty());
      const ChainCode& made = chains.back();
      code_.body += "  static constexpr uint32_t " + std::string("kRefs") + name + " = " +
                    str(static_cast<int64_t>(code_.refs.size())) + ";\n" +
                    (made.text == chains.front().text && chains.size() > 1
                         ? std::string("  using Rows") + name + " = RowsQ;\n"
                         : std::string("  struct Rows") + name + " {\n" + made.text + "  };\n");
      code_.refs.insert(code_.refs.end(), numbered.begin(), numbered.end());
      early &= made.early;
      code_.headers.insert(code_.headers.end(), made.headers.begin(), made.headers.end());
    }
    code_.body += flag("kOneChain", chains.size() == 3 && chains[0].text == chains[1].text && !applies[2] &&
                                        chains[2].fetch == chains[0].fetch) +
                  flag("kEarly", early);
  }

  std::string limit() {
    if (!limit_) return "kLength";
    return refs_.pointer(node_, limit_->tensor) + "[int64_t(b) * " + str(limit_->tensor.strides[0]) + "]";
  }

  // Bytes from position to position.
  int64_t pitch(const Operand& cache) const { return cache.tensor.strides[2] * size_bytes(dtype_); }
  int64_t batch() const { return q_.tensor.shape[0]; }
  int64_t heads() const { return q_.tensor.shape[1]; }
  int64_t size() const { return q_.tensor.shape[2]; }
  int64_t groups() const { return k_cache_.tensor.shape[1]; }
  int64_t length() const { return k_cache_.tensor.shape[2]; }

  KernelContext& context_;
  const int phase_;
  const Job& job_;
  const Node& node_;
  const Operand &q_, &k_cache_, &v_cache_;
  const Operand *k_new_, *v_new_, *slot_, *mask_, *limit_;  // null where absent
  const Tensor& y_;
  const DType dtype_;
  JobCode code_;
  Refs refs_;
};

class AttentionJob : public Emitter {
  bool takes_companions() const override { return true; }
  JobCode emit(const JobPlace& place) const override { return AttentionWriter(place).run(); }
};

const AttentionJob kEmitter{};
[[maybe_unused]] const bool kRegistered = emitters().add("attention", kEmitter);

}  // namespace
}  // namespace mpk::codegen
