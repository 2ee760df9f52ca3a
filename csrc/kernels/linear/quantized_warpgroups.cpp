// Linears with quantised weights beside an x that is not, with 9 to 64 rows of x (quantized_warpgroups.cuh).
#include "../../codegen/text.h"
#include "torch_mpk/abi/sizes.h"
#include "warpgroups.h"

namespace mpk {
namespace {

constexpr int64_t kFewestRows = 9;  // of x: fewer have a kernel of warps
// A warpgroup takes so long for a line, and for each 32 columns of it beside that. Samples of an H200's program counter
// said 170 and 155, before loads went ahead of conversions.
constexpr double kLineNs = 170, kSliceNs = 120;
constexpr int64_t kSliceColumns = 32;

class QuantizedWarpgroups : public WarpgroupsKernel {
 public:
  QuantizedWarpgroups() : WarpgroupsKernel("quantized_linear.warpgroups", kFewestRows) {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    return refuses_reduced(node);
  }

  double line_ns(const WeightFormat& format) const override {
    return kLineNs + kSliceNs * double(format.columns_of(kWarpgroupLineBytes) / kSliceColumns);
  }

  std::optional<std::string> refuses_format(const Node& node) const override {
    if (auto refusal = refuses_conversion(node)) return refusal;
    return refuses_lines(WeightFormat::of(node));
  }

  codegen::JobCode emit(const codegen::JobPlace& place) const override {
    return WarpgroupsWriter(place, "QuantizedWarpgroups", "linear::compute_quantized_warpgroups",
                            "torch_mpk/device/tasks/quantized_warpgroups.cuh")
        .run();
  }
};

const QuantizedWarpgroups kKernel{};
[[maybe_unused]] const bool kRegistered = add_kernel("quantized_linear", kKernel);

}  // namespace
}  // namespace mpk
