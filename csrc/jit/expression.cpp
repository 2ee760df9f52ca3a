#include "torch_mpk/jit/expression.h"

#include <algorithm>

#include "torch_mpk/jit/signature.h"

namespace mpk::jit {
namespace {

constexpr size_t kMaxDepth = 32;

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

bool divides(Op op) { return op == Op::kFloorDiv || op == Op::kMod || op == Op::kCdiv; }

// Stores an operation's result in `a`. True if it is beyond 64 bits.
bool apply(Op op, int64_t& a, int64_t b) {
  switch (op) {
    case Op::kAdd:
      return __builtin_add_overflow(a, b, &a);
    case Op::kSub:
      return __builtin_sub_overflow(a, b, &a);
    case Op::kMul:
      return __builtin_mul_overflow(a, b, &a);
    case Op::kFloorDiv:
      a = floor_div(a, b);
      break;
    case Op::kMod:
      a -= floor_div(a, b) * b;
      break;
    case Op::kCdiv:
      a = floor_div(a, b) + (a % b != 0);
      break;
    case Op::kMin:
      a = std::min(a, b);
      break;
    case Op::kMax:
      a = std::max(a, b);
      break;
    case Op::kEqual:
      a = a == b;
      break;
    case Op::kNotEqual:
      a = a != b;
      break;
    case Op::kLess:
      a = a < b;
      break;
    case Op::kLessEqual:
      a = a <= b;
      break;
    case Op::kGreater:
      a = a > b;
      break;
    case Op::kGreaterEqual:
      a = a >= b;
      break;
    default:  // takes no two numbers
      break;
  }
  return false;
}

}  // namespace

int64_t Expression::evaluate(const Binding& binding, const Signature& signature) const {
  int64_t stack[kMaxDepth];
  size_t depth = 0;
  for (size_t i = 0; i < code.size(); i++) {
    const Instruction& instruction = code[i];
    switch (instruction.op) {
      case Op::kConstant:
      case Op::kSlot:
        if (depth == kMaxDepth) signature.fail("'" + text + "' is nested too deep");
        stack[depth++] = instruction.op == Op::kSlot ? binding.values[instruction.operand] : instruction.operand;
        break;
      case Op::kAnd:
      case Op::kOr:
        if ((stack[depth - 1] != 0) == (instruction.op == Op::kOr))
          i += instruction.operand;
        else
          depth--;
        break;
      case Op::kIf:
        if (stack[--depth] == 0) i += instruction.operand;
        break;
      case Op::kSkip:
        i += instruction.operand;
        break;
      case Op::kNot:
        stack[depth - 1] = !stack[depth - 1];
        break;
      default: {
        const int64_t b = stack[--depth];
        if (divides(instruction.op) && b <= 0) signature.fail("'" + text + "' divides by " + std::to_string(b));
        if (apply(instruction.op, stack[depth - 1], b)) signature.fail("'" + text + "' is beyond 64 bits");
      }
    }
  }
  return stack[0];
}

std::string Expression::values(const Binding& binding, const Signature& signature) const {
  std::vector<int64_t> slots;
  std::string text;
  for (const auto& [op, slot] : code) {
    if (op != Op::kSlot || std::find(slots.begin(), slots.end(), slot) != slots.end()) continue;
    text += (slots.empty() ? "" : ", ") + signature.slot_names()[slot] + "=" + std::to_string(binding.values[slot]);
    slots.push_back(slot);
  }
  return text;
}

}  // namespace mpk::jit
