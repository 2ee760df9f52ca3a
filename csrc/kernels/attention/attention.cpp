// attention over a cache that the loader streams.
#include "../../codegen/pattern.h"
#include "../../codegen/text.h"
#include "../../schedule/refusals.h"
#include "scores.h"
#include "split_kv_writer.h"

namespace mpk {
namespace {

using namespace codegen;

class CacheWriter : public AttentionWriter {
 public:
  explicit CacheWriter(const JobPlace& place)
      : AttentionWriter(place, "k_cache", "v_cache", "Attention"),
        slot_(node_.find("slot")),
        limit_(node_.find("limit")) {}

 private:
  int64_t groups() const override { return keys_.tensor.shape[1]; }
  int64_t length() const override { return keys_.tensor.shape[2]; }
  bool zero_without_keys() const override { return node_.string_attr("style") == "sdpa"; }
  std::vector<const Operand*> lengths() const override { return {slot_, limit_}; }

  std::string limit() override {
    if (!limit_) return "kLength";
    return refs_.pointer(node_, limit_->tensor) + "[int64_t(b) * " + str(limit_->tensor.strides[0]) + "]";
  }

  void write_positions() override {
    code_.body += pitches(2) + returning("int64_t", "slot(const Job& job)",
                                         slot_ ? "*" + refs_.pointer(node_, slot_->tensor) : "-1");
    for (const Operand* cache : {&keys_, &values_})
      code_.body += returning("T*", cache->name + "(const Job& job, uint32_t b, uint32_t g)",
                              refs_.pointer(node_, cache->tensor, true) + element_at(cache->tensor, {"b", "g"}));
    code_.body += mask_of_position(refs_, node_);
  }

  const Operand *slot_, *limit_;  // null where absent
};

class Attention : public SplitKvKernel {
 public:
  Attention() : SplitKvKernel("attention.split_kv") {}

 private:
  AttentionSizes sizes_of(const Node& node) const override {
    const Tensor &q = node.operand("q").tensor, &cache = node.operand("k_cache").tensor;
    const int64_t value_size = node.operand("v_cache").tensor.shape[3];
    return {q.shape[0], q.shape[1], cache.shape[1], q.shape[2], value_size, q.dtype, cache.shape[2], 0};
  }
  std::array<const Operand*, 2> caches_of(const Node& node) const override {
    return {&node.operand("k_cache"), &node.operand("v_cache")};
  }
  std::optional<std::string> refuses_own(const Node& node) const override {
    if ((node.find("k_new") == nullptr) != (node.find("slot") == nullptr)) return "k_new, v_new and slot go together";
    for (const char* name : {"slot", "limit"})
      if (const Operand* number = node.find(name))
        if (auto why = refuses_dtype(*number, DType::kI64)) return why;
    return std::nullopt;
  }
  bool has_several(const AttentionSizes& sizes, int64_t workers) const override {
    return sizes.batch * sizes.units() > workers;
  }
  JobCode emit(const JobPlace& place) const override { return CacheWriter(place).run(); }
};

const Attention kKernel{};
[[maybe_unused]] const bool kRegistered = add_kernel("attention", kKernel);

}  // namespace
}  // namespace mpk
