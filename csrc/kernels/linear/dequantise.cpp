// Quantised weights beside an x that is not: a matrix of 16 bits is made of each, shortly before linear multiplies by
// it. Where weights come in no boxes, or x has some rows, that takes less time than to convert them in products. With
// many rows of x, warpgroups convert what they can themselves (quantized_tiles.cpp), and the rest becomes matrices.
#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "../../codegen/job_code.h"
#include "../../codegen/text.h"
#include "../../schedule/kernel.h"
#include "../../schedule/proof.h"
#include "../../schedule/refusals.h"
#include "../../schedule/rewrite.h"
#include "blocks.h"
#include "format_members.h"
#include "ordered.h"
#include "quantized_tiles.h"
#include "tiles.h"
#include "writer.h"

namespace mpk {
namespace {

// ---- the rewrite

// The place of a matrix in the workspace. Linears of one x, which may be one job, have a set of places; those behind
// them another. So what makes a matrix awaits the linears before the last, and runs beside the last.
struct Place {
  int set, index;

  auto operator<=>(const Place&) const = default;
};

class Dequantises {
 public:
  Dequantises(const TBGraph& graph, const Target& target) : graph_(graph), target_(target) {
    are_many_rows_ = std::ranges::any_of(graph.nodes(), [&](const Node& node) {
      return converts_tiles(graph, node, target) && node.operand("x").tensor.shape[0] >= kFewestTileRows;
    });
    find_places();
    if (places_.empty()) return;
    TBGraph made = with_buffers_of(graph);
    for (const auto& [place, bytes] : bytes_)
      buffers_[place] = made.add_buffer("matrix." + std::to_string(place.set) + "." + std::to_string(place.index),
                                        BufferKind::kWorkspace, -1, bytes);
    for (const Node& node : graph.nodes()) add(made, node);
    result_ = std::move(made);
  }

  std::optional<TBGraph> result() { return std::move(result_); }

 private:
  bool takes(const Node& node) const {
    if (node.def->name != "quantized_linear" || WeightFormat::refuses(node)) return false;
    if (are_many_rows_ ? converts_tiles(graph_, node, target_) : takes_ordered_x(graph_, node, target_)) return false;
    const WeightFormat format = WeightFormat::of(node);
    const Tensor &x = node.operand("x").tensor, &y = node.operands.back().tensor;
    const bool is_known = std::ranges::all_of(node.operands, [&](const Operand& operand) {
      if (operand.is_write || operand.name == "x") return true;
      if (operand.name == "bias") return operand.tensor.dtype == x.dtype;
      return std::ranges::find(kOfWeight, operand.name) != kOfWeight.end() && is_constant(graph_, operand.tensor);
    });
    return !format.quantizes_x() && is_known && is_reduced_float(x.dtype) && x.numel() > 0 && y.dtype == x.dtype;
  }

  void find_places() {
    const Tensor* x = nullptr;  // of the last linears, while it is the same
    Place last{1, 0};
    for (const Node& node : graph_.nodes()) {
      if (takes(node)) {
        const Tensor& own = node.operand("x").tensor;
        last = x != nullptr && same_view(*x, own) ? Place{last.set, last.index + 1} : Place{1 - last.set, 0};
        x = &own;
        places_[node.id] = last;
        const WeightFormat format = WeightFormat::of(node);
        int64_t& bytes = bytes_[last];
        bytes = std::max(bytes, format.rows * format.columns * size_bytes(own.dtype));
      }
      for (const Operand& operand : node.operands)
        if (x != nullptr && operand.is_write && operand.tensor.buffer == x->buffer) x = nullptr;
    }
  }

  void add(TBGraph& made, const Node& node) const {
    const auto place = places_.find(node.id);
    if (place == places_.end()) return copy_node(made, node);
    const WeightFormat format = WeightFormat::of(node);
    const Tensor& x = node.operand("x").tensor;
    const Tensor matrix{buffers_.at(place->second), x.dtype, {format.rows, format.columns}, {format.columns, 1}};
    std::vector<Operand> operands;
    for (const std::string& name : kOfWeight)
      if (const Operand* operand = node.find(name)) operands.push_back(*operand);
    operands.push_back({"matrix", matrix, false, true});
    std::map<std::string, Attr> attrs = node.attrs;
    attrs.erase("x_columns");
    attrs["columns"] = format.columns;
    attrs["dtype"] = std::string(info(x.dtype).name);
    made.add_node("dequantise", operands, attrs, std::nullopt, label_of_part(node, "weight"));

    operands = {node.operand("x"), {"weight", matrix, true, false}};
    if (const Operand* bias = node.find("bias")) operands.push_back(*bias);
    operands.push_back(node.operands.back());
    made.add_node("linear", operands, {}, std::nullopt, node.label);
  }

