#include "scores.h"

#include "../../codegen/checks.h"
#include "../../codegen/pattern.h"
#include "../../codegen/text.h"

namespace mpk::codegen {

std::string scores(Refs& refs, const Node& node, bool zero_without_keys) {
  const Operand* sinks = node.find("sinks");
  const auto number = [&](const char* name, double value) {
    return "  static constexpr float " + std::string(name) + " = " + float_literal(value) + ";\n";
  };
  std::string text = number("kScale", node.float_attr("scale")) + number("kSoftCap", node.float_attr("softcap", 0)) +
                     flag("kZeroWithoutKeys", zero_without_keys) + flag("kHasMask", node.find("mask") != nullptr) +
                     flag("kHasSinks", sinks != nullptr);
  if (sinks == nullptr) return text;
  require(is_row_dtype(sinks->tensor.dtype), node, "the sinks must be float32, float16 or bfloat16");
  return text + returning("float", "sink(const Job& job, uint32_t h)",
                          "to_float(*(" + refs.pointer(node, sinks->tensor) + element_at(sinks->tensor, {"h"}) + "))");
}

}  // namespace mpk::codegen
