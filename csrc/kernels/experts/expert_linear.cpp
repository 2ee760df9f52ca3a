// Products of few rows with the experts that they chose, on tensor cores. Which experts' weights are read is known when
// the launch has chosen: `boxes` has the loader await that, and bring them as boxes; with `rows` consumers read weights
// that no boxes can be made of where they are.
#include <algorithm>
#include <cmath>

#include "../../arch/arch.h"
#include "../../codegen/job_code.h"
#include "../../codegen/text.h"
#include "../../schedule/kernel.h"
#include "../../schedule/proof.h"
#include "../../schedule/staging.h"

namespace mpk {
namespace {

using namespace codegen;

constexpr int64_t kTileRows = 16;       // of weights
constexpr int64_t kStepColumns = 32;    // of them that a warp multiplies at a time
constexpr int64_t kMaxPairs = 512;      // of rows and experts
constexpr int64_t kMaxExperts = 1024;   // a lane has 32 of them
constexpr int64_t kEntryColumns = 256;  // of weights, in a box

// A node multiplies these.
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

  // How many of them are chosen, if all are as likely.
  double expected() const {
    const auto count = static_cast<double>(experts);
    return count * (1 - std::pow(1 - 1 / count, static_cast<double>(pairs)));
  }

  // Each warp keeps a list of pairs in shared memory.
  int64_t staged_bytes(const Schedule& schedule) const { return schedule.warps.consumers * round_up(pairs * 2, 16); }

  // The weights of all experts, one below the other.
  Tensor stacked() const {
    Tensor all = weight;
    all.shape = {experts * rows, size};
    all.strides = {weight.strides[1], 1};
    return all;
  }
};

const Node& node_of(const Schedule& schedule, const Job& job) { return schedule.graph.nodes()[job.body.front()]; }

// Both kernels take the same nodes, but for how weights come.
class ExpertKernel : public Kernel {
 public:
  ExpertKernel(std::string name, const char* compute, const char* load, double memory_share)
      : Kernel(std::move(name)), compute_(compute), load_(load), memory_share_(memory_share) {}

 protected:
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

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    const Experts own(node_of(schedule, job));
    Cut cut = job.cut;
    cut.input = Input::kInPlace;
    cut.staged_bytes = own.staged_bytes(schedule);
    if (cut.staged_bytes > room(schedule)) return {};
    cut.num_tiles = own.experts * own.tiles_of_expert();
    const double bytes = own.expected() * static_cast<double>(own.rows * own.size * size_bytes(own.x.dtype));
    const double rate = arch_of(schedule.target.arch).costs.memory_bytes_per_ns * memory_share_;
    cut.cost_ns = bytes / static_cast<double>(schedule.target.num_workers) / rate;
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    const int64_t bytes = Experts(proof.first()).staged_bytes(proof.schedule());
    proof.require(proof.cut().staged_bytes >= bytes,
                  "it stages " + str(bytes) + " bytes in " + str(proof.cut().staged_bytes));
    proof.require(!proof.cut().is_staged(), "it reads x where it is");
    proof.require_nothing_else();
  }

  JobCode emit(const JobPlace& place) const override {
    const Node& node = place.node();
    const Experts own(node);
    JobCode code{"Experts", compute_, load_, str(place.job.cut.staged_bytes)};
    code.headers = {"torch_mpk/device/tasks/expert_boxes.cuh"};
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
                constant("kYChoice", own.y.strides[1]) + getter("x", type, own.x) + getter("ids", "int64_t", own.ids) +
                getter("weight", type, own.weight) + getter("y", type, own.y, true);
    add_map(code, refs, node, own);
    return code;
  }

  // The way to the loader's boxes, if it brings some.
  virtual void add_map(JobCode&, Refs&, const Node&, const Experts&) const {}

 private:
  const char *compute_, *load_;
  const double memory_share_;  // of what memory gives, that it reaches
};

class ExpertRows : public ExpertKernel {
 public:
  ExpertRows() : ExpertKernel("expert_linear.rows", "experts::compute_rows", "", 0.65) {}
};

class ExpertBoxes : public ExpertKernel {
 public:
  ExpertBoxes() : ExpertKernel("expert_linear.boxes", "experts::compute_boxes", "experts::load_boxes", 0.9) {}

 private:
  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    if (std::optional<std::string> refusal = ExpertKernel::refuses(schedule, job)) return refusal;
    if (!arch_of(schedule.target.arch).has_bulk_copies) return "no copy engine brings boxes";
    if (schedule.warps.all_read_entries) return "all warps of the launch read every entry of the ring";
    const Experts own(node_of(schedule, job));
    if (own.rows % kTileRows != 0 || own.weight.strides[0] != own.rows * own.weight.strides[1])
      return "experts' weights are not whole tiles of " + str(kTileRows) + " rows one below the other";
    if (!comes_in_boxes(schedule.graph, own.stacked())) return "the weights cannot come in boxes";
    return std::nullopt;
  }

  void prove(const CutProof& proof) const override {
    ExpertKernel::prove(proof);
    const Experts own(proof.first());
    const int64_t slot = proof.schedule().warps.slot_bytes;
    proof.require(slot % kBoxAlignment == 0 && slot >= kTileRows * kEntryColumns * size_bytes(own.x.dtype),
                  "its boxes do not fit slots of " + str(slot) + " bytes");
    proof.require(own.rows % kTileRows == 0 && comes_in_boxes(proof.schedule().graph, own.stacked()),
                  "its weights cannot come in boxes");
  }

  void add_map(JobCode& code, Refs& refs, const Node& node, const Experts& own) const override {
    const int map = refs.add_map(node, own.stacked(), kTileRows, kEntryColumns);
    code.body += returning("const void*", "map(const Job& job)", "job.pointer<const void>(" + str(map) + ")");
  }
};

const ExpertRows kExpertRows{};
const ExpertBoxes kExpertBoxes{};
[[maybe_unused]] const bool kRegistered =
    add_kernel("expert_linear", kExpertRows) && add_kernel("expert_linear", kExpertBoxes);

}  // namespace
}  // namespace mpk