  const TBGraph& graph_;
  const Target& target_;
  bool are_many_rows_ = false;   // of x, which warpgroups multiply
  std::map<int, Place> places_;  // of nodes
  std::map<Place, int64_t> bytes_;
  std::map<Place, int> buffers_;
  std::optional<TBGraph> result_;
};

std::optional<TBGraph> dequantise(const TBGraph& graph, const Target& target) {
  if (target.device != "cuda") return std::nullopt;
  return Dequantises(graph, target).result();
}

// ---- the kernel

constexpr int64_t kAccessColumns = 8;  // of results
// Than memory: on an H200, prompts of Qwen3-8B in 4 bits took 9.7 ms more than in 16, where reading and writing
// takes 4. Since then a number takes fewer instructions, and has not been timed.
constexpr double kSlower = 2;

// Whether numbers of eight columns are one access.
bool is_wide(const Tensor& weight, const WeightFormat& format) {
  const bool are_words = format.packed == kAccessColumns || weight.strides[1] == 1;
  return are_words && !format.has_word_rows() && format.columns % kAccessColumns == 0 &&
         format.block_columns % kAccessColumns == 0 && (weight.strides[1] != 1 || has_aligned_rows(weight));
}

class Dequantise : public Kernel {
 public:
  Dequantise() : Kernel("dequantise") {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    const Tensor& matrix = node.operands.back().tensor;
    if (auto why = WeightFormat::refuses(node)) return why;
    for (const char* name : {"column_groups", "codebook", "scale_code", "scale_scale"})
      if (const Operand* operand = node.find(name))
        if (auto why = refuses_inner_stride(*operand)) return why;
    if (!is_reduced_float(matrix.dtype)) return "its result is not of 16-bit floats";
    if (matrix.numel() >= int64_t{1} << 31) return "its result has 2^31 elements or more";
    return refuses_inner_stride(node.operands.back());
  }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    Cut cut = job.cut;
    cut.input = Input::kInPlace;
    cut.cost_ns = kSlower * memory_ns(schedule, job);
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    proof.require(!proof.cut().is_staged(), "it reads weights where they are");
    proof.require_nothing_else();
  }

  codegen::JobCode emit(const codegen::JobPlace& place) const override {
    using namespace codegen;
    const Node& node = place.node();
    const Tensor &weight = node.operand("weight").tensor, &matrix = node.operands.back().tensor;
    const WeightFormat format = WeightFormat::of(node);
    const bool is_apart = weight.strides[1] != 1 || format.has_word_rows();
    const bool wide =
        is_wide(weight, format) && has_aligned_rows(matrix) && (is_apart || place.context.aligned_rows(weight, false));
    JobCode code{"Dequantise", "linear::compute_dequantised"};
    code.headers = {"torch_mpk/device/tasks/dequantise.cuh"};
    Refs refs(place.context, code.refs);
    WeightsInPlace weights;
    weights.add(refs, node, weight);
    code.body =
        "  using T = " + std::string(cuda_type(matrix.dtype)) + ";\n" +
        "  static constexpr uint32_t kRows = " + str(format.rows) + ", kSize = " + str(format.columns) +
        ";\n  static constexpr int64_t kPitch = " + str(matrix.strides[0]) + ";\n" +
        returning("T*", "matrix(const Job& job)", refs.pointer(node, matrix, true)) + weights.members() +
        flag("kIsWide", wide) + constant("kWordColumns", is_apart ? format.packed : format.columns) +
        returning("int64_t", "word_pitch(int)", is_apart ? str(weight.strides[1] * size_bytes(weight.dtype)) : "0") +
        format_members(format) + flag("kScalesByRow", false) + flag("kGivenXScale", false) +
        constant("kScaleColumns", format.block_columns) + flag("kRowsHaveScales", format.block_rows == 1) +
        write_block_rows(place.context, place.job) +
        write_blocks(place.context, refs, place.job, "weight_scale", "Scale", "scale");
    code.body += write_tables(place.context, refs, place.job);
    if (format.has_zero()) code.body += write_blocks(place.context, refs, place.job, "zero", "Zero", "zero");
    return code;
  }
};

const Dequantise kKernel{};
[[maybe_unused]] const bool kRegistered = add_kernel("dequantise", kKernel) && add_rewrite(dequantise);

}  // namespace
}  // namespace mpk
