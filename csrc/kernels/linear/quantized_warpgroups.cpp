// Linears with quantised weights beside an x that is not, with 9 to 64 rows of x (quantized_warpgroups.cuh).
#include "../../codegen/text.h"
#include "torch_mpk/abi/sizes.h"
#include "warpgroups.h"

namespace mpk {
namespace {

constexpr int64_t kFewestRows = 9;  // of x: fewer have a kernel of warps
// A warpgroup takes so long for a line, and for each 32 columns of it beside that. Samples of an H200's program counter
// said 170 and 155, before loads went ahead of conversions. Weights of 4 bits take two thirds of that beside an x that
// is prepared.
constexpr double kLineNs = 170, kSliceNs = 120, kFourBitSliceNs = 80;
constexpr int64_t kSliceColumns = 32;
// Producer warps prepare so many rows of x for 4-bit weights. With more, warpgroups would wait for them: see "Words of
// 4-bit weights in front of their scales" in docs/experiments/rows.md.
constexpr int64_t kMostPreparedRows = 16;

class FourBitsWriter : public WarpgroupsWriter {
 public:
  explicit FourBitsWriter(const codegen::JobPlace& place)
      : WarpgroupsWriter(place, "FourBitWarpgroups", "linear::compute_four_bit_warpgroups",
                         "torch_mpk/device/tasks/four_bit_warpgroups.cuh") {}

 private:
  std::string write_places() override { return WarpgroupsWriter::write_places() + codegen::flag("kPreparesX", true); }
};

class QuantizedWarpgroups : public WarpgroupsKernel {
 public:
  QuantizedWarpgroups() : WarpgroupsKernel("quantized_linear.warpgroups", kFewestRows) {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    return refuses_reduced(node);
  }

  double line_ns(const WeightFormat& format, int64_t rows) const override {
    const double slices = double(format.columns_of(kWarpgroupLineBytes) / kSliceColumns);
    return kLineNs + (prepares_x(format, rows) ? kFourBitSliceNs : kSliceNs) * slices;
  }

  std::optional<std::string> refuses_format(const Node& node) const override {
    if (auto refusal = refuses_conversion(node)) return refusal;
    return refuses_lines(WeightFormat::of(node));
  }

  bool prepares_x(const WeightFormat& format, int64_t rows) const override {
    return format.bits() == 4 && rows <= kMostPreparedRows;
  }

  codegen::JobCode emit(const codegen::JobPlace& place) const override {
    if (prepares_x(WeightFormat::of(place.node()), place.node().operand("x").tensor.shape[0]))
      return FourBitsWriter(place).run();
    return WarpgroupsWriter(place, "QuantizedWarpgroups", "linear::compute_quantized_warpgroups",
                            "torch_mpk/device/tasks/quantized_warpgroups.cuh")
        .run();
  }
};

const QuantizedWarpgroups kKernel{};
[[maybe_unused]] const bool kRegistered = add_kernel("quantized_linear", kKernel);

}  // namespace
}  // namespace mpk
