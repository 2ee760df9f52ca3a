// Passes, kernels and the validator ask here what fits in shared memory together, and what can be copied there.
#pragma once

#include <algorithm>

#include "torch_mpk/abi/table.h"
#include "torch_mpk/schedule/schedule.h"

namespace mpk {

inline int64_t divide_up(int64_t count, int64_t size) { return (count + size - 1) / size; }
inline int64_t round_up(int64_t count, int64_t multiple) { return divide_up(count, multiple) * multiple; }

// Shared memory for a job's staged operands, beside the fixed part, rows of the table of the greatest length, and the
// smallest ring.
inline int64_t room(const Schedule& schedule) {
  const int64_t fixed = kMaxFixedBytes + int64_t(kPhasesAhead) * kMaxRowBytes;
  const int64_t rest = schedule.target.smem_bytes - fixed - kFewestSlots * schedule.warps.slot_bytes;
  return rest / kSharedAlignment * kSharedAlignment;
}

// Whether 16-byte copies of the tensor's rows are aligned, if its buffer is.
inline bool has_aligned_rows(const Tensor& t) {
  const int64_t bytes = size_bytes(t.dtype);
  bool aligned =
      t.offset * bytes % kAccessBytes == 0 && (t.shape.empty() || t.shape.back() * bytes % kAccessBytes == 0);
  for (size_t d = 0; d + 1 < t.shape.size(); d++)
    aligned &= t.shape[d] == 1 || t.strides[d] * bytes % kAccessBytes == 0;
  return aligned;
}

// Whether the bytes of a row, and from row to row, fit the loader's 32 bits.
inline bool has_short_rows(const Tensor& t) {
  const int64_t row = t.shape.empty() ? 1 : t.shape.back();
  const int64_t pitch = t.shape.size() < 2 ? row : t.strides[t.strides.size() - 2];
  return std::max(row, pitch) * size_bytes(t.dtype) < int64_t{1} << 32;
}

// Whether the loader can stream the tensor's rows.
inline bool can_be_streamed(const Tensor& t) { return has_aligned_rows(t) && has_short_rows(t); }

// Whether a map can describe the matrix to the copy engine, in boxes of 16-bit elements, or of two bytes as one; words
// hold several weights.
inline bool can_be_boxed(const Tensor& t) {
  const int64_t bytes = size_bytes(t.dtype);
  return (bytes <= 2 || t.dtype == DType::kI32) && t.strides.back() == 1 && t.shape.size() == 2 &&
         t.shape[1] * bytes % kBoxRowBytes == 0 && t.shape[1] > 0 && (t.shape[0] == 1 || t.strides[0] >= t.shape[1]) &&
         can_be_streamed(t);
}

// A matrix of bytes or words that can be boxed, as one of 16-bit elements.
inline Tensor in_words(Tensor t) {
  const int64_t bytes = size_bytes(t.dtype);
  t.dtype = DType::kBF16;
  for (int64_t* count : {&t.shape[1], &t.strides[0], &t.offset}) *count = *count * bytes / 2;
  return t;
}

// Whether the tensor is an input that the launch does not write.
inline bool is_constant(const TBGraph& graph, const Tensor& t) {
  const auto writes = [&](const Operand& operand) { return operand.is_write && operand.tensor.buffer == t.buffer; };
  return graph.buffers()[t.buffer].kind == BufferKind::kInput &&
         std::none_of(graph.nodes().begin(), graph.nodes().end(), [&](const Node& node) {
           return std::any_of(node.operands.begin(), node.operands.end(), writes);
         });
}

// Whether the copy engine can load boxes of the matrix before the launch awaits anything.
inline bool can_load_boxes(const TBGraph& graph, const Tensor& t) { return can_be_boxed(t) && is_constant(graph, t); }

// Whether it can once what makes the matrix is done, if the launch makes it.
inline bool can_load_made_boxes(const TBGraph& graph, const Tensor& t) {
  return can_be_boxed(t) && (is_constant(graph, t) || graph.buffers()[t.buffer].kind == BufferKind::kWorkspace);
}

// Whether producer warps can load stages of x as boxes. The call's own tensors may have any address.
inline bool can_be_box_stages(const TBGraph& graph, const Tensor& x) {
  return can_be_boxed(x) && graph.buffers()[x.buffer].kind == BufferKind::kWorkspace;
}

// The most warps that read an entry in any job, after whose release a slot is empty.
inline int64_t most_readers(const Schedule& schedule) {
  int64_t most = 1;
  for (const Phase& phase : schedule.phases)
    for (const Job& job : phase.jobs)
      if (job.cut.shape) most = std::max(most, job.cut.shape->readers);
  return most;
}

// Whether row tasks at a job's end can have rows of so many elements: lanes pass them on in eights.
inline bool fits_tile_rows(int64_t size, DType dtype) {
  return size % 8 == 0 && row_behind_bytes(size * size_bytes(dtype)) <= kStripBytes;
}

// Whether the sums of a tile's runs can wait for each other in shared memory, see keeps_sums.
inline bool meets_in_shared_memory(const TileShape& shape, const WarpLayout& warps) {
  return shape.rows_in_entry() <= kSumsOfRun &&
         keeps_sums(static_cast<uint32_t>(shape.entries()), static_cast<uint32_t>(shape.run),
                    static_cast<uint32_t>(warps.consumers));
}

}  // namespace mpk
