#include "context.h"

#include <algorithm>

#include "../schedule/access.h"
#include "../schedule/staging.h"
#include "checks.h"
#include "text.h"
#include "torch_mpk/abi/launch.h"
#include "torch_mpk/abi/table.h"

namespace mpk::codegen {
KernelContext::KernelContext(const Schedule& schedule) : schedule(schedule) {
  const TBGraph& graph = schedule.graph;
  written.assign(graph.buffers().size(), false);
  for (const Buffer& buffer : graph.buffers()) {
    if (buffer.kind == BufferKind::kInput) num_inputs = std::max(num_inputs, buffer.index + 1);
    if (buffer.kind == BufferKind::kOutput) num_outputs = std::max(num_outputs, buffer.index + 1);
  }
  input_alignment.assign(num_inputs, 1);
  phases_of_.resize(graph.nodes().size());
  for (size_t p = 0; p < schedule.phases.size(); p++)
    for (const Job& job : schedule.phases[p].jobs)
      for (const std::vector<int>* nodes : {&job.prologue, &job.body, &job.epilogue})
        for (int n : *nodes) phases_of_[n].push_back(static_cast<int>(p));
  for (const Node& node : graph.nodes()) {
    for (const Operand& operand : node.operands) {
      const Buffer& buffer = graph.buffers()[operand.tensor.buffer];
      if (operand.is_write) written[operand.tensor.buffer] = true;
      if (buffer.kind == BufferKind::kInput)
        input_alignment[buffer.index] = std::max<int>(input_alignment[buffer.index], size_bytes(operand.tensor.dtype));
    }
    if (node.program)
      for (const Instr& instr : node.program->instrs)
        if (instr.op == Op::kSize) num_scalars = std::max(num_scalars, instr.operand + 1);
  }
}

bool KernelContext::known_before(int buffer, int phase) const {
  for (const Node& node : schedule.graph.nodes())
    for (const Operand& operand : node.operands) {
      if (!operand.is_write || operand.tensor.buffer != buffer) continue;
      for (int writer : phases_of_[node.id])
        if (writer == phase || (writer < phase && !happens_before(schedule, writer, phase - 1))) return false;
    }
  return true;
}

bool KernelContext::aligned_rows(const Tensor& t, bool is_activation) {
  const bool aligned = has_aligned_rows(t);
  const Buffer& buffer = graph().buffers()[t.buffer];
  if (!aligned || buffer.kind != BufferKind::kInput) return aligned;
  if (is_activation) return false;
  input_alignment[buffer.index] = std::max(input_alignment[buffer.index], kAccessBytes);
  return true;
}

int Refs::add_raw(uint32_t index, uint64_t offset) {
  refs_.push_back(make_ref(index, offset));
  return static_cast<int>(refs_.size()) - 1;
}

int Refs::add(const Node& node, const Tensor& t) {
  const Buffer& buffer = context_.graph().buffers()[t.buffer];
  const int64_t offset = t.offset * size_bytes(t.dtype);
  if (buffer.kind == BufferKind::kInput) return add_raw(buffer.index, offset);
  if (buffer.kind == BufferKind::kOutput) return add_raw(context_.num_inputs + buffer.index, offset);
  const int64_t place = context_.schedule.workspace_offsets[t.buffer];
  if (place < 0) fail(node, "buffer '" + buffer.name + "' is needed in memory, but the schedule stores it nowhere");
  return add_raw(context_.polled(t.buffer) ? kPolledIndex : kWorkspaceIndex, place + offset);
}

void Refs::add_map(const Tensor& t, int64_t box_rows, int64_t box_columns) {
  context_.has_swizzle = true;
  add_map(t, box_rows, box_columns, false);
}

std::string Refs::plain_map(const Tensor& t, int64_t box_rows, int64_t box_columns) {
  return "job.pointer<const void>(" + str(add_map(t, box_rows, box_columns, true)) + ")";
}

int Refs::add_map(const Tensor& t, int64_t box_rows, int64_t box_columns, bool plain) {
  const int64_t element = size_bytes(t.dtype), input = context_.graph().buffers()[t.buffer].index;
  context_.maps.push_back(
      {input, t.offset * element, t.shape[0], t.shape[1], t.strides[0] * element, box_rows, box_columns, plain});
  return add_raw(kMapsIndex, (context_.maps.size() - 1) * kMapBytes);
}

std::string Refs::pointer(const Node& node, const Tensor& t, bool writable) {
  const std::string type = context_.polled(t.buffer) ? "uint16_t" : cuda_type(t.dtype);
  return "job.pointer<" + std::string(writable ? "" : "const ") + type + ">(" + str(add(node, t)) + ")";
}

std::string Refs::partials(const Pieces& pieces) {
  return "job.pointer<uint8_t>(" + str(add_raw(kWorkspaceIndex, pieces.offset)) + ")";
}

}  // namespace mpk::codegen
