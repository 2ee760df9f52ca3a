// Pointwise programs as CUDA code.
#pragma once

#include <map>
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
  std::string preload_fields, preload;  // members and statements of loads that can be issued early
  std::string common_fields, common;    // the same, for loads that all points share
  std::string body;
  std::string result;  // variable of the last instruction's value
};

struct ProgramOptions {
  std::string prefix = "";  // of variables
  std::string index_type = "int32_t";
  std::string point = "";             // expression of the point's number in the domain, row-major
  std::string inner = "";             // nonempty: index in the last dimension; `point` numbers the others
  std::vector<int64_t> strides = {};  // nonempty: the dimensions' strides in that number; else row-major
  // Nonzero: the point is element `n` of row `r`, two variables, and rows have so many elements.
  int64_t row = 0;
  // Nonzero: so many points are evaluated together, from `point` on. Only the coordinate of stride 1 differs between
  // them. Locals hold their values, a Vec.
  int64_t width = 0;
  bool early_loads = false;   // put unconditional loads into `preload`, as fields of `extra`
  bool common_loads = false;  // put loads that all points share into `common`, as fields of `common`
  std::vector<LocalValue>* locals = nullptr;
  const std::map<size_t, std::string>* given = nullptr;  // variables that replace loads, by instruction
  const std::vector<int>* unstored = nullptr;
};

ProgramCode emit_program(const KernelContext& context, Refs& refs, const Node& node, const ProgramOptions& options);

// The members of a variant that hold and load what all points share.
std::string common_loads(const std::string& fields, const std::string& statements);

// The statement that stores a value at an index (an expression) of an operand.
std::string emit_store(const KernelContext& context, Refs& refs, const Node& node, const Tensor& t,
                       const std::string& index, const std::string& value);

}  // namespace mpk::codegen
