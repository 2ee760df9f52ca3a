// Experts with quantised weights, for prompts: a matrix of 16 bits is made of each expert's weight, and x is rounded to
// what its format says, so that the kernels of 16 bits multiply. With few pairs a launch reads the weights as they are
// in less time.
#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "../../schedule/rewrite.h"
#include "../../schedule/staging.h"
#include "../linear/prepared_x.h"
#include "experts.h"

namespace mpk {
namespace {

constexpr int kPlaces = 2;  // of matrices, which take turns: one is made while the other is multiplied by

class MatricesOfExperts {
 public:
  explicit MatricesOfExperts(const TBGraph& graph) : graph_(graph) {
    int64_t bytes = 0;
    for (const Node& node : graph.nodes())
      if (takes(node)) bytes = std::max(bytes, matrix_of(node, 0).numel() * size_bytes(output(node).tensor.dtype));
    if (bytes == 0) return;
    made_ = with_buffers_of(graph);
    for (int& place : places_) place = made_.add_buffer("experts", BufferKind::kWorkspace, -1, bytes);
    for (const Node& node : graph.nodes()) takes(node) ? add(node) : copy_node(made_, node);
    is_changed_ = true;
  }

  std::optional<TBGraph> result() { return is_changed_ ? std::optional(std::move(made_)) : std::nullopt; }

 private:
  bool takes(const Node& node) const {
    if (node.def->name != kQuantizedExpertLinear || WeightFormat::refuses(node)) return false;
    const Experts own(node);
    const WeightFormat& format = *own.format;
    const bool are_stacked = std::ranges::all_of(std::array{"weight", "weight_scale", "zero"}, [&](const char* name) {
      const Operand* operand = node.find(name);
      if (operand == nullptr) return true;
      const Tensor& t = operand->tensor;
      return is_constant(graph_, t) && t.strides[0] == t.shape[1] * t.strides[1];
    });
    const bool has_whole_blocks =
        format.rows % format.block_rows == 0 && format.zero != ZeroKind::kPackedPoints &&
        (!format.quantizes_x() || (format.columns % format.x_columns == 0 && (is_shared(own.x) || is_dense(own.x))));
    return are_stacked && has_whole_blocks && is_reduced_float(own.x.dtype) && own.y.dtype == own.x.dtype &&
           own.x.numel() > 0 && own.x.strides[2] == 1 && own.weight.strides[2] == 1;
  }

  // Whether a row's choices have one x, or the rows of all choices are equally far apart.
  static bool is_shared(const Tensor& x) { return x.shape[1] == 1 || x.strides[1] == 0; }
  static bool is_dense(const Tensor& x) { return x.strides[0] == x.shape[1] * x.strides[1]; }

  static Tensor matrix_of(const Node& node, int buffer) {
    const WeightFormat format = WeightFormat::of(node);
    const int64_t experts = node.operand("weight").tensor.shape[0];
    return {buffer,
            output(node).tensor.dtype,
            {experts, format.rows, format.columns},
            {format.rows * format.columns, format.columns, 1}};
  }

  // The matrices of all experts as one, one below the other.
  static Tensor flat(Tensor t) {
    t.shape = {t.shape[0] * t.shape[1], t.shape[2]};
    t.strides = {t.strides[1], t.strides[2]};
    return t;
  }

  void add_dequantise(const Node& node, const char* what, std::vector<Operand> operands, const Tensor& matrix,
                      int64_t block_rows, int64_t block_columns) {
    operands.push_back({"matrix", matrix, false, true});
    made_.add_node("dequantise", operands,
                   {{"block_rows", block_rows},
                    {"block_columns", block_columns},
                    {"columns", matrix.shape[1]},
                    {"dtype", std::string(info(matrix.dtype).name)},
                    {"scale_block", int64_t{0}}},
                   std::nullopt, label_of_part(node, what));
  }

  void add(const Node& node) {
    const WeightFormat format = WeightFormat::of(node);
    const Tensor matrix = matrix_of(node, places_[number_++ % kPlaces]);
    std::vector<Operand> operands;
    for (const char* name : {"weight", "weight_scale", "zero"})
      if (const Operand* operand = node.find(name)) operands.push_back({name, flat(operand->tensor), true, false});
    add_dequantise(node, "weight", operands, flat(matrix), format.block_rows, format.block_columns);
    const Tensor& x = node.operand("x").tensor;
    made_.add_node(kExpertLinear,
                   {{"x", format.quantizes_x() ? rounded(node, x, format.x_columns) : x, true, false},
                    node.operand("ids"),
                    {"weight", matrix, true, false},
                    node.operands.back()},
                   {}, std::nullopt, node.label);
  }

  // x as numbers of e4m3 times their scales.
  Tensor rounded(const Node& node, const Tensor& x, int64_t block) {
    const int64_t columns = x.shape[2], blocks = columns / block, choices = is_shared(x) ? 1 : x.shape[1];
    const int64_t rows = x.shape[0] * choices;
    const Tensor numbers = add_matrix(made_, "experts.x.e4m3", DType::kE4M3, rows, columns);
    const Tensor scales = add_matrix(made_, "experts.x.scales", DType::kF32, rows, blocks);
    const Tensor result = add_matrix(made_, "experts.x.rounded", x.dtype, rows, columns);
    Tensor flat_x = x;
    flat_x.shape = {rows, columns}, flat_x.strides = {x.strides[choices > 1 ? 1 : 0], 1};
    add_quantise_rows(made_, flat_x, std::nullopt, numbers, scales, block, label_of_part(node, "x"));
    add_dequantise(node, "x.rounded", {{"weight", numbers, true, false}, {"weight_scale", scales, true, false}}, result,
                   1, block);
    Tensor view = result;
    view.shape = x.shape, view.strides = {choices * columns, choices > 1 ? columns : 0, 1};
    return view;
  }

  const TBGraph& graph_;
  TBGraph made_;
  std::array<int, kPlaces> places_{};
  int number_ = 0;  // of nodes that are replaced
  bool is_changed_ = false;
};

std::optional<TBGraph> make_matrices(const TBGraph& graph, const Target& target) {
  if (target.device != "cuda") return std::nullopt;
  return MatricesOfExperts(graph).result();
}

[[maybe_unused]] const bool kRegistered = add_rewrite(make_matrices);

}  // namespace
}  // namespace mpk
