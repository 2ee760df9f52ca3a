#include "scores.h"

#include "../../codegen/pattern.h"
#include "../../codegen/text.h"
#include "../../schedule/refusals.h"

namespace mpk::codegen {

std::optional<std::string> refuses_scores(const Node& node) {
  if (node.attrs.contains("style")) {
    const std::string style = node.string_attr("style");
    if (style != "sdpa" && style != "eager") return "the style must be sdpa or eager, got " + style;
  }
  if (const Operand* sinks = node.find("sinks"))
    if (auto why = refuses_row_dtype(*sinks)) return why;
  const Operand* mask = node.find("mask");
  return mask == nullptr || mask->tensor.dtype == DType::kBool ? std::nullopt : refuses_row_dtype(*mask);
}

std::string scores(Refs& refs, const Node& node, bool zero_without_keys) {
  const Operand* sinks = node.find("sinks");
  const auto number = [&](const char* name, double value) {
    return "  static constexpr float " + std::string(name) + " = " + float_literal(value) + ";\n";
  };
  std::string text = number("kScale", node.float_attr("scale")) + number("kSoftCap", node.float_attr("softcap", 0)) +
                     flag("kZeroWithoutKeys", zero_without_keys) + flag("kHasMask", node.find("mask") != nullptr) +
                     flag("kHasSinks", sinks != nullptr);
  if (sinks == nullptr) return text;
  return text + returning("float", "sink(const Job& job, uint32_t h)",
                          "to_float(*(" + refs.pointer(node, sinks->tensor) + element_at(sinks->tensor, {"h"}) + "))");
}

std::string mask_of_position(Refs& refs, const Node& node) {
  const Operand* mask = node.find("mask");
  if (mask == nullptr) return "";
  const Tensor& m = mask->tensor;
  const std::string pointer = refs.pointer(node, m);
  const std::string at = pointer + "[" + element_at(m, {"b", "h", "position"}).substr(3) + "]";
  return returning("float", "mask(const Job& job, uint32_t b, uint32_t h, uint32_t position)",
                   m.dtype == DType::kBool ? at + " ? 0.0f : -infinity()" : "to_float(" + at + ")");
}

}  // namespace mpk::codegen
