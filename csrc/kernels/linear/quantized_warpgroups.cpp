// Linears with quantised weights beside an x that is not, with 9 to 64 rows of x (quantized_warpgroups.cuh).
#include "torch_mpk/abi/sizes.h"
#include "warpgroups.h"

namespace mpk {
namespace {

constexpr int64_t kFewestRows = 9;     // of x: fewer have a kernel of warps
constexpr int64_t kGroupColumns = 64;  // that share a scale; fewer would take too many registers
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

  // Numbers are converted slice by slice, and take scales of x's type.
  std::optional<std::string> refuses_format(const Node& node) const override {
    const WeightFormat f = WeightFormat::of(node);
    const DType dtype = node.operand("x").tensor.dtype;
    if (f.quantizes_x()) return "x is quantised";
    if (!has_blocks_of_rows(f) || (f.block_columns % kGroupColumns != 0 && f.block_columns < f.columns))
      return "blocks of scales are not whole blocks of " + std::to_string(kWarpRows) + " x " +
             std::to_string(kGroupColumns);
    if (f.scales_rows()) return std::nullopt;
    if (f.block_rows != 1 && f.block_rows < f.rows) return "rows share scales";
    if (f.scale_dtype != dtype || (f.zero == ZeroKind::kAdded && f.zero_bytes != size_bytes(dtype)))
      return "scales are " + std::string(info(f.scale_dtype).name) + ", and x is " + info(dtype).name;
    return std::nullopt;
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
