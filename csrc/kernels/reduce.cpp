// A program reduced over the last dimension of its domain.
#include "reduce.h"

#include <algorithm>
#include <array>
#include <map>

#include "../codegen/checks.h"
#include "../codegen/job_code.h"
#include "../codegen/pattern.h"
#include "../codegen/program.h"
#include "../codegen/text.h"
#include "../schedule/kernel.h"
#include "fields.h"

namespace mpk {

ReducedSize::ReducedSize(const Node& reduction) {
  const Program& program = *reduction.program;
  inner = program.domain.back();
  outer = inner == 0 ? 0 : program.num_points() / inner;
}

std::string reduction_class(const Node& node) {
  static const std::map<std::string, std::string> kClasses = {
      {"sum", "Sum"}, {"mean", "Mean"}, {"prod", "Prod"},     {"amax", "AMax"},    {"amin", "AMin"},
      {"any", "Any"}, {"all", "All"},   {"argmax", "ArgMax"}, {"argmin", "ArgMin"}};
  const std::string op = node.string_attr("op");
  const auto found = kClasses.find(op);
  codegen::require(found != kClasses.end(), node, "unknown reduction '" + op + "'");
  const DType type = node.program->instrs.back().dtype;
  return found->second + "<" + (type == DType::kF64 ? "double" : is_float(type) ? "float" : "int64_t") + ">";
}

namespace {

using namespace codegen;

constexpr int64_t kStateBytes = 32;  // of a split

struct ReduceFields {
  int64_t splits = 1;  // splits of a row, each with a worker of its own

  static constexpr std::array<FieldOf<ReduceFields>, 1> kAll = {{{"splits", "kSplits", &ReduceFields::splits}}};
};

class Reduce : public Kernel {
 public:
  Reduce() : Kernel("reduce") {}

 private:
  // Rows are split if they are fewer than workers.
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    constexpr int64_t kLeast = 2048;  // elements of a split
    Cut cut = job.cut;
    cut.staged_bytes = 256;  // a state of each warp
    const ReducedSize size(schedule.graph.nodes()[job.body.front()]);
    ReduceFields own;
    if (size.outer > 0)
      own.splits = std::max<int64_t>(std::min(schedule.target.num_workers / size.outer, size.inner / kLeast), 1);
    if (own.splits > 1) cut.scratch = Scratch{size.outer * own.splits * kStateBytes};
    cut.fields = list_fields(own);
    cut.cost_ns = memory_ns(schedule, job);
    return {cut};
  }

  // A worker has at most one split.
  void prove(const CutProof& proof) const override {
    const auto own = fields_of<ReduceFields>(proof.cut());
    const int64_t rows = ReducedSize(proof.first()).outer;
    proof.require(own.splits > 0, "a size of its parts is not positive");
    proof.require_scratch(own.splits == 1 ? 0 : rows * own.splits * kStateBytes);
    proof.require(own.splits == 1 || rows * own.splits <= proof.schedule().target.num_workers,
                  proof.str(rows * own.splits) + " parts of rows are more than " +
                      proof.str(proof.schedule().target.num_workers) + " workers");
    proof.require_plain_end();
  }

  JobCode emit(const JobPlace& place) const override {
    const Node& node = place.node();
    JobCode code{"Reduce", "run_reduce", "", str(place.job.cut.staged_bytes)};
    Refs refs(place.context, code.refs);
    const ReducedSize size(node);
    const std::string index = node.program->num_points() < (int64_t(1) << 30) ? "int32_t" : "int64_t";
    const ProgramCode value =
        emit_program(place.context, refs, node,
                     {.prefix = "", .index_type = index, .point = "outer", .inner = "inner", .early_loads = true});
    const Tensor& out = node.operands.back().tensor;
    code.body = "  using Index = " + index + ";\n  using Op = reduce::" + reduction_class(node) +
                ";\n  static constexpr int64_t kOuter = " + str(size.outer) + ", kInner = " + str(size.inner) + ";\n" +
                "  struct Extra {\n" + value.preload_fields + "  };\n" +
                function("Extra", "preload(const Job& job, Index outer, Index inner)",
                         "    Extra extra{};\n" + value.preload + "    return extra;\n") +
                function("auto", "value(const Job& job, Index outer, Index inner, const Extra& extra)",
                         value.body + "    return cast<typename Op::Value>(" + value.result + ");\n") +
                "  template <class R>\n" +
                function("void", "finish(const Job& job, Index outer, R result)",
                         "    " + refs.pointer(node, out, true) + "[" + element_offset(out, "outer") + "] = cast<" +
                             cuda_type(out.dtype) + ">(result);\n");
    code.body += constants(fields_of<ReduceFields>(place.job.cut));
    if (place.job.cut.scratch)
      code.body += constant("kSplitBytes", kStateBytes) +
                   returning("uint8_t*", "partials(const Job& job)", refs.workspace(place.job.cut.scratch->offset));
    return code;
  }
};

const Reduce kReduce{};
[[maybe_unused]] const bool kRegistered = add_kernel(Role::kReduce, kReduce);

}  // namespace
}  // namespace mpk
