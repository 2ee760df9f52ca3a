// TBGraph: the threadblock-level task graph of one captured graph segment.
//
// Nodes stand in program order. In-place effects are ordinary writes, so that order, and not data flow alone, decides
// what a read sees; `dependencies` lists the resulting edges.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "torch_mpk/dtype.h"
#include "torch_mpk/graph/program.h"
#include "torch_mpk/graph/task_registry.h"
#include "torch_mpk/kernel_api.h"

namespace mpk {

enum class BufferKind : uint8_t { kInput, kOutput, kWorkspace };

struct Buffer {
  std::string name;
  BufferKind kind;
  int index;      // kInput: position among the call's tensors; kOutput: position among the results; kWorkspace: -1
  int64_t bytes;  // extent; 0 when only known at run time (a size that depends on a SymInt)
};

// A strided view of a buffer; "global tensor" in the docs. Units are elements.
struct MPK_KERNEL_API Tensor {
  int buffer;
  DType dtype;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  int64_t offset = 0;

  int64_t numel() const;
  bool is_contiguous() const;
};

using Attr = std::variant<int64_t, double, std::string>;

struct Operand {
  std::string name;  // as in the task's signature; programs number theirs: in0, in1, ..., out0, ...
  Tensor tensor;
  bool is_read;
  bool is_write;
};

struct MPK_KERNEL_API Node {
  int id;
  const TaskDef* def;
  std::vector<Operand> operands;
  std::map<std::string, Attr> attrs;
  std::optional<Program> program;  // tasks of role kPointwise and kReduce
  std::string label;               // where it comes from: "model.layers.0.self_attn.q_proj"

  std::string title() const;  // for people: "linear model.layers.0.self_attn.q_proj"

  const Operand* find(const std::string& operand) const;  // nullptr when an optional operand is absent
  const Operand& operand(const std::string& name) const;  // throws when absent
  int64_t int_attr(const std::string& name) const;
  double float_attr(const std::string& name) const;
  double float_attr(const std::string& name, double otherwise) const;  // where it may be absent
  std::string string_attr(const std::string& name) const;
};

enum class Hazard : uint8_t { kReadAfterWrite, kWriteAfterRead, kWriteAfterWrite };

struct Dependency {
  int from, to;  // node ids, from < to
  int buffer;
  Hazard hazard;
};

class TBGraph {
 public:
  int add_buffer(std::string name, BufferKind kind, int index, int64_t bytes);
  // Checks operands against the task's signature (named dimensions, dtypes, optional operands) and throws
  // std::invalid_argument naming task, operand, expected and actual.
  int add_node(const std::string& task, std::vector<Operand> operands, std::map<std::string, Attr> attrs,
               std::optional<Program> program, std::string label);

  const std::vector<Buffer>& buffers() const { return buffers_; }
  const std::vector<Node>& nodes() const { return nodes_; }
  std::vector<Dependency> dependencies() const;
  std::string to_json() const;

 private:
  std::vector<Buffer> buffers_;
  std::vector<Node> nodes_;
};

}  // namespace mpk
