// paged_attention over pages that a table lists, which the loader streams.
#include <tuple>

#include "../../arch/arch.h"
#include "../../codegen/pattern.h"
#include "../../codegen/text.h"
#include "../../schedule/refusals.h"
#include "split_kv_writer.h"
#include "torch_mpk/abi/sizes.h"

namespace mpk {
namespace {

using namespace codegen;

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

  std::string limit() override {
    return refs_.pointer(node_, length_.tensor) + "[int64_t(b) * " + str(length_.tensor.strides[0]) + "]";
  }

  void write_positions() override {
    const bool in_boxes = has_boxed_tiles(keys_.tensor) && has_boxed_tiles(values_.tensor);
    code_.body += pitches(1) + flag("kInBoxes", in_boxes) + constant("kPageSize", page_size()) +
                  returning("int32_t", "num_pages(const Job& job)", refs_.number(keys_.tensor.shape[0])) +
                  returning("const int32_t*", "page_at(const Job& job, uint32_t b, uint32_t m)",
                            refs_.pointer(node_, table_.tensor) + element_at(table_.tensor, {"b", "m"}));
    for (const Operand* pages : {&keys_, &values_}) {
      const Tensor& t = pages->tensor;
      code_.body += returning("T*", pages->name + "(const Job& job, int32_t page, uint32_t g)",
                              refs_.pointer(node_, t, true) + " + int64_t(page) * " + str(t.strides[0]) +
                                  " + int64_t(g) * " + str(t.strides[2]));
    }
    if (in_boxes) write_boxes("K", keys_.tensor), write_boxes("V", values_.tensor);
  }

  // Whether a tile is a box of a matrix: positions are its rows, and a group's heads are columns, if pages are whole
  // rows apart. Then a tile is one copy even if its positions are not side by side.
  bool has_boxed_tiles(const Tensor& t) const {
    const auto [page, position, group, element] = std::tie(t.strides[0], t.strides[1], t.strides[2], t.strides[3]);
    return arch_of(context_.schedule.target.arch).has_bulk_copies && size_bytes(t.dtype) == 2 &&
           page_size() % own_.positions == 0 && context_.graph().buffers()[t.buffer].kind == BufferKind::kInput &&
           position > t.shape[3] && element == 1 && page > 0 && page % position == 0 && group >= 0 &&
           (groups() - 1) * group + t.shape[3] <= position && t.shape[0] * page / position < (int64_t(1) << 31);
  }

  void write_boxes(const std::string& name, const Tensor& t) {
    const int64_t page_rows = t.strides[0] / t.strides[1];
    const int64_t rows = (t.shape[0] - 1) * page_rows + page_size();
    const Tensor matrix{t.buffer, t.dtype, {rows, t.strides[1]}, {t.strides[1], 1}, t.offset};
    code_.body += constant("kPageRows" + name, page_rows) + constant("kGroupColumns" + name, t.strides[2]) +
                  returning("const void*", "map_" + name + "(const Job& job)",
                            "job.pointer<const void>(" +
                                str(refs_.add_map(node_, matrix, own_.positions, t.shape[3], kMapOfRows)) + ")");
  }

  const Operand &table_, &length_;
};

class PagedAttention : public SplitKvKernel {
 public:
  PagedAttention() : SplitKvKernel("paged_attention.split_kv") {}

 private:
  AttentionSizes sizes_of(const Node& node) const override {
    const Tensor &q = node.operand("q").tensor, &pages = node.operand("k_pages").tensor;
    const int64_t in_page = pages.shape[1], positions = node.operand("block_table").tensor.shape[1] * in_page;
    const int64_t value_size = node.operand("v_pages").tensor.shape[3];
    return {q.shape[0], q.shape[1], pages.shape[2], q.shape[2], value_size, q.dtype, positions, in_page};
  }
  std::array<const Operand*, 2> caches_of(const Node& node) const override {
    return {&node.operand("k_pages"), &node.operand("v_pages")};
  }
  std::optional<std::string> refuses_own(const Node& node) const override {
    for (const char* name : {"block_table", "length"})
      if (auto why = refuses_dtype(node.operand(name), DType::kI32)) return why;
    const int64_t num_pages = node.operand("k_pages").tensor.shape[0];
    if (num_pages >= int64_t{1} << 31) return str(num_pages) + " pages are not supported";
    return std::nullopt;
  }
  bool has_several(const AttentionSizes& sizes, int64_t workers) const override {
    return 2 * sizes.batch * sizes.units() > workers && sizes.batch > 1;
  }
  JobCode emit(const JobPlace& place) const override { return PagesWriter(place).run(); }
};

const PagedAttention kKernel{};
[[maybe_unused]] const bool kRegistered = add_kernel("paged_attention", kKernel);

}  // namespace
}  // namespace mpk
