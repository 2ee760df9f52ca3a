#include "torch_mpk/graph/program.h"

#include <sstream>
#include <stdexcept>

namespace mpk {
namespace {

enum class Family : uint8_t { kStructural, kArithmetic, kFloat, kInteger, kCompare };

struct OpInfo {
  const char* name;
  int min_args, max_args;
  Family family;
};

constexpr OpInfo kOps[] = {{"const", 0, 0, Family::kStructural},
                           {"index", 0, 0, Family::kStructural},
                           {"size", 0, 0, Family::kStructural},
                           {"load", 0, 2, Family::kStructural},
                           {"store", 1, 3, Family::kStructural},
                           {"cast", 1, 1, Family::kStructural},
                           {"where", 3, 3, Family::kStructural},
                           {"bit_cast", 1, 1, Family::kStructural},
#define X(name, arity, expression) {#name, arity, arity, Family::kArithmetic},
                           MPK_POINTWISE_ARITHMETIC(X)
#undef X
#define X(name, arity, expression) {#name, arity, arity, Family::kFloat},
                               MPK_POINTWISE_FLOAT(X)
#undef X
#define X(name, arity, expression) {#name, arity, arity, Family::kInteger},
                                   MPK_POINTWISE_INTEGER(X)
#undef X
#define X(name, arity, expression) {#name, arity, arity, Family::kCompare},
                                       MPK_POINTWISE_COMPARE(X)
#undef X
};
static_assert(std::size(kOps) == static_cast<size_t>(Op::kNumOps));

const OpInfo& op_info(Op op) { return kOps[static_cast<int>(op)]; }

}  // namespace

const char* op_name(Op op) { return op_info(op).name; }

Op parse_op(const std::string& name) {
  for (int i = 0; i < static_cast<int>(Op::kNumOps); i++)
    if (name == kOps[i].name) return static_cast<Op>(i);
  throw std::invalid_argument("'" + name + "' is not an operation of pointwise programs");
}

std::vector<std::string> op_names() {
  std::vector<std::string> names;
  for (const OpInfo& op : kOps) names.emplace_back(op.name);
  return names;
}

int64_t Program::num_points() const {
  int64_t n = 1;
  for (int64_t size : domain) n *= size;
  return n;
}

void check(const Program& program, int num_operands) {
  auto fail = [&](size_t i, const std::string& what) {
    throw std::invalid_argument("program instruction " + std::to_string(i) + " (" + op_name(program.instrs[i].op) +
                                "): " + what);
  };
  for (int64_t size : program.domain)
    if (size < 0) throw std::invalid_argument("program: negative domain size " + std::to_string(size));
  for (size_t i = 0; i < program.instrs.size(); i++) {
    const Instr& instr = program.instrs[i];
    const OpInfo& op = op_info(instr.op);
    const int num_args = static_cast<int>(instr.args.size());
    if (num_args < op.min_args || num_args > op.max_args)
      fail(i, "expected " + std::to_string(op.min_args) + " to " + std::to_string(op.max_args) + " arguments, got " +
                  std::to_string(num_args));
    for (int arg : instr.args) {
      if (arg < 0 || arg >= static_cast<int>(i)) fail(i, "argument " + std::to_string(arg) + " does not precede it");
      if (program.instrs[arg].op == Op::kStore)
        fail(i, "argument " + std::to_string(arg) + " is a store, which has no value");
    }
    const bool accesses = instr.op == Op::kLoad || instr.op == Op::kStore;
    if (accesses) {
      if (instr.operand < 0 || instr.operand >= num_operands)
        fail(i, "operand " + std::to_string(instr.operand) + " of " + std::to_string(num_operands));
      if (instr.strides.size() != program.domain.size())
        fail(i, "expected " + std::to_string(program.domain.size()) + " strides, got " +
                    std::to_string(instr.strides.size()));
      const size_t first = instr.op == Op::kStore ? 1 : 0;
      if (instr.args.size() > first && program.instrs[instr.args[first]].dtype != DType::kI64)
        fail(i, "the offset must be int64");
      if (instr.args.size() > first + 1 && program.instrs[instr.args[first + 1]].dtype != DType::kBool)
        fail(i, "the predicate must be bool");
    }
    if (instr.op == Op::kIndex && (instr.operand < 0 || instr.operand >= static_cast<int>(program.domain.size())))
      fail(i, "dimension " + std::to_string(instr.operand) + " of " + std::to_string(program.domain.size()));
    if ((instr.op == Op::kIndex || instr.op == Op::kSize) && instr.dtype != DType::kI64) fail(i, "its dtype is int64");
    if (instr.op == Op::kWhere && program.instrs[instr.args[0]].dtype != DType::kBool)
      fail(i, "the condition must be bool");
    if (instr.op == Op::kBitCast) {
      const DType from = program.instrs[instr.args[0]].dtype;
      if (!(from == DType::kI32 && instr.dtype == DType::kF32) && !(from == DType::kF32 && instr.dtype == DType::kI32))
        fail(i, "it makes float32 of int32, or int32 of float32");
    }
    if (is_only_stored(instr.dtype)) fail(i, std::string(info(instr.dtype).name) + " is a dtype of storage alone");
    if (op.family == Family::kFloat && !is_float(instr.dtype))
      fail(i, std::string("needs a floating dtype, got ") + info(instr.dtype).name);
    if (op.family == Family::kInteger && is_float(instr.dtype))
      fail(i, std::string("needs an integer dtype, got ") + info(instr.dtype).name);
    if (op.family == Family::kCompare && instr.dtype != DType::kBool) fail(i, "its dtype is bool");
  }
}

std::string to_string(const Program& program) {
  std::ostringstream out;
  out << "domain [";
  for (size_t d = 0; d < program.domain.size(); d++) out << (d ? ", " : "") << program.domain[d];
  out << "]\n";
  for (size_t i = 0; i < program.instrs.size(); i++) {
    const Instr& instr = program.instrs[i];
    out << "  %" << i << ": " << info(instr.dtype).name << " = " << op_name(instr.op);
    for (int arg : instr.args) out << " %" << arg;
    if (instr.operand >= 0) out << " #" << instr.operand;
    if (!instr.strides.empty()) {
      out << " strides(";
      for (size_t d = 0; d < instr.strides.size(); d++) out << (d ? ", " : "") << instr.strides[d];
      out << ")";
    }
    if (instr.op == Op::kConst) is_float(instr.dtype) ? out << " " << instr.imm : out << " " << instr.imm_int;
    out << "\n";
  }
  return out.str();
}

}  // namespace mpk
