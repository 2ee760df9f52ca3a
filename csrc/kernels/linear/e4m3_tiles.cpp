// FP8 linears of some rows of x and more: warpgroups multiply e4m3 numbers (e4m3_linear.cuh). A graph has
// quantized_linear, which leaves it open who quantises x. In launches whose warps multiply together it becomes
// e4m3_linear, behind a quantise_rows that all linears of one x share.
#include <algorithm>
#include <array>

#include "../../codegen/text.h"
#include "blocks.h"
#include "e4m3.h"
#include "prepared_x.h"
#include "tiles.h"

namespace mpk {
namespace {

constexpr int64_t kFewestRows = 5;     // of x: fewer are quantised by every worker in less time than phases take
constexpr int64_t kStepColumns = 128;  // whose sums tensor cores leave to fp32 registers
// A tile's block takes at least so long: on an H200, 96 of them took 19 to 25 us with few rows of x.
constexpr double kBlockNs = 220;
constexpr int64_t kFewestBlockRows = 32;  // of weights: some tile has its part's rows in one block of scales
// Of a tile's results. A thread has its sums twice: what tensor cores add up, and what is scaled.
const std::vector<int64_t> kWidths = {32, 64, 96, 128};

std::optional<std::string> refuses_scales(const WeightFormat& f) {
  const bool are_whole = f.scales_rows() || (f.block_columns % kStepColumns == 0 &&
                                             (f.block_rows % kFewestBlockRows == 0 || f.block_rows >= f.rows));
  if (are_whole && (f.x_columns == kStepColumns || f.x_columns >= f.columns) && f.columns % kStepColumns == 0)
    return std::nullopt;
  return "blocks of " + std::to_string(f.block_rows) + " x " + std::to_string(f.block_columns) + ", and of " +
         std::to_string(f.x_columns) + " columns of x, are not multiples of " + std::to_string(kFewestBlockRows) +
         " x " + std::to_string(kStepColumns);
}

// ---- the rewrite

class QuantisesRows : public PreparesX {
 public:
  explicit QuantisesRows(const TBGraph& graph) : PreparesX(graph) {
    has_rows_ = std::ranges::any_of(graph.nodes(), [](const Node& node) {
      const Operand* x = node.find("x");  // also of a linear that another launch would not take
      return x != nullptr && !x->tensor.shape.empty() && x->tensor.shape[0] >= kFewestRows;
    });
  }

 private:
  bool takes(const Node& node) const override {
    if (!has_rows_ || node.def->name != "quantized_linear" || WeightFormat::refuses(node)) return false;
    const WeightFormat format = WeightFormat::of(node);
    const Tensor &x = node.operand("x").tensor, &y = node.operands.back().tensor;
    const Operand* bias = node.find("bias");
    return format.storage == DType::kE4M3 && format.quantizes_x() && !refuses_scales(format) &&
           is_reduced_float(x.dtype) && x.strides[1] == 1 && x.numel() > 0 && y.dtype == x.dtype &&
           (bias == nullptr || bias->tensor.dtype == x.dtype) && can_load_boxes(graph_, node.operand("weight").tensor);
  }

  PreparedX input_of(const Node& node) const override {
    const Operand* given = node.find("x_scale");
    return {node.operand("x").tensor, given != nullptr ? std::optional(given->tensor) : std::nullopt,
            WeightFormat::of(node).x_columns, Tensor{}, Tensor{}};
  }

  void prepare(PreparedX& x, const std::string& name, const std::string& label) override {
    const int64_t rows = x.x.shape[0], columns = x.x.shape[1];
    x.matrix = add_matrix(result_, name + ".e4m3", DType::kE4M3, rows, columns);
    x.of_blocks = add_matrix(result_, name + ".scales", DType::kF32, rows, columns / x.columns);
    add_quantise_rows(result_, x.x, x.scale, x.matrix, x.of_blocks, x.columns, label);
  }

  void add_reader(const Node& node, const PreparedX& x) override {
    std::vector<Operand> operands = {{"x", x.matrix, true, false}, {"x_scales", x.of_blocks, true, false}};
    for (const char* name : {"weight", "weight_scale", "bias", "y"})
      if (const Operand* operand = node.find(name)) operands.push_back(*operand);
    std::map<std::string, Attr> attrs = node.attrs;
    attrs["x_columns"] = x.columns < x.x.shape[1] ? x.columns : -1;
    attrs["dtype"] = std::string(info(node.operands.back().tensor.dtype).name);
    result_.add_node("e4m3_linear", operands, attrs, std::nullopt, node.label);
  }

