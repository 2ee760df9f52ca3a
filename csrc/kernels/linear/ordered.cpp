// Linears of 4-bit weights with some rows of x (four_bit_warpgroups.cuh). A graph has quantized_linear, which leaves it
// open who puts columns of x in the order of words of weights, and sums them. Here it becomes ordered_linear, behind an
// order_columns that all linears of one x share.
#include "ordered.h"

#include <algorithm>

#include "../../codegen/text.h"
#include "blocks.h"
#include "prepared_x.h"
#include "tiles.h"
#include "torch_mpk/abi/sizes.h"
#include "warpgroups.h"

namespace mpk {
namespace {

constexpr int64_t kFewestRows = 9;  // of x: fewer have a kernel of warps
// A warpgroup takes so long for a line, and for each 32 columns of it beside that, by samples of an H200's program
// counter.
constexpr double kLineNs = 170, kSliceNs = 80;
constexpr int64_t kSliceColumns = 32;

// The columns that have a sum: those of a line that share a scale.
int64_t columns_of_sum(const WeightFormat& format) {
  const int64_t line = format.columns_of(kWarpgroupLineBytes);
  return format.scales_rows() ? line : std::min(format.block_columns, line);
}

// Sums stand side by side for as many rows of x as a stage has, so that those of a stage are copied together.
Tensor add_sums(TBGraph& made, const std::string& name, int64_t rows, int64_t sums) {
  Tensor of_x = add_matrix(made, name, DType::kF32, sums, round_up(rows, 8));
  of_x.shape = {rows, sums}, of_x.strides = {1, of_x.strides[0]};
  return of_x;
}

class OrderedWriter : public WarpgroupsWriter {
 public:
  explicit OrderedWriter(const codegen::JobPlace& place)
      : WarpgroupsWriter(place, "FourBitWarpgroups", "linear::compute_four_bit_warpgroups",
                         "torch_mpk/device/tasks/four_bit_warpgroups.cuh") {}

 private:
  std::string write_places() override {
    const Tensor& sums = first_.operand("x_sums").tensor;
    return WarpgroupsWriter::write_places() +
           codegen::returning("const float*", "x_sums(const Job& job)", refs_.pointer(first_, sums));
  }
};

class Ordered : public WarpgroupsKernel {
 public:
  Ordered() : WarpgroupsKernel("ordered_linear.warpgroups", kFewestRows) {}
  using WarpgroupsKernel::refuses_size;

  std::optional<std::string> refuses_format(const Node& node) const override {
    if (auto refusal = refuses_conversion(node)) return refusal;
    const WeightFormat format = WeightFormat::of(node);
    if (format.bits() != 4) return "weights are not of 4 bits";
    return refuses_lines(format);
  }

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    return refuses_reduced(node);
  }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    const Tensor& x = Linears::input(schedule, job);
    const Tensor& first = schedule.graph.nodes()[job.body.front()].operand("x_sums").tensor;
    const int64_t columns = columns_of_sum(format_of(schedule, job));
    if (first.dtype != DType::kF32 || first.shape[1] * columns != x.shape[1] || first.strides[0] != 1 ||
        first.strides[1] != round_up(x.shape[0], 8) || first.offset != 0)
      return "x_sums are not float32 sums of " + std::to_string(columns) + " columns, side by side for all rows of x";
    if (!have_same(schedule, job, "x_sums")) return "linears of one x have different sums of it";
    return WarpgroupsKernel::refuses(schedule, job);
  }

  double line_ns(const WeightFormat& format) const override {
    return kLineNs + kSliceNs * double(format.columns_of(kWarpgroupLineBytes) / kSliceColumns);
  }
  int64_t sum_columns(const WeightFormat& format) const override { return columns_of_sum(format); }

  // No kernel of the task takes an x that is polled.
  int64_t polled_elements(const Schedule&, const Job&, const Tensor&) const override { return kMaxPolledElements + 1; }

  codegen::JobCode emit(const codegen::JobPlace& place) const override { return OrderedWriter(place).run(); }
};

const Ordered kKernel{};

class OrdersColumns : public PreparesX {
 public:
  // Where some x has many rows, the launch's warps multiply together.
  OrdersColumns(const TBGraph& graph, const Target& target) : PreparesX(graph), target_(target) {
    are_few_rows_ = std::ranges::none_of(graph.nodes(), [](const Node& node) {
      const Operand* x = node.find("x");
      return node.def->role == Role::kStream && x != nullptr && x->tensor.shape[0] >= kFewestTileRows;
    });
  }

 private:
  bool takes(const Node& node) const override { return are_few_rows_ && takes_ordered_x(graph_, node, target_); }

  PreparedX input_of(const Node& node) const override {
    return {node.operand("x").tensor, std::nullopt, columns_of_sum(WeightFormat::of(node)), Tensor{}, Tensor{}};
  }

  void prepare(PreparedX& x, const std::string& name, const std::string& label) override {
    const int64_t rows = x.x.shape[0], columns = x.x.shape[1];
    x.matrix = add_matrix(result_, name + ".ordered", x.x.dtype, rows, columns);
    x.of_blocks = add_sums(result_, name + ".sums", rows, columns / x.columns);
    const std::vector<Operand> operands = {{"x", in_blocks(x.x, x.columns), true, false},
                                           {"ordered", in_blocks(x.matrix, x.columns), false, true},
                                           {"sums", x.of_blocks, false, true}};
    result_.add_node("order_columns", operands, {}, std::nullopt, label);
  }

  void add_reader(const Node& node, const PreparedX& x) override {
    std::vector<Operand> operands = {{"x", x.matrix, true, false}, {"x_sums", x.of_blocks, true, false}};
    for (const char* name : {"weight", "weight_scale", "bias", "zero", "y"})
      if (const Operand* operand = node.find(name)) operands.push_back(*operand);
    const std::map<std::string, Attr> attrs = {{"block_rows", node.int_attr("block_rows")},
                                               {"block_columns", node.int_attr("block_columns")}};
    result_.add_node("ordered_linear", operands, attrs, std::nullopt, node.label);
  }

  const Target& target_;
  bool are_few_rows_ = false;
};

std::optional<TBGraph> order_columns(const TBGraph& graph, const Target& target) {
  return OrdersColumns(graph, target).run();
}

[[maybe_unused]] const bool kRegistered = add_kernel("ordered_linear", kKernel) && add_rewrite(order_columns);

}  // namespace

bool takes_ordered_x(const TBGraph& graph, const Node& node, const Target& target) {
  if (target.device != "cuda" || !arch_of(target.arch).has_warpgroup_products || node.def->name != "quantized_linear" ||
      refuses_reduced(node) || kKernel.refuses_format(node))
    return false;
  const Tensor& x = node.operand("x").tensor;
  return !kKernel.refuses_size(x) && x.strides[1] == 1 && can_load_boxes(graph, node.operand("weight").tensor);
}

}  // namespace mpk
