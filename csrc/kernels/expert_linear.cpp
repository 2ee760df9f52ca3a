// Products of few rows with the experts that they chose, on tensor cores. Which experts' weights it reads is known when
// the launch has chosen, so consumers read them where they are, and no loader runs ahead.
#include <algorithm>
#include <array>
#include <cmath>

#include "../arch/arch.h"
#include "../codegen/job_code.h"
#include "../codegen/text.h"
#include "../schedule/kernel.h"
#include "../schedule/proof.h"
#include "../schedule/staging.h"
#include "fields.h"

namespace mpk {
namespace {

using namespace codegen;

constexpr int64_t kTileRows = 16;       // of weights
constexpr int64_t kStepColumns = 32;    // of them that a warp multiplies at a time
constexpr int64_t kMaxPairs = 512;      // of rows and experts
constexpr int64_t kMaxExperts = 1024;   // a lane has 32 of them
constexpr int64_t kColumnsOfGroup = 8;  // pairs that are multiplied together

struct ExpertFields {
  int64_t splits = 1;  // warps that share a tile, each with some of the columns

  static constexpr std::array<FieldOf<ExpertFields>, 1> kAll = {{{"splits", "kSplits", &ExpertFields::splits}}};
};

// What a node multiplies.
struct Experts {
  const Tensor &x, &ids, &weight, &y;
  int64_t experts, rows, size, pairs, choices;

  explicit Experts(const Node& node)
      : x(node.operand("x").tensor),
        ids(node.operand("ids").tensor),
        weight(node.operand("weight").tensor),
        y(output(node).tensor),
        experts(weight.shape[0]),
        rows(weight.shape[1]),
        size(weight.shape[2]),
        pairs(ids.shape[0] * ids.shape[1]),
        choices(ids.shape[1]) {}

  int64_t tiles_of_expert() const { return divide_up(rows, kTileRows); }
  // Pairs that may have chosen one expert: where ids of a row are not distinct, all may.
  int64_t groups() const { return divide_up(pairs, kColumnsOfGroup); }

  // How many of them are chosen, if all are as likely.
  double expected() const {
    const auto count = static_cast<double>(experts);
    return count * (1 - std::pow(1 - 1 / count, static_cast<double>(pairs)));
  }

  // Of shared memory: the chosen experts as bits, a list of pairs for each warp, and what warps that share a tile sum.
  int64_t staged_bytes(int64_t warps, int64_t splits) const {
    const int64_t sums = splits > 1 ? warps * kTileRows * kColumnsOfGroup * int64_t(sizeof(float)) : 0;
    return round_up(divide_up(experts, 32) * 4, 16) + round_up(warps * pairs * 2, 16) + sums;
  }
};

const Node& node_of(const Schedule& schedule, const Job& job) { return schedule.graph.nodes()[job.body.front()]; }

bool is_constant(const TBGraph& graph, const Tensor& t) {
  const auto writes_it = [&](const Node& node) { return writes(node, t.buffer); };
  return graph.buffers()[t.buffer].kind == BufferKind::kInput && std::ranges::none_of(graph.nodes(), writes_it);
}

class ExpertRows : public Kernel {
 public:
  ExpertRows() : Kernel("expert_linear.rows") {}

 private:
  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    const Node& node = node_of(schedule, job);
    if (node.find("weight") == nullptr) return "the weights' rows are those of x, not of the result";
    const Experts own(node);
    if (size_bytes(own.x.dtype) != 2 || !is_float(own.x.dtype)) return "tensor cores multiply 16-bit floats";
    if (own.pairs < 1 || own.pairs > kMaxPairs)
      return str(own.pairs) + " pairs of rows and experts, expected 1 to " + str(kMaxPairs);
    if (own.experts > kMaxExperts) return str(own.experts) + " experts, expected at most " + str(kMaxExperts);
    if (own.size < kStepColumns || own.size % kStepColumns != 0 || !has_aligned_rows(own.weight) ||
        !has_aligned_rows(own.x))
      return "rows of " + str(own.size) + " elements, expected aligned ones of a multiple of " + str(kStepColumns);
    if (!is_constant(schedule.graph, own.weight)) return "the launch writes the weights";
    return std::nullopt;
  }

