// How the nodes of a schedule touch memory; shared by the scheduler, which decides, the validator, which checks, and
// codegen.
#pragma once

#include <algorithm>
#include <vector>

#include "torch_mpk/schedule/schedule.h"

namespace mpk {

// A task's result: its last operand.
inline const Operand& output(const Node& node) { return node.operands.back(); }

inline std::vector<const Operand*> outputs(const Node& node) {
  std::vector<const Operand*> written;
  for (const Operand& operand : node.operands)
    if (operand.is_write) written.push_back(&operand);
  return written;
}

// All nodes that a job runs.
inline std::vector<int> members(const Job& job) {
  std::vector<int> nodes = job.prologue;
  nodes.insert(nodes.end(), job.body.begin(), job.body.end());
  nodes.insert(nodes.end(), job.epilogue.begin(), job.epilogue.end());
  return nodes;
}

inline bool writes(const Node& node, int buffer) {
  return std::any_of(node.operands.begin(), node.operands.end(),
                     [&](const Operand& operand) { return operand.is_write && operand.tensor.buffer == buffer; });
}

inline bool same_view(const Tensor& a, const Tensor& b) {
  return a.buffer == b.buffer && a.dtype == b.dtype && a.offset == b.offset && a.shape == b.shape &&
         a.strides == b.strides;
}

// The same elements in rows of one length, though perhaps of another rank: what a row task makes is what its reader
// stages.
inline bool same_rows(const Tensor& made, const Tensor& read) {
  return made.buffer == read.buffer && made.dtype == read.dtype && made.offset == read.offset &&
         made.numel() == read.numel() && made.is_contiguous() && read.is_contiguous() && !made.shape.empty() &&
         !read.shape.empty() && made.shape.back() == read.shape.back();
}

inline std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

// Strides address point i of the domain at element i; dimensions of size 1 may have any stride.
inline bool is_identity(const Program& program, const std::vector<int64_t>& strides) {
  const std::vector<int64_t> expected = contiguous_strides(program.domain);
  for (size_t d = 0; d < strides.size(); d++)
    if (program.domain[d] != 1 && strides[d] != expected[d]) return false;
  return true;
}

// Every access of the program to `made` is to the element whose index is the point's.
inline bool reads_at_same_point(const Node& node, const Operand& made) {
  if (!node.program || made.tensor.numel() != node.program->num_points() || !made.tensor.is_contiguous()) return false;
  bool found = false;
  for (const Instr& instr : node.program->instrs) {
    if (instr.op != Op::kLoad && instr.op != Op::kStore) continue;
    const Tensor& accessed = node.operands[instr.operand].tensor;
    if (accessed.buffer != made.tensor.buffer) continue;
    if (instr.op == Op::kStore || !instr.args.empty() || accessed.offset != made.tensor.offset ||
        accessed.dtype != made.tensor.dtype || !is_identity(*node.program, instr.strides))
      return false;
    found = true;
  }
  return found;
}

// The same of every result of `maker` that the program touches.
inline bool reads_at_same_point(const Node& node, const Node& maker) {
  bool found = false;
  for (const Operand* made : outputs(maker)) {
    const int b = made->tensor.buffer;
    if (std::none_of(node.operands.begin(), node.operands.end(),
                     [&](const Operand& o) { return o.tensor.buffer == b; }))
      continue;
    if (!reads_at_same_point(node, *made)) return false;
    found = true;
  }
  return found;
}

// Each point stores to places of its own, at addresses known at compile time.
inline bool writes_each_point_once(const Node& node) {
  for (const Instr& instr : node.program->instrs) {
    if (instr.op != Op::kStore) continue;
    if (instr.args.size() > 1) return false;
    for (size_t d = 0; d < instr.strides.size(); d++)
      if (node.program->domain[d] != 1 && instr.strides[d] == 0) return false;
  }
  return true;
}

// Whether the loader brings in boxes what consumers otherwise stage.
inline bool comes_boxed(const WarpLayout& warps, const OperandSpec& spec) {
  return warps.warpgroups > 0 && spec.is_boxed;
}

// Whether the loader does, ahead of the phase.
inline bool loader_reads(const WarpLayout& warps, const Node& node, const Operand& operand) {
  const OperandSpec* spec = node.def->find(operand.name);
  return spec != nullptr && operand.is_read && (spec->is_loaded || comes_boxed(warps, *spec));
}

// The last phase that may still run while `phase` does: up to the next one that waits for everybody.
inline int last_concurrent(const Schedule& schedule, int phase) {
  const int num_phases = static_cast<int>(schedule.phases.size());
  while (phase + 1 < num_phases && schedule.phases[phase + 1].waits.empty()) phase++;
  return phase;
}

// Whether everything of phase `a` is visible to phase `b` once that has awaited its events: every worker runs the
// phases in order, and what it has waited for once it need not wait for again.
inline bool happens_before(const Schedule& schedule, int a, int b) {
  for (int p = 0; p <= b; p++)
    for (int wait : schedule.phases[p].waits)
      if (wait >= a) return true;
  return false;
}

// The phases in which a workspace buffer holds a value somebody may need, both ends included.
struct Lifetime {
  int first = -1, last = -1;

  bool used() const { return first >= 0; }
  void extend(int phase) {
    first = used() ? std::min(first, phase) : phase;
    last = std::max(last, phase);
  }
  bool overlaps(const Lifetime& other) const { return first <= other.last && other.first <= last; }
};

// A buffer that every job leaves unstored has none. Where one stores it, a later job that updates it in place and
// leaves the update unstored still reads what was there.
inline std::vector<Lifetime> buffer_lifetimes(const Schedule& schedule) {
  std::vector<Lifetime> lifetimes(schedule.graph.buffers().size());
  std::vector<bool> stored(lifetimes.size(), false);
  for (size_t p = 0; p < schedule.phases.size(); p++)
    for (const Job& job : schedule.phases[p].jobs)
      for (int n : members(job))
        for (const Operand& operand : schedule.graph.nodes()[n].operands) {
          const int b = operand.tensor.buffer;
          if (schedule.graph.buffers()[b].kind != BufferKind::kWorkspace) continue;
          lifetimes[b].extend(static_cast<int>(p));
          if (std::find(job.unstored.begin(), job.unstored.end(), b) == job.unstored.end()) stored[b] = true;
        }
  for (size_t b = 0; b < lifetimes.size(); b++) {
    if (!stored[b]) lifetimes[b] = {};
    if (lifetimes[b].used()) lifetimes[b].last = last_concurrent(schedule, lifetimes[b].last);
  }
  return lifetimes;
}

}  // namespace mpk
