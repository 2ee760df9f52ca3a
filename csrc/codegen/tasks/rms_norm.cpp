#include "rms_norm.h"

#include <algorithm>
#include <iterator>

#include "../chain.h"
#include "../checks.h"
#include "../text.h"

namespace mpk::codegen {
namespace {

std::string style_of(const Node& node) {
  const std::string style = node.string_attr("style");
  if (style == "llama") return "kLlama";
  if (style == "torch") return "kTorch";
  if (style == "gemma") return "kGemma";
  fail(node, "unknown style '" + style + "', expected llama, torch or gemma");
}

std::string name_of_style(const Node& node) { return "rms_norm::Style::" + style_of(node); }

RowCode emit(const RowPlace& at) {
  const Operand* weight = at.task.find("weight");
  RowCode code;
  code.vectorized = at.vectorized && (!weight || at.context.aligned_rows(weight->tensor, false));
  code.polls = true;
  code.traits = "    using Weight = " + std::string(cuda_type(weight ? weight->tensor.dtype : at.dtype)) +
                ";\n    static constexpr float kEps = " + float_literal(at.task.float_attr("eps")) +
                ";\n    static constexpr rms_norm::Style kStyle = " + name_of_style(at.task) +
                ";\n    static constexpr bool kHasWeight = " + truth(weight != nullptr) +
                ", kVectorized = " + truth(code.vectorized) + ";\n";
  if (weight) {
    code.early = at.known(weight->tensor);
    code.traits += "    static MPK_DEVICE const Weight* weight(const Job& job) { return job.pointer<const Weight>(" +
                   str(at.refs.add(at.task, weight->tensor)) + "); }\n";
  }
  return code;
}

[[maybe_unused]] const bool kRegistered = add_row_emitter("rms_norm", emit);

}  // namespace

std::string weighted_element(const Node& norm, const std::string& element, const std::string& weight) {
  return "rms_norm::normalised<T, " + name_of_style(norm) + ">(" + element + ", 1.0f, " + weight + ")";
}

}  // namespace mpk::codegen
