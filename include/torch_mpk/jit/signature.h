// A kernel's signature: requirements on arguments, and the sizes, strides and dtypes that they bind.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "torch_mpk/dtype.h"
#include "torch_mpk/jit/dlpack.h"
#include "torch_mpk/jit/expression.h"

namespace mpk::jit {

inline constexpr int kMaxOperands = 64;
inline constexpr int kMaxSlots = 64;

// The arguments of a call do not fit. what(): kernel, operand, dimension, what was expected and what came.
struct SignatureError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A size or stride: bound to a slot by the first operand that has it, a number, ignored, or computed.
struct Extent {
  enum Kind { kSlot, kLiteral, kAny, kExpression } kind;
  int64_t value;  // slot, number, or index of an expression of the signature
};

struct Operand {
  std::string name, text;  // text: as in the signature, "x[M, K; S, 1]"
  bool has_leading;        // "...": any number of dimensions in front of `sizes`, the same in every operand
  std::vector<Extent> sizes;
  std::vector<Extent> strides;  // one for each size; empty: contiguous
  uint32_t dtypes;              // a bit for each accepted DType
  int dtype_slot, numel_slot;   // -1: none
  bool is_optional, is_output, is_written;
  bool is_scratch;  // an output that is not returned
};

// A call's bindings so far.
struct Binding {
  int64_t values[kMaxSlots];   // a DType as its number
  int8_t bound_by[kMaxSlots];  // an operand, or one of the constants below
  static constexpr int8_t kFree = -1, kAttribute = -2;
  dlpack::Tensor tensors[kMaxOperands];
  bool is_present[kMaxOperands];
  const dlpack::Tensor* leading;  // the first operand with "...", of which num_leading sizes are bound
  int num_leading, leading_by;
  dlpack::Device device;
  int device_by;  // an operand, or -1
};

class Signature {
 public:
  // Throws std::invalid_argument for more operands or slots than a call has room for.
  Signature(std::string kernel, std::string text, int device_type, std::vector<Operand> operands,
            std::vector<std::string> slot_names, std::vector<Expression> expressions);

  void start(Binding& binding) const;

  // Checks an operand, whose tensor is in the binding, against the signature and earlier operands, and binds its sizes.
  // Throws SignatureError.
  void match(int operand, Binding& binding) const;

  // The size of an output before it is allocated. Throws SignatureError for a negative one.
  int64_t size_of(int operand, const Extent& extent, const Binding& binding) const;

  [[noreturn]] void fail(const std::string& what) const;

  const std::string& kernel() const { return kernel_; }
  const std::vector<Operand>& operands() const { return operands_; }
  const std::vector<std::string>& slot_names() const { return slot_names_; }

 private:
  void match_dtype(int operand, Binding& binding) const;
  void match_device(int operand, Binding& binding) const;
  void match_sizes(int operand, Binding& binding) const;
  void match_strides(int operand, Binding& binding) const;
  // Whether `value` fits the extent; binds a free one.
  bool bind(const Extent& extent, int64_t value, int operand, Binding& binding) const;
  std::string origin(int64_t slot, const Binding& binding) const;
  // The expected size or stride.
  std::string expected(const Extent& extent, const Binding& binding) const;

  const std::string kernel_, text_;
  const int device_type_;
  const std::vector<Operand> operands_;
  const std::vector<std::string> slot_names_;
  const std::vector<Expression> expressions_;
};

// The type of a tensor's elements; -1 if kernels do not support it.
int dtype_of(const dlpack::Tensor& tensor);

bool is_contiguous(const dlpack::Tensor& tensor);

}  // namespace mpk::jit