  // Where there are fewer tiles than warps, several share one.
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    const Experts own(node_of(schedule, job));
    const int64_t warps = schedule.warps.consumers, workers = schedule.target.num_workers;
    const double tiles = own.expected() * static_cast<double>(own.tiles_of_expert());
    ExpertFields fields;
    for (int64_t splits : {2, 4})
      if (warps % splits == 0 && tiles * static_cast<double>(splits) <= static_cast<double>(warps * workers) &&
          own.groups() == 1 && own.size / kStepColumns >= 8 * splits)
        fields.splits = splits;
    Cut cut = job.cut;
    cut.input = Input::kInPlace;
    cut.staged_bytes = own.staged_bytes(warps, fields.splits);
    if (cut.staged_bytes > room(schedule)) return {};
    cut.num_tiles = own.experts * own.tiles_of_expert();
    cut.fields = list_fields(fields);
    const double bytes = own.expected() * static_cast<double>(own.rows * own.size * size_bytes(own.x.dtype));
    cut.cost_ns = bytes / static_cast<double>(workers) / arch_of(schedule.target.arch).costs.memory_bytes_per_ns;
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    const Experts own(proof.first());
    const auto fields = fields_of<ExpertFields>(proof.cut());
    const int64_t warps = proof.schedule().warps.consumers;
    proof.require(fields.splits >= 1 && warps % fields.splits == 0 && (fields.splits == 1 || own.groups() == 1),
                  str(fields.splits) + " of " + str(warps) + " warps cannot share tiles");
    proof.require(
        proof.cut().staged_bytes >= own.staged_bytes(warps, fields.splits),
        "it stages " + str(own.staged_bytes(warps, fields.splits)) + " bytes in " + str(proof.cut().staged_bytes));
    proof.require(!proof.cut().shape && !proof.cut().is_staged() && !proof.cut().scratch,
                  "it reads x and weights where they are, and leaves nothing for other workers");
    proof.require_plain_end();
  }

  JobCode emit(const JobPlace& place) const override {
    const Node& node = place.node();
    const Experts own(node);
    JobCode code{"Experts", "experts::compute", "", str(place.job.cut.staged_bytes)};
    code.headers = {"torch_mpk/device/tasks/expert_rows.cuh"};
    Refs refs(place.context, code.refs);
    const std::string type = cuda_type(own.x.dtype);
    const auto getter = [&](const char* name, const std::string& of, const Tensor& t, bool writable = false) {
      const std::string result = (writable ? "" : "const ") + of + "*";
      return returning(result, std::string(name) + "(const Job& job)", refs.pointer(node, t, writable));
    };
    place.context.aligned_rows(own.weight, false);
    place.context.aligned_rows(own.x, true);
    code.body = "  using T = " + type + ";\n" + constant("kPairs", own.pairs) + constant("kChoices", own.choices) +
                constant("kExperts", own.experts) + constant("kRows", own.rows) + constant("kSize", own.size) +
                constant("kXRow", own.x.strides[0]) + constant("kXChoice", own.x.strides[1]) +
                constant("kIdsRow", own.ids.strides[0]) + constant("kIdsChoice", own.ids.strides[1]) +
                "  static constexpr int64_t kExpertPitch = " + str(own.weight.strides[0]) +
                ", kRowPitch = " + str(own.weight.strides[1]) + ";\n" + constant("kYRow", own.y.strides[0]) +
                constant("kYChoice", own.y.strides[1]) + constants(fields_of<ExpertFields>(place.job.cut)) +
                getter("x", type, own.x) + getter("ids", "int64_t", own.ids) + getter("weight", type, own.weight) +
                getter("y", type, own.y, true);
    return code;
  }
};

const ExpertRows kExpertRows{};
[[maybe_unused]] const bool kRegistered = add_kernel("expert_linear", kExpertRows);

}  // namespace
}  // namespace mpk
