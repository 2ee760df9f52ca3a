#include "names.h"

#include "text.h"

namespace mpk::codegen {
namespace {

std::string tensor_text(const KernelContext& context, const Operand& operand) {
  std::string text = operand.name + " " + context.graph().buffers()[operand.tensor.buffer].name + "[";
  for (size_t d = 0; d < operand.tensor.shape.size(); d++) text += (d == 0 ? "" : ", ") + str(operand.tensor.shape[d]);
  return text + "]";
}

// Users choose names. Whatever they contain stays in the comment's line.
std::string comment(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < ' ' || c == '\\') c = '?';
  return "// " + text + "\n";
}

}  // namespace

std::string job_comment(const KernelContext& context, size_t phase, const Job& job) {
  std::string text = comment("Phase " + str(static_cast<int64_t>(phase)) + ":");
  for (const auto* nodes : {&job.prologue, &job.body, &job.epilogue})
    for (int n : *nodes) {
      const Node& node = context.node(n);
      std::string read, written;
      for (const Operand& operand : node.operands) {
        std::string& list = operand.is_write ? written : read;
        list += (list.empty() ? "" : ", ") + tensor_text(context, operand);
      }
      text += comment("  " + str(n) + " " + node.title() + ": " + read + " -> " + written);
    }
  return text;
}

}  // namespace mpk::codegen
