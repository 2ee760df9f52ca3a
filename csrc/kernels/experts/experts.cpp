#include "experts.h"

#include <algorithm>
#include <cmath>

#include "../../arch/arch.h"
#include "../../codegen/checks.h"
#include "../../codegen/text.h"
#include "../../schedule/staging.h"

namespace mpk {

using namespace codegen;

namespace {

constexpr int64_t kStepColumns = 32;   // of weights, that a warp multiplies at a time
constexpr int64_t kMaxExperts = 1024;  // a lane has 32 of them
constexpr int64_t kMaxElements = int64_t{1} << 31;

const Node& node_of(const Schedule& schedule, const Job& job) { return schedule.graph.nodes()[job.body.front()]; }

}  // namespace

Experts::Experts(const Node& node)
    : x(node.operand("x").tensor),
      ids(node.operand("ids").tensor),
      weight((node.find("weight") != nullptr ? node.operand("weight") : node.operand("transposed")).tensor),
      y(output(node).tensor),
      is_transposed(node.find("weight") == nullptr),
      experts(weight.shape[0]),
      rows(weight.shape[is_transposed ? 2 : 1]),
      size(x.shape[2]),
      pairs(ids.shape[0] * ids.shape[1]),
      choices(ids.shape[1]) {
  if (node.def->name == kQuantizedExpertLinear) format = WeightFormat::of(node);
}

double Experts::expected() const {
  const auto count = static_cast<double>(experts);
  return count * (1 - std::pow(1 - 1 / count, static_cast<double>(pairs)));
}

double Experts::memory_ns(const Schedule& schedule) const {
  const double bytes = expected() * static_cast<double>(rows * row_bytes());
  return bytes / static_cast<double>(schedule.target.num_workers) /
         arch_of(schedule.target.arch).costs.memory_bytes_per_ns;
}

int64_t Experts::max_pairs() const {
  constexpr int64_t kMaxQuantized = 512;  // more than fit a warp's list are multiplied one by one
  return format ? kMaxQuantized : kMaxElements / std::max<int64_t>(rows, 1);
}

int64_t Experts::list_bytes(const Schedule& schedule) const {
  return schedule.warps.consumers * listed_pairs(pairs / choices, is_transposed) * 4;
}

Tensor Experts::stacked() const {
  Tensor all = weight;
  all.shape = {(experts - 1) * (weight.strides[0] / weight.strides[1]) + weight.shape[1], weight.shape[2]};
  all.strides = {weight.strides[1], 1};
  if (!format) return all;
  all.shape[1] -= all.shape[1] % (kBoxRowBytes / size_bytes(all.dtype));
  return in_words(all);
}

// ---- all kernels

std::optional<std::string> ExpertKernel::refuses(const Schedule& schedule, const Job& job) const {
  const Node& node = node_of(schedule, job);
  if (node.def->name == kQuantizedExpertLinear)
    if (std::optional<std::string> why = refuses_operands(node)) return why;
  const Experts own(node);
  if (own.experts > kMaxExperts) return str(own.experts) + " experts, expected at most " + str(kMaxExperts);
  if (std::optional<std::string> why = refuses_factors(own)) return why;
  for (const char* name : {"weight", "transposed", "weight_scale", "zero"}) {
    const Operand* operand = node.find(name);
    if (operand == nullptr || is_constant(schedule.graph, operand->tensor)) continue;
    const bool is_made = schedule.graph.buffers()[operand->tensor.buffer].kind == BufferKind::kWorkspace;
    if (!is_made || own.format || own.is_transposed) return "the launch writes the weights";
  }
  return std::nullopt;
}

std::optional<std::string> ExpertKernel::refuses_factors(const Experts& own) const {
  if (size_bytes(own.x.dtype) != 2 || !is_float(own.x.dtype)) return "tensor cores multiply 16-bit floats";
  if (own.pairs < 1 || own.pairs > own.max_pairs())
    return str(own.pairs) + " pairs of rows and experts, expected 1 to " + str(own.max_pairs());
  if ((own.pairs / own.choices) * own.x.strides[0] + own.choices * own.x.strides[1] >= kMaxElements)
    return "rows of x are " + str(own.x.strides[0]) + " elements apart, which is too far";
  if (own.size < kStepColumns || own.size % kStepColumns != 0 || !has_aligned_rows(own.weight) ||
      !has_aligned_rows(own.x))
    return "rows of " + str(own.size) + " elements, expected aligned ones of a multiple of " + str(kStepColumns);
  return std::nullopt;
}

int64_t ExpertKernel::staged_bytes(const Schedule& schedule, const Experts& own) const {
  return own.list_bytes(schedule);
}

std::vector<Cut> ExpertKernel::candidates(const Schedule& schedule, const Job& job) const {
  const Experts own(node_of(schedule, job));
  Cut cut = job.cut;
  cut.input = Input::kInPlace;
  cut.staged_bytes = staged_bytes(schedule, own);
  if (cut.staged_bytes > room(schedule)) return {};
  cut.num_tiles = own.experts * own.tiles_of_expert();
  cut.cost_ns = own.memory_ns(schedule) / memory_share_;
  if (const int64_t bytes = scratch_bytes(own)) cut.scratch = Scratch{bytes};
  return {cut};
}

void ExpertKernel::prove(const CutProof& proof) const {
  const Experts own(proof.first());
  const int64_t bytes = staged_bytes(proof.schedule(), own);
  proof.require(proof.cut().staged_bytes >= bytes,
                "it stages " + str(bytes) + " bytes in " + str(proof.cut().staged_bytes));
  proof.require(!proof.cut().is_staged(), "it reads x where it is");
  proof.require_nothing_else(scratch_bytes(own));
}

JobCode ExpertKernel::emit(const JobPlace& place) const {
  const Node& node = place.node();
  const Experts own(node);
  JobCode code{own.format ? "QuantizedExperts" : "Experts", compute_, load_, str(place.job.cut.staged_bytes)};
  code.headers = {own.format          ? "torch_mpk/device/tasks/quantized_experts.cuh"
                  : own.is_transposed ? "torch_mpk/device/tasks/expert_columns.cuh"
                                      : "torch_mpk/device/tasks/expert_sums.cuh"};
  code.experts = expert_stack(node);
  Refs refs(place.context, code.refs);
  const std::string type = cuda_type(own.x.dtype), weights = own.format ? "uint8_t" : type;
  const int64_t unit = own.format ? size_bytes(own.weight.dtype) : 1;  // of pitches
  const auto getter = [&](const char* name, const std::string& of, const Tensor& t) {
    return returning("const " + of + "*", std::string(name) + "(const Job& job)",
                     "job.pointer<const " + of + ">(" + str(refs.add(node, t)) + ")");
  };
  if (reads_aligned())
    for (const Tensor* factor : {&own.weight, &own.x})
      require(place.context.aligned_rows(*factor, false), node, "rows of x or of a weight are not aligned to 16 bytes");
  code.body = "  using T = " + type + ";\n" + constant("kPairs", own.pairs) + constant("kChoices", own.choices) +
              constant("kExperts", own.experts) + constant("kRows", own.rows) + constant("kSize", own.size) +
              constant("kRowBytes", own.row_bytes()) + constant("kXRow", own.x.strides[0]) +
              constant("kXChoice", own.x.strides[1]) + constant("kIdsRow", own.ids.strides[0]) +
              constant("kIdsChoice", own.ids.strides[1]) +
              "  static constexpr int64_t kExpertPitch = " + str(own.weight.strides[0] * unit) + ", " +
              (own.is_transposed ? "kDepthPitch" : "kRowPitch") + " = " + str(own.weight.strides[1] * unit) + ";\n" +
              getter("x", type, own.x) + getter("ids", "int64_t", own.ids) + getter("weight", weights, own.weight);
  if (own.format) code.body += quantized_members(node, refs);
  code.body += flag("kMadeWeights", !is_constant(place.context.graph(), own.weight));
  add_map(code, refs, node, own);
  add_results(place, code, refs, own);
  return code;
}

void ExpertKernel::add_results(const JobPlace& place, JobCode& code, Refs& refs, const Experts& own) const {
  code.body += constant("kYRow", own.y.strides[0]) + constant("kYChoice", own.y.strides[1]) +
               returning(std::string(cuda_type(own.y.dtype)) + "*", "y(const Job& job)",
                         refs.pointer(place.node(), own.y, true));
}

// ---- with boxes

std::optional<std::string> BoxedExperts::refuses(const Schedule& schedule, const Job& job) const {
  if (std::optional<std::string> refusal = ExpertKernel::refuses(schedule, job)) return refusal;
  if (!arch_of(schedule.target.arch).has_bulk_copies) return "the GPU has no copy engine for boxes";
  if (schedule.warps.all_read_entries) return "all warps of the launch read every entry of the ring";
  const Experts own(node_of(schedule, job));
  if (own.rows % own.tile_size() != 0 || !own.can_be_stacked())
    return "experts' weights are not whole tiles of " + str(own.tile_size()) + " results one below the other";
  if (own.format)
    if (std::optional<std::string> why = refuses_format(*own.format)) return why;
  if (!can_load_boxes(schedule.graph, own.stacked())) return "the weights cannot come in boxes";
  return std::nullopt;
}

void BoxedExperts::prove(const CutProof& proof) const {
  ExpertKernel::prove(proof);
  const Experts own(proof.first());
  const int64_t slot = proof.schedule().warps.slot_bytes;
  proof.require(slot % kBoxAlignment == 0 && slot >= kExpertTileRows * kExpertEntryColumns * 2,
                "its boxes do not fit slots of " + str(slot) + " bytes");
  proof.require(
      own.rows % own.tile_size() == 0 && own.can_be_stacked() && can_load_boxes(proof.schedule().graph, own.stacked()),
      "its weights cannot come in boxes");
}

void BoxedExperts::add_map(JobCode& code, Refs& refs, const Node& node, const Experts& own) const {
  const int64_t rows = own.is_transposed ? kExpertBoxDepth : box_rows_;
  const int map = refs.add_map(node, own.stacked(), rows, own.is_transposed ? kBoxColumns : kExpertEntryColumns);
  code.body += constant("kBoxRows", rows) +
               returning("const void*", "map(const Job& job)", "job.pointer<const void>(" + str(map) + ")");
}

}  // namespace mpk
