// Reductions of short rows, each by a thread, and the pointwise task behind them: for example the weighted sum of
// experts' results, and the residual.
#include <algorithm>
#include <map>

#include "../codegen/checks.h"
#include "../codegen/job_code.h"
#include "../codegen/pattern.h"
#include "../codegen/text.h"
#include "../schedule/access.h"
#include "../schedule/kernel.h"
#include "../schedule/proof.h"
#include "reduce.h"

namespace mpk {

using namespace codegen;

namespace {

constexpr int64_t kLongestRow = 64;

// The load of the reduction's result, if the program takes each result at a point of its own, in their order.
std::optional<size_t> load_of_result(const Node& reduction, const Node& behind) {
  const Tensor& made = output(reduction).tensor;
  std::optional<size_t> found;
  for (size_t i = 0; i < behind.program->instrs.size(); i++) {
    const Instr& instr = behind.program->instrs[i];
    if (instr.op != Op::kLoad) continue;
    const Tensor& t = behind.operands[instr.operand].tensor;
    if (t.buffer != made.buffer) continue;
    if (found || !instr.args.empty() || t.offset != made.offset || t.dtype != made.dtype || !made.is_contiguous() ||
        behind.program->num_points() != made.numel() || !is_identity(*behind.program, instr.strides))
      return std::nullopt;
    found = i;
  }
  return found;
}

}  // namespace

std::optional<ShortReduction> short_reduction(const TBGraph& graph, const Node& node) {
  if (node.def->role != Role::kReduce) return std::nullopt;
  const ReducedSize size(node);
  if (size.inner < 1 || size.inner > kLongestRow || node.program->num_points() >= int64_t(1) << 30) return std::nullopt;
  ShortReduction found{node};
  const Node* reader = only_reader(graph, node);
  if (reader == nullptr || reader->def->role != Role::kPointwise) return found;
  if (const std::optional<size_t> load = load_of_result(node, *reader)) found.behind = reader, found.load = *load;
  return found;
}

std::string emit_short_reduction(KernelContext& context, Refs& refs, const ShortReduction& reduction,
                                 const std::vector<int>& unstored, const std::map<size_t, std::string>& given,
                                 const std::string& argument) {
  const Node& node = reduction.reduction;
  const ReducedSize size(node);
  const ProgramCode value = emit_program(context, refs, node, {.point = "outer", .inner = "inner", .given = &given});
  const Tensor& made = output(node).tensor;
  const std::string type = cuda_type(made.dtype);
  std::string finish = "    const " + type + " reduced = cast<" + type + ">(result);\n";
  if (!contains(unstored, made.buffer))
    finish += "    " + refs.pointer(node, made, true) + "[" + element_offset(made, "outer") + "] = reduced;\n";
  if (reduction.behind != nullptr) {
    const std::map<size_t, std::string> result = {{reduction.load, "reduced"}};
    finish += emit_program(context, refs, *reduction.behind,
                           {.prefix = "b", .point = "outer", .given = &result, .unstored = &unstored})
                  .body;
  }
  const std::string op = "reduce::" + reduction_class(node);
  return "  using Index = int32_t;\n  using Op = " + op + ";\n" + constant("kOuter", size.outer) +
         constant("kInner", size.inner) +
         function("auto", "value(const Job& job, Index outer, Index inner" + argument + ")",
                  value.body + "    return cast<typename Op::Value>(" + value.result + ");\n") +
         "  template <class R>\n" + function("void", "finish(const Job& job, Index outer, R result)", finish);
}

namespace {

class ReducedPoints : public Kernel {
 public:
  ReducedPoints() : Kernel("reduced_points") {}

 private:
  static ShortReduction reduction_of(const TBGraph& graph, const Job& job) {
    return *short_reduction(graph, graph.nodes()[job.body.front()]);
  }

  std::vector<int> find_run(const TBGraph& graph, int first) const override {
    const std::optional<ShortReduction> found = short_reduction(graph, graph.nodes()[first]);
    return found && found->behind != nullptr ? std::vector<int>{first, found->behind->id} : std::vector<int>{};
  }

  bool takes_companions() const override { return true; }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    Cut cut = job.cut;
    cut.input = Input::kInPlace;
    cut.num_tiles = ReducedSize(schedule.graph.nodes()[job.body.front()]).outer;
    cut.cost_ns = memory_ns(schedule, job);
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    const std::optional<ShortReduction> found = short_reduction(proof.schedule().graph, proof.first());
    proof.require(found && found->behind != nullptr && proof.job().body.size() == 2 &&
                      found->behind->id == proof.job().body.back(),
                  "what follows does not take each result at a point of its own");
    proof.require_nothing_else();
  }

  JobCode emit(const JobPlace& place) const override {
    JobCode code{"Reduced", "run_reduced_points"};
    Refs refs(place.context, code.refs);
    const ShortReduction found = reduction_of(place.context.graph(), place.job);
    code.body = emit_short_reduction(place.context, refs, found, place.job.unstored, {}, "");
    const int64_t threads = 32 * place.context.schedule.warps.consumers;
    code.num_small_workers =
        static_cast<uint32_t>(std::min<int64_t>((place.job.cut.num_tiles + threads - 1) / threads, 1 << 20));
    return code;
  }
};

const ReducedPoints kReducedPoints{};
[[maybe_unused]] const bool kRegistered = add_run_kernel(kReducedPoints);

}  // namespace
}  // namespace mpk
