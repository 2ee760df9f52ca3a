// FP8 linears of 8 to 64 rows of an x that is quantised already (e4m3_warpgroups.cuh).
#include "../../codegen/text.h"
#include "e4m3.h"
#include "warpgroups.h"

namespace mpk {
namespace {

constexpr int64_t kFewestRows = 8;  // of x: fewer are quantised by every worker in less time than phases take
constexpr double kLineNs = 470;     // for 128 columns, by samples of an H200's program counter
constexpr int64_t kLineColumns = 128;

class E4M3WarpgroupsWriter : public WarpgroupsWriter {
 public:
  explicit E4M3WarpgroupsWriter(const codegen::JobPlace& place)
      : WarpgroupsWriter(place, "E4M3Warpgroups", "linear::compute_e4m3_warpgroups",
                         "torch_mpk/device/tasks/e4m3_warpgroups.cuh") {}

 private:
  std::string write_places() override {
    return WarpgroupsWriter::write_places() + codegen::constant("kElementBytes", element_) +
           x_scales_members(refs_, first_);
  }
};

class E4M3Warpgroups : public WarpgroupsKernel {
 public:
  E4M3Warpgroups() : WarpgroupsKernel("e4m3_linear.warpgroups", kFewestRows) {}
  using WarpgroupsKernel::refuses_size;

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override { return refuses_e4m3(node); }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    if (auto refusal = refuses_e4m3(schedule, job)) return refusal;
    return WarpgroupsKernel::refuses(schedule, job);
  }

  double line_ns(const WeightFormat&) const override { return kLineNs; }

  std::optional<std::string> refuses_format(const Node& node) const override {
    const WeightFormat f = WeightFormat::of(node);
    if (f.row_bytes() % kLineColumns == 0 && (f.scales_rows() || f.block_columns % kLineColumns == 0) &&
        (f.x_columns == kLineColumns || f.x_columns >= f.columns))
      return std::nullopt;
    return "scales are not those of whole lines of " + std::to_string(kLineColumns) + " columns";
  }

  codegen::JobCode emit(const codegen::JobPlace& place) const override { return E4M3WarpgroupsWriter(place).run(); }
};

const E4M3Warpgroups kKernel{};
[[maybe_unused]] const bool kRegistered = add_kernel("e4m3_linear", kKernel);

}  // namespace

bool multiplies_lines(const TBGraph& graph, const Node& node) {
  const Tensor& x = node.operand("x").tensor;
  return !refuses_e4m3(node) && !kKernel.refuses_size(x) && can_be_box_stages(graph, x);
}

}  // namespace mpk
