// A kernel of runs outside the core: of two linears, of which the second takes what the first makes of one row of x.
// Each worker computes all of the first, so no value passes between workers. It is compiled against the core's headers
// by test_a_kernel_elsewhere.py.
#include "arch/arch.h"
#include "codegen/job_code.h"
#include "codegen/text.h"
#include "schedule/kernel.h"
#include "schedule/proof.h"

namespace mpk {
namespace {

using namespace codegen;

struct Pair {
  const Node &first, &second;

  Pair(const Schedule& schedule, const Job& job)
      : first(schedule.graph.nodes()[job.body.front()]), second(schedule.graph.nodes()[job.body.back()]) {}

  static const Tensor& weight(const Node& node) { return node.operand("weight").tensor; }
  const Tensor& hidden() const { return output(first).tensor; }
  int64_t hidden_bytes() const { return hidden().numel() * size_bytes(hidden().dtype); }
};

bool reads(const Node& node, int buffer) {
  return std::any_of(node.operands.begin(), node.operands.end(),
                     [&](const Operand& operand) { return operand.is_read && operand.tensor.buffer == buffer; });
}

class Pairs : public Kernel {
 public:
  Pairs() : Kernel("linear.pair") {}

 private:
  // The linear that takes one row of another, if nobody else does.
  std::vector<int> find_run(const TBGraph& graph, int first) const override {
    const Node& node = graph.nodes()[first];
    if (node.def->name != "linear" || node.operand("x").tensor.shape[0] != 1) return {};
    const Tensor& made = output(node).tensor;
    std::vector<int> readers;
    for (const Node& other : graph.nodes())
      if (reads(other, made.buffer)) readers.push_back(other.id);
    if (graph.buffers()[made.buffer].kind != BufferKind::kWorkspace || readers.size() != 1) return {};
    const Node& reader = graph.nodes()[readers.front()];
    if (reader.def->name != "linear" || !same_view(reader.operand("x").tensor, made)) return {};
    return {first, reader.id};
  }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    const Pair pair(schedule, job);
    const auto bytes = [&](const Node& node) {
      const Tensor& weight = pair.weight(node);
      return static_cast<double>(weight.numel() * size_bytes(weight.dtype));
    };
    Cut cut = job.cut;
    cut.input = Input::kInPlace;
    cut.staged_bytes = pair.hidden_bytes();
    cut.num_tiles = output(pair.second).tensor.numel();
    const double own = bytes(pair.first) + bytes(pair.second) / static_cast<double>(schedule.target.num_workers);
    cut.cost_ns = own / arch_of(schedule.target.arch).costs.memory_bytes_per_ns;
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    const Pair pair(proof.schedule(), proof.job());
    proof.require(proof.job().body.size() == 2 && same_view(pair.second.operand("x").tensor, pair.hidden()),
                  "the second linear does not take what the first makes");
    proof.require(contains(proof.job().unstored, pair.hidden().buffer),
                  name_buffer(proof.schedule(), pair.hidden().buffer) + " is needed besides");
    proof.require(
        proof.cut().staged_bytes >= pair.hidden_bytes(),
        "it stages " + CutProof::str(pair.hidden_bytes()) + " bytes in " + CutProof::str(proof.cut().staged_bytes));
    proof.require_nothing_else();
  }

  bool takes_companions() const override { return true; }

  JobCode emit(const JobPlace& place) const override {
    const Pair pair(place.context.schedule, place.job);
    JobCode code{"Pair", "linear_pair::compute", "", str(place.job.cut.staged_bytes)};
    code.headers = {PAIR_HEADER};
    Refs refs(place.context, code.refs);
    const Tensor &x = pair.first.operand("x").tensor, &y = output(pair.second).tensor;
    const std::string type = cuda_type(x.dtype);
    const auto getter = [&](const char* name, const Node& node, const Tensor& t, bool writable = false) {
      return returning((writable ? "" : "const ") + type + "*", std::string(name) + "(const Job& job)",
                       refs.pointer(node, t, writable));
    };
    code.body = "  using T = " + type + ";\n" + constant("kSize", x.numel()) +
                constant("kHidden", pair.hidden().numel()) + constant("kRows", y.numel()) + getter("x", pair.first, x) +
                getter("first", pair.first, pair.weight(pair.first)) +
                getter("second", pair.second, pair.weight(pair.second)) + getter("y", pair.second, y, true);
    return code;
  }
};

const Pairs kPairs{};
[[maybe_unused]] const bool kRegistered = add_run_kernel(kPairs);

}  // namespace
}  // namespace mpk
