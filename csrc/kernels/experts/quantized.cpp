// Experts whose weights are quantised. Kernels with boxes are those of 16-bit weights, whose warps convert what they
// read. `direct` serves all else, such as float32 and odd sizes. Prompts have
// matrices of 16 bits made of them, see matrices.cpp.
#include <algorithm>

#include "../../codegen/text.h"
#include "../../schedule/refusals.h"
#include "../linear/format_members.h"
#include "experts.h"

namespace mpk {

using namespace codegen;

namespace {

constexpr int64_t kLineBytes = 128;                 // of a row of weights, that a box has side by side
constexpr int64_t kGroupColumns = 128;              // of x, that have a factor
constexpr int64_t kHalfRows = kExpertTileRows / 2;  // of a tile, that share a scale, or each have one

class DirectExperts : public ExpertKernel {
 public:
  DirectExperts() : ExpertKernel(kQuantizedExpertLinear, "direct", "experts::compute_direct", "", 0.05) {}

 private:
  // An estimate for many pairs: each is multiplied with weights of its own, a number at a time.
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    constexpr double kProductsPerNs = 20;  // of a worker
    std::vector<Cut> cuts = ExpertKernel::candidates(schedule, job);
    const Experts own(schedule.graph.nodes()[job.body.front()]);
    const double products = double(own.pairs) * double(own.rows) * double(own.size);
    for (Cut& cut : cuts)
      cut.cost_ns = std::max(cut.cost_ns, products / kProductsPerNs / double(schedule.target.num_workers));
    return cuts;
  }
  std::optional<std::string> refuses_factors(const Experts&) const override { return std::nullopt; }
  int64_t staged_bytes(const Schedule&, const Experts&) const override { return 0; }
  bool reads_aligned() const override { return false; }
};

const DirectExperts kDirect{};
const BoxedExperts kBoxes{kQuantizedExpertLinear, "boxes", "experts::compute_boxes"};
[[maybe_unused]] const bool kRegistered =
    add_kernel(kQuantizedExpertLinear, kBoxes) && add_kernel(kQuantizedExpertLinear, kDirect);

}  // namespace

std::optional<std::string> refuses_operands(const Node& node) {
  const Operand& x = node.operand("x");
  if (auto why = refuses_row_dtype(x)) return why;
  if (auto why = refuses_dtype(output(node), x.tensor.dtype)) return why;
  for (const Operand* operand : {&x, &node.operand("weight"), &output(node)})
    if (auto why = refuses_inner_stride(*operand)) return why;
  return WeightFormat::refuses(node);
}

std::optional<std::string> refuses_format(const WeightFormat& format) {
  const int64_t tail = format.row_bytes() % kLineBytes;
  const bool can_have_tail = format.bits() == 4 && !format.quantizes_x() && format.row_bytes() > kLineBytes &&
                             format.columns_of(tail) % std::min(format.block_columns, kGroupColumns) == 0;
  if (tail != 0 && !can_have_tail)
    return "rows of " + str(format.row_bytes()) + " bytes, expected a multiple of " + str(kLineBytes) +
           ", or of 4 bits behind which blocks of columns are whole";
  const bool are_columns =
      format.block_columns % kGroupColumns == 0 || format.block_columns == 64 || format.block_columns == 32;
  const bool are_rows = format.block_rows == 1 || format.block_rows % kHalfRows == 0;
  if (!are_columns || (!are_rows && format.block_rows < format.rows))
    return "a scale is for " + str(format.block_rows) + " x " + str(format.block_columns) + ", expected multiples of " +
           str(kHalfRows) + " rows, or one, and of " + str(kGroupColumns) + " columns, or 32 or 64";
  if (format.quantizes_x() && format.x_columns != kGroupColumns)
    return "a scale of x is for " + str(format.x_columns) + " columns, expected " + str(kGroupColumns);
  return std::nullopt;
}

std::string quantized_members(const Node& node, Refs& refs) {
  const WeightFormat format = WeightFormat::of(node);
  std::string text = format_members(format) + flag("kScalesByRow", false) +
                     constant("kScaleColumns", format.block_columns) + flag("kGivenXScale", false) +
                     constant("kRun", format.run()) + flag("kRowsHaveScales", format.block_rows == 1) +
                     returning("uint32_t", "scale_rows(int)", str(format.block_rows) + "u");
  const auto add = [&](const char* operand, const std::string& type, const std::string& name) {
    const Tensor& blocks = node.operand(operand).tensor;
    text += "  using " + type + " = " + cuda_type(blocks.dtype) + ";\n" +
            returning("const " + type + "*", name + "(const Job& job, int expert)",
                      refs.pointer(node, blocks) + " + int64_t(expert) * " + str(blocks.strides[0])) +
            returning("int64_t", name + "_pitch(int)", str(blocks.strides[1])) +
            returning("int64_t", name + "_column_pitch(int)", str(blocks.strides[2]));
  };
  add("weight_scale", "Scale", "scale");
  if (format.has_zero()) add("zero", "Zero", "zero");
  return text;
}

}  // namespace mpk
