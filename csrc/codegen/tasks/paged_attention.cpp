// paged_attention: pages that a table names, which the loader streams.
#include "../checks.h"
#include "../text.h"
#include "attention_writer.h"

namespace mpk::codegen {
namespace {

class PagesWriter : public AttentionWriter {
 public:
  explicit PagesWriter(const JobPlace& place)
      : AttentionWriter(place, "k_pages", "v_pages", "PagedAttention"),
        table_(node_.operand("block_table")),
        length_(node_.operand("length")) {}

 private:
  int64_t page_size() const { return keys_.tensor.shape[1]; }
  int64_t groups() const override { return keys_.tensor.shape[2]; }
  int64_t length() const override { return table_.tensor.shape[1] * page_size(); }
  bool zero_without_keys() const override { return true; }
  std::vector<const Operand*> lengths() const override { return {&table_, &length_}; }

  void check() const override {
    require((k_new_ == nullptr) == (v_new_ == nullptr), node_, "k_new and v_new go together");
    for (const Operand* numbers : {&table_, &length_}) require_dtype(node_, *numbers, DType::kI32);
    const int64_t num_pages = keys_.tensor.shape[0];
    require(num_pages < (int64_t(1) << 31), node_, str(num_pages) + " pages are not supported");
  }

  std::string limit() override {
    return refs_.pointer(node_, length_.tensor) + "[int64_t(b) * " + str(length_.tensor.strides[0]) + "]";
  }

  void write_positions() override {
    code_.body +=
        pitches(1) + constant("kPageSize", page_size()) + constant("kNumPages", keys_.tensor.shape[0]) +
        constant("kPieceTiles", job_.pieces->tiles) + constant("kPieces", job_.pieces->count) +
        returning("int32_t", "page(const Job& job, uint32_t b, uint32_t m)",
                  refs_.pointer(node_, table_.tensor) + "[" + element_at(table_.tensor, {"b", "m"}).substr(3) + "]");
    for (const Operand* pages : {&keys_, &values_}) {
      const Tensor& t = pages->tensor;
      code_.body += returning("T*", pages->name + "(const Job& job, int32_t page, uint32_t g)",
                              refs_.pointer(node_, t, true) + " + int64_t(page) * " + str(t.strides[0]) +
                                  " + int64_t(g) * " + str(t.strides[2]));
    }
  }

  const Operand &table_, &length_;
};

class PagedAttentionJob : public Emitter {
  bool takes_companions() const override { return true; }
  JobCode emit(const JobPlace& place) const override { return PagesWriter(place).run(); }
};

const PagedAttentionJob kEmitter{};
[[maybe_unused]] const bool kRegistered = emitters().add("paged_attention", kEmitter);

}  // namespace
}  // namespace mpk::codegen