  bool has_rows_ = false;
};

std::optional<TBGraph> quantise_rows(const TBGraph& graph, const Target& target) {
  if (target.device != "cuda" || !arch_of(target.arch).has_warpgroup_products) return std::nullopt;
  return QuantisesRows(graph).run();
}

}  // namespace

std::optional<std::string> refuses_e4m3(const Node& node) {
  for (const char* name : {"x", "weight"})
    if (auto why = refuses_dtype(node.operand(name), DType::kE4M3)) return why;
  if (auto why = refuses_dtype(node.operand("x_scales"), DType::kF32)) return why;
  const Operand& y = node.operands.back();
  if (!is_reduced_float(y.tensor.dtype)) return "its result is not of 16-bit floats";
  if (const Operand* bias = node.find("bias"))
    if (auto why = refuses_dtype(*bias, y.tensor.dtype)) return why;
  for (const char* name : {"x", "weight", "bias", "y"})
    if (const Operand* operand = node.find(name))
      if (auto why = refuses_inner_stride(*operand)) return why;
  if (auto why = WeightFormat::refuses(node)) return why;
  const WeightFormat format = WeightFormat::of(node);
  if (format.columns / std::max<int64_t>(format.x_columns, 1) != node.operand("x_scales").tensor.shape[1])
    return "x_scales are not those of " + std::to_string(format.x_columns) + " columns";
  return std::nullopt;
}

std::optional<std::string> refuses_e4m3(const Schedule& schedule, const Job& job) {
  if (auto why = refuses_weights(schedule, job)) return why;
  if (!have_same(schedule, job, "x_scales")) return "linears of one x have different scales of it";
  return std::nullopt;
}

std::string x_scales_members(codegen::Refs& refs, const Node& node) {
  using namespace codegen;
  const Tensor& scales = node.operand("x_scales").tensor;
  return returning("const float*", "x_scales(const Job& job)", refs.pointer(node, scales)) +
         constant("kXScalePitch", scales.strides[0]) + constant("kXScaleStep", scales.strides[1]);
}

namespace {

// ---- the kernel

class E4M3Writer : public TilesWriter {
 public:
  explicit E4M3Writer(const codegen::JobPlace& place)
      : TilesWriter(place, "E4M3Tiles", "linear::compute_e4m3_tiles", "torch_mpk/device/tasks/e4m3_linear.cuh") {}

 private:
  std::string write_places() override {
    using namespace codegen;
    const WeightFormat format = WeightFormat::of(first_);
    return TilesWriter::write_places() + constant("kElementBytes", element_) +
           flag("kScalesByRow", format.scales_rows()) + constant("kScaleColumns", format.block_columns) +
           constant("kXScaleColumns", format.x_columns) + x_scales_members(refs_, first_) +
           write_block_rows(context_, job_) + write_blocks(context_, refs_, job_, "weight_scale", "Scale", "scale");
  }
};

class E4M3Tiles : public TilesKernel {
 public:
  E4M3Tiles() : TilesKernel("e4m3_linear.tiles") {}

 private:
  std::optional<Demands> demands(const TBGraph& graph, const Node& node) const override {
    if (multiplies_lines(graph, node)) return std::nullopt;
    return of_warpgroups();
  }

  std::optional<std::string> refuses_node(const Node& node, const Target& target) const override {
    if (!arch_of(target.arch).has_warpgroup_products) return "the chip's warps do not multiply together";
    if (auto why = refuses_e4m3(node)) return why;
    return refuses_scales(WeightFormat::of(node));
  }

  std::optional<std::string> refuses_matrices(const Schedule& schedule, const Job& job) const override {
    if (auto why = refuses_e4m3(schedule, job)) return why;
    if (!can_load_tiles(schedule, job)) return "x or a weight is not in aligned rows of a multiple of 128 numbers";
    return std::nullopt;
  }

  // Those of which a part has its rows of weights in one block of scales.
  std::vector<int64_t> widths(const Schedule& schedule, const Job& job) const override {
    const int64_t parts = Linears(schedule, job).parts;
    std::vector<int64_t> fitting;
    std::ranges::copy_if(kWidths, std::back_inserter(fitting), [&](int64_t width) {
      return width % parts == 0 && has_whole_blocks(schedule, job, width / parts);
    });
    return fitting;
  }

  // Blocks of a tile wait for each other.
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    std::vector<Cut> cuts = TilesKernel::candidates(schedule, job);
    for (Cut& cut : cuts) {
      const int64_t parts_of_worker =
          divide_up(cut.num_tiles * fields_of<TilesFields>(cut).split, schedule.target.num_workers);
      const int64_t columns = Linears::input(schedule, job).shape[1] / fields_of<TilesFields>(cut).split;
      cut.cost_ns = std::max(cut.cost_ns, double(parts_of_worker * divide_up(columns, kStepColumns)) * kBlockNs);
    }
    return cuts;
  }

  static bool has_whole_blocks(const Schedule& schedule, const Job& job, int64_t tile_rows) {
    return std::ranges::all_of(job.body, [&](int n) {
      const WeightFormat format = WeightFormat::of(schedule.graph.nodes()[n]);
      return format.scales_rows() || format.block_rows >= format.rows || format.block_rows % tile_rows == 0;
    });
  }

  void prove(const CutProof& proof) const override {
    TilesKernel::prove(proof);
    proof.require(has_whole_blocks(proof.schedule(), proof.job(), proof.cut().shape->tile_rows),
                  "a tile's rows of weights have several scales");
  }

  codegen::JobCode emit(const codegen::JobPlace& place) const override { return E4M3Writer(place).run(); }
};

const E4M3Tiles kTiles{};
[[maybe_unused]] const bool kRegistered = add_kernel("e4m3_linear", kTiles) && add_rewrite(quantise_rows);

}  // namespace
}  // namespace mpk
