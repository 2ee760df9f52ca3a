// A pointwise program: straight-line scalar code evaluated once at every point of an index domain.
//
// It expresses what stands between a model's matrix products: arithmetic, comparisons, casts, broadcasting, views,
// concatenation, padding, gathers and in-place writes. Each value has a dtype, and an operation rounds its result to
// it, exactly where the eager graph does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "torch_mpk/abi/pointwise_ops.h"
#include "torch_mpk/dtype.h"

namespace mpk {

enum class Op : uint8_t {
  kConst,    // imm
  kIndex,    // the point's coordinate along dimension `operand`, int64
  kSize,     // the call's scalar argument number `operand` (a SymInt of the captured graph), int64
  kLoad,     // operand[sum(strides * index) + offset]; args: [offset (int64)] or [offset, predicate]; 0 where the
             // predicate is false
  kStore,    // args: [value] or [value, offset] or [value, offset, predicate]; addressing as kLoad; no result
  kCast,     // args: [value]
  kWhere,    // args: [condition, value if true, value if false]
  kBitCast,  // args: [value]; float32 of an int32's bits, or int32 of a float32's
#define X(name, arity, expression) k_##name,
  MPK_POINTWISE_ARITHMETIC(X) MPK_POINTWISE_FLOAT(X) MPK_POINTWISE_INTEGER(X) MPK_POINTWISE_COMPARE(X)
#undef X
      kNumOps
};

struct Instr {
  Op op;
  DType dtype;                   // of the result; of the stored element for kStore
  std::vector<int> args;         // indices of earlier instructions
  int operand = -1;              // kLoad, kStore: position in the node's operands. kIndex, kSize: see Op
  std::vector<int64_t> strides;  // kLoad, kStore: element strides, one per domain dimension
  double imm = 0;                // kConst, floating dtypes
  int64_t imm_int = 0;           // kConst, integer and bool dtypes
};

struct Program {
  std::vector<int64_t> domain;  // a reduction's reduced dimension comes last
  std::vector<Instr> instrs;

  int64_t num_points() const;
};

// The spelling of an operation in Python, in dumps and in generated code: "load", "add", ...
const char* op_name(Op op);
Op parse_op(const std::string& name);  // throws std::invalid_argument
std::vector<std::string> op_names();

// Throws std::invalid_argument naming the instruction when the program is malformed: arguments that do not precede
// their use, wrong arity, wrong number of strides, operand out of range, dtype not allowed for the operation.
void check(const Program& program, int num_operands);

std::string to_string(const Program& program);

}  // namespace mpk
