// Pointwise programs as CUDA code.
#pragma once

#include <string>
#include <vector>

#include "context.h"
#include "pattern.h"

namespace mpk::codegen {

// Values that exist only inside a job: an access that matches takes the variable instead of memory.
struct LocalValue {
  int buffer;
  Pattern where;
  std::string variable;
  DType dtype;
};

struct ProgramCode {
  std::string preload_fields, preload;  // members and statements for loads that can be issued early
  std::string body;
  std::string result;  // variable of the last instruction's value
};

struct ProgramOptions {
  std::string prefix = "";  // of variables
  std::string index_type = "int32_t";
  std::string point = "";    // expression of the point's number in the domain, row-major
  std::string inner = "";    // nonempty: the index in the last dimension; `point` numbers the others
  bool early_loads = false;  // put unconditional loads into `preload`, as fields of `extra`
  std::vector<LocalValue>* locals = nullptr;
  const std::vector<int>* unstored = nullptr;
};

ProgramCode emit_program(const KernelContext& context, Refs& refs, const Node& node, const ProgramOptions& options);

// The statement that stores a value at an index (an expression) of an operand.
std::string emit_store(const KernelContext& context, Refs& refs, const Node& node, const Tensor& t,
                       const std::string& index, const std::string& value);

}  // namespace mpk::codegen
