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

Refs::Place Refs::place_of(const Node& node, const Tensor& t) const {
  const Buffer& buffer = context_.graph().buffers()[t.buffer];
  const int64_t offset = t.offset * size_bytes(t.dtype);
  if (buffer.kind == BufferKind::kInput) return {static_cast<uint32_t>(buffer.index), offset};
  if (buffer.kind == BufferKind::kOutput) return {static_cast<uint32_t>(context_.num_inputs + buffer.index), offset};
  const int64_t place = context_.schedule.workspace_offsets[t.buffer];
  if (place < 0) fail(node, "buffer '" + buffer.name + "' is needed in memory, but the schedule stores it nowhere");
  return {context_.polled(t.buffer) ? kPolledIndex : kWorkspaceIndex, place + offset};
}

int Refs::add(const Node& node, const Tensor& t) {
  const Place place = place_of(node, t);
  return add_raw(place.index, place.offset);
}

int Refs::add_map(const Node& node, const Tensor& t, int64_t box_rows, int64_t box_columns, MapLayout layout) {
  const Place place = place_of(node, t);
  const int64_t pitch = (t.shape[0] == 1 ? t.shape[1] : t.strides[0]) * size_bytes(t.dtype);
  const MatrixMap map{place.index, place.offset, t.shape[0], t.shape[1], pitch, box_rows, box_columns, layout};
  context_.has_swizzle |= layout != kMapOfRows;
  size_t number = 0;
  while (number < context_.maps.size() && context_.maps[number].fields() != map.fields()) number++;
  if (number == context_.maps.size()) context_.maps.push_back(map);
  return add_raw(kMapsIndex, number * kMapBytes);
}

std::string Refs::pointer(const Node& node, const Tensor& t, bool writable) {
  const std::string type = context_.polled(t.buffer) ? "uint16_t" : cuda_type(t.dtype);
  return "job.pointer<" + std::string(writable ? "" : "const ") + type + ">(" + str(add(node, t)) + ")";
}

std::string Refs::number(int64_t value) {
  return "job.number(" + str(add_raw(kNumberIndex, static_cast<uint64_t>(value))) + ")";
}

std::string Refs::workspace(int64_t offset, const std::string& type) {
  return "job.pointer<" + type + ">(" + str(add_raw(kWorkspaceIndex, offset)) + ")";
}

}  // namespace mpk::codegen
