// Integer expressions over a call's bindings: sizes of a signature, requirements, and the sizes of a launch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mpk::jit {

struct Binding;
class Signature;

// Comparisons give 1 or 0. kAnd and kOr skip `operand` instructions, their second side, if the first decides. kIf takes
// a condition and skips if it is 0; kSkip always skips.
enum class Op {
  kConstant,
  kSlot,
  kAdd,
  kSub,
  kMul,
  kFloorDiv,
  kMod,
  kCdiv,
  kMin,
  kMax,
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kNot,
  kAnd,
  kOr,
  kIf,
  kSkip
};

struct Instruction {
  Op op;
  int64_t operand;  // of kConstant, kSlot, and how many those skip that do
};

// In postfix order.
struct Expression {
  std::vector<Instruction> code;
  std::string text;

  // Throws SignatureError for a division by zero and for a result beyond 64 bits.
  int64_t evaluate(const Binding& binding, const Signature& signature) const;

  // The values of its names: "N=8, K=3".
  std::string values(const Binding& binding, const Signature& signature) const;
};

}  // namespace mpk::jit
