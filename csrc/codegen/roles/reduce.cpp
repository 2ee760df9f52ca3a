// A program reduced over the last dimension of its domain.
#include <algorithm>
#include <map>

#include "../checks.h"
#include "../emitter.h"
#include "../pattern.h"
#include "../program.h"
#include "../text.h"

namespace mpk::codegen {
namespace {

// The class of namespace reduce (see points.cuh) for the node's operation.
std::string class_of(const Node& node) {
  static const std::map<std::string, std::string> kClasses = {
      {"sum", "Sum"}, {"mean", "Mean"}, {"prod", "Prod"},     {"amax", "AMax"},    {"amin", "AMin"},
      {"any", "Any"}, {"all", "All"},   {"argmax", "ArgMax"}, {"argmin", "ArgMin"}};
  const std::string op = node.string_attr("op");
  const auto found = kClasses.find(op);
  require(found != kClasses.end(), node, "unknown reduction '" + op + "'");
  return found->second;
}

class ReduceJob : public Emitter {
  JobCode emit(const JobPlace& place) const override {
    const Node& node = place.node();
    JobCode code{"Reduce", "run_reduce", "", str(place.job.staged_bytes)};
    Refs refs(place.context, code.refs);
    const Program& program = *node.program;
    const std::string reduction = class_of(node);
    const DType value_type = program.instrs.back().dtype;
    const std::string computed = value_type == DType::kF64 ? "double" : is_float(value_type) ? "float" : "int64_t";
    const int64_t inner = program.domain.back(), outer = inner == 0 ? 0 : program.num_points() / inner;
    const std::string index = program.num_points() < (int64_t(1) << 30) ? "int32_t" : "int64_t";
    const ProgramCode value =
        emit_program(place.context, refs, node,
                     {.prefix = "", .index_type = index, .point = "outer", .inner = "inner", .early_loads = true});
    const Tensor& out = node.operands.back().tensor;
    code.body = "  using Index = " + index + ";\n  using Op = reduce::" + reduction + "<" + computed +
                ">;\n  static constexpr int64_t kOuter = " + str(outer) + ", kInner = " + str(inner) + ";\n" +
                "  struct Extra {\n" + value.preload_fields + "  };\n" +
                function("Extra", "preload(const Job& job, Index outer, Index inner)",
                         "    Extra extra{};\n" + value.preload + "    return extra;\n") +
                function(computed, "value(const Job& job, Index outer, Index inner, const Extra& extra)",
                         value.body + "    return cast<" + computed + ">(" + value.result + ");\n") +
                "  template <class R>\n" +
                function("void", "finish(const Job& job, Index outer, R result)",
                         "    " + refs.pointer(node, out, true) + "[" + element_offset(out, "outer") + "] = cast<" +
                             cuda_type(out.dtype) + ">(result);\n");
    const std::optional<Pieces>& pieces = place.job.pieces;
    code.body += constant("kPieces", pieces ? pieces->of_row : 1);
    if (pieces)
      code.body += constant("kPieceBytes", pieces->result_bytes) +
                   returning("uint8_t*", "partials(const Job& job)", refs.workspace(pieces->offset));
    return code;
  }
};

const ReduceJob kEmitter{};
[[maybe_unused]] const bool kRegistered = emitters().add(Role::kReduce, kEmitter);

}  // namespace
}  // namespace mpk::codegen
