// How the nodes of a schedule touch memory; shared by the scheduler, which decides, the validator, which checks, and
// codegen.
#pragma once

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <set>
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

inline bool contains(const std::vector<int>& list, int v) {
  return std::find(list.begin(), list.end(), v) != list.end();
}

// All nodes that a job runs.
inline std::vector<int> members(const Job& job) {
  std::vector<int> nodes = job.prologue;
  nodes.insert(nodes.end(), job.body.begin(), job.body.end());
  nodes.insert(nodes.end(), job.epilogue.begin(), job.epilogue.end());
  return nodes;
}

// The norm at the job's end, whose rows' factors it leaves to readers; -1: none.
inline int norm_of(const Job& job) { return job.cut.row_sums && !job.epilogue.empty() ? job.epilogue.back() : -1; }

// The job whose final norm makes a buffer; null if none does.
inline const Job* find_norm(const Schedule& schedule, int buffer) {
  for (const Phase& phase : schedule.phases)
    for (const Job& job : phase.jobs) {
      const int norm = norm_of(job);
      if (norm >= 0 && output(schedule.graph.nodes()[norm]).tensor.buffer == buffer) return &job;
    }
  return nullptr;
}

// The norm's result.
inline const Tensor& norm_result(const TBGraph& graph, const Job& job) {
  return output(graph.nodes()[norm_of(job)]).tensor;
}

// Bytes of a job's sums of rows, four sums of a row side by side.
inline int64_t row_sums_bytes(const TBGraph& graph, const Job& job) {
  const Tensor& y = norm_result(graph, job);
  return (job.cut.row_sums->count + 3) / 4 * 16 * (y.numel() / y.shape.back());
}

// Nodes whose results an epilogue may take: the body, and earlier epilogues.
inline std::vector<int> makers_of(const Job& job, int epilogue) {
  std::vector<int> nodes = job.body;
  nodes.insert(nodes.end(), job.epilogue.begin(), std::find(job.epilogue.begin(), job.epilogue.end(), epilogue));
  return nodes;
}

inline bool writes(const Node& node, int buffer) {
  return std::any_of(node.operands.begin(), node.operands.end(),
                     [&](const Operand& operand) { return operand.is_write && operand.tensor.buffer == buffer; });
}

// The only reader of a node's result, if it has exactly one; else null.
inline const Node* only_reader(const TBGraph& graph, const Node& node) {
  const int made = output(node).tensor.buffer;
  if (graph.buffers()[made].kind != BufferKind::kWorkspace) return nullptr;
  const Node* found = nullptr;
  for (const Node& other : graph.nodes())
    for (const Operand& operand : other.operands) {
      if (operand.tensor.buffer != made || other.id == node.id || found == &other) continue;
      if (found != nullptr || operand.is_write) return nullptr;
      found = &other;
    }
  return found;
}

// Whether the first `dims` dimensions of a domain have `count` elements in all, at a constant distance of `pitch`.
inline bool are_stacked(const std::vector<int64_t>& domain, const std::vector<int64_t>& strides, size_t dims,
                        int64_t count, int64_t pitch) {
  int64_t inner = 1;
  for (size_t d = dims; d-- > 0; inner *= domain[d])
    if (domain[d] != 1 && strides[d] != inner * pitch) return false;
  return inner == count;
}

inline bool same_view(const Tensor& a, const Tensor& b) {
  return a.buffer == b.buffer && a.dtype == b.dtype && a.offset == b.offset && a.shape == b.shape &&
         a.strides == b.strides;
}

// Whether both have the same elements in the same order, perhaps in rows of another length: shorter rows of a linear's
// result are heads.
inline bool same_elements(const Tensor& made, const Tensor& read) {
  return made.buffer == read.buffer && made.dtype == read.dtype && made.offset == read.offset &&
         made.numel() == read.numel() && made.is_contiguous() && read.is_contiguous();
}

// Whether both have the same elements in rows of one length, perhaps with another rank: a row task's result, and what
// its reader stages.
inline bool same_rows(const Tensor& made, const Tensor& read) {
  return same_elements(made, read) && !made.shape.empty() && !read.shape.empty() &&
         made.shape.back() == read.shape.back();
}

// Whether both have equally many rows of the same length, wherever they are.
inline bool same_row_space(const Tensor& a, const Tensor& b) {
  return !a.shape.empty() && !b.shape.empty() && a.shape.back() == b.shape.back() && a.numel() == b.numel();
}

inline std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

// Whether strides address point i of the domain at element i. Dimensions of size 1 may have any stride.
inline bool is_identity(const Program& program, const std::vector<int64_t>& strides) {
  const std::vector<int64_t> expected = contiguous_strides(program.domain);
  for (size_t d = 0; d < strides.size(); d++)
    if (program.domain[d] != 1 && strides[d] != expected[d]) return false;
  return true;
}

// A domain's dimensions of more than one index, by falling stride.
inline std::vector<size_t> by_falling_stride(const std::vector<int64_t>& domain, const std::vector<int64_t>& strides) {
  std::vector<size_t> dims;
  for (size_t d = 0; d < domain.size(); d++)
    if (domain[d] != 1) dims.push_back(d);
  std::stable_sort(dims.begin(), dims.end(), [&](size_t a, size_t b) { return strides[a] > strides[b]; });
  return dims;
}

// The strides by which a program reads `made`, if each point reads one element of its own: those of a contiguous
// tensor, in any order. Nothing if it reads otherwise, or writes it.
inline std::optional<std::vector<int64_t>> strides_over(const Node& node, const Operand& made) {
  if (!node.program || made.tensor.numel() != node.program->num_points() || !made.tensor.is_contiguous()) return {};
  const std::vector<int64_t>& domain = node.program->domain;
  std::optional<std::vector<int64_t>> found;
  for (const Instr& instr : node.program->instrs) {
    if (instr.op != Op::kLoad && instr.op != Op::kStore) continue;
    const Tensor& accessed = node.operands[instr.operand].tensor;
    if (accessed.buffer != made.tensor.buffer) continue;
    if (instr.op == Op::kStore || !instr.args.empty() || accessed.offset != made.tensor.offset ||
        accessed.dtype != made.tensor.dtype)
      return {};
    std::vector<int64_t> strides(domain.size(), 0);  // 0 for dimensions of one index
    int64_t expected = 1;
    const std::vector<size_t> dims = by_falling_stride(domain, instr.strides);
    for (size_t i = dims.size(); i-- > 0; expected *= domain[dims[i]])
      if ((strides[dims[i]] = instr.strides[dims[i]]) != expected) return {};
    if (found.value_or(strides) != strides) return {};
    found = strides;
  }
  return found;
}

// Whether every access of the program to `made` is to the element with the point's index.
inline bool reads_at_same_point(const Node& node, const Operand& made) {
  const std::optional<std::vector<int64_t>> strides = strides_over(node, made);
  return strides && is_identity(*node.program, *strides);
}

// Whether every store of the program to `made` is.
inline bool stores_at_same_point(const Node& node, const Operand& made) {
  return std::all_of(node.program->instrs.begin(), node.program->instrs.end(), [&](const Instr& instr) {
    return instr.op != Op::kStore || node.operands[instr.operand].tensor.buffer != made.tensor.buffer ||
           (instr.args.size() == 1 && is_identity(*node.program, instr.strides));
  });
}

inline bool touches(const Node& node, int buffer) {
  return std::any_of(node.operands.begin(), node.operands.end(),
                     [&](const Operand& operand) { return operand.tensor.buffer == buffer; });
}

// Strides that map the elements of an epilogue's operands to its points: coordinate d of a point is element /
// strides[d] % domain[d]. `makers`: the job's nodes before it. Nothing unless it takes one element of each maker at
// each point. Results of another epilogue count only if all three nodes share the point.
inline std::optional<std::vector<int64_t>> strides_behind(const TBGraph& graph, const std::vector<int>& makers,
                                                          const Node& node) {
  std::optional<std::vector<int64_t>> found;
  for (auto m = makers.begin(); m != makers.end(); ++m)
    for (const Operand* made : outputs(graph.nodes()[*m])) {
      if (!touches(node, made->tensor.buffer)) continue;
      const std::optional<std::vector<int64_t>> strides = strides_over(node, *made);
      if (!strides || found.value_or(*strides) != *strides) return {};
      found = strides;
      const Node& maker = graph.nodes()[*m];
      if (!maker.program) continue;
      const std::optional<std::vector<int64_t>> behind = strides_behind(graph, {makers.begin(), m}, maker);
      if (!is_identity(*node.program, *strides) || !stores_at_same_point(maker, *made) || !behind ||
          !is_identity(*maker.program, *behind))
        return {};
    }
  return found;
}

// The tile tasks in a job's epilogue.
inline std::vector<int> tiles_behind(const TBGraph& graph, const Job& job) {
  std::vector<int> found;
  std::ranges::copy_if(job.epilogue, std::back_inserter(found),
                       [&](int n) { return graph.nodes()[n].def->role == Role::kTile; });
  return found;
}

// For each epilogue of a job: the position in the body of the node whose results it takes; -1: several nodes.
inline std::vector<int> owners_of_epilogues(const TBGraph& graph, const Job& job) {
  std::map<int, int> owner_of;  // by buffer
  const auto make = [&](int n, int owner) {
    for (const Operand* made : outputs(graph.nodes()[n])) owner_of[made->tensor.buffer] = owner;
  };
  for (size_t i = 0; i < job.body.size(); i++) make(job.body[i], static_cast<int>(i));
  std::vector<int> owners;
  for (int n : job.epilogue) {
    std::set<int> of_operands;
    for (const Operand& operand : graph.nodes()[n].operands)
      if (const auto found = owner_of.find(operand.tensor.buffer); found != owner_of.end())
        of_operands.insert(found->second);
    owners.push_back(of_operands.size() == 1 ? *of_operands.begin() : -1);
    make(n, owners.back());
  }
  return owners;
}

// The row tasks behind a node of a job's body, in sequence.
inline std::vector<const Node*> rows_behind(const TBGraph& graph, const Job& job, const Node& node) {
  std::vector<const Node*> rows;
  if (job.cut.row_sums) return rows;
  int made = output(node).tensor.buffer;
  for (int n : job.epilogue) {
    const Node& next = graph.nodes()[n];
    if (next.def->role != Role::kRow || next.operands.front().tensor.buffer != made) continue;
    rows.push_back(&next);
    made = output(next).tensor.buffer;
  }
  return rows;
}

// The number of elements that must lie in one tile for the row tasks at a job's end; 1: there are none.
inline int64_t whole_rows(const TBGraph& graph, const Job& job) {
  int64_t size = 1;
  for (int n : job.body)
    for (const Node* row : rows_behind(graph, job, graph.nodes()[n]))
      size = std::lcm(size, row->operands.front().tensor.shape.back());
  return size;
}

// Whether epilogues combine the results of the body's nodes, which then share one index space. Otherwise their rows
// follow each other, and an epilogue belongs to one node.
inline bool is_side_by_side(const TBGraph& graph, const Job& job) {
  const std::vector<int> owners = owners_of_epilogues(graph, job);
  return std::any_of(owners.begin(), owners.end(), [](int owner) { return owner < 0; });
}

// Whether no two points store to the same place, as far as is known at compile time.
inline bool writes_each_point_once(const Node& node) {
  for (const Instr& instr : node.program->instrs) {
    if (instr.op != Op::kStore || instr.args.size() > 1) continue;
    for (size_t d = 0; d < instr.strides.size(); d++)
      if (node.program->domain[d] != 1 && instr.strides[d] == 0) return false;
  }
  return true;
}

// Whether the loader copies as boxes what consumers otherwise stage.
inline bool is_loaded_as_boxes(const WarpLayout& warps, const OperandSpec& spec) {
  return warps.loads_inputs && spec.is_boxed;
}

// Whether the loader reads the operand, ahead of the phase.
inline bool loader_reads(const WarpLayout& warps, const Node& node, const Operand& operand) {
  const OperandSpec* spec = node.def->find(operand.name);
  return spec != nullptr && operand.is_read && (spec->is_loaded || is_loaded_as_boxes(warps, *spec));
}

// The last phase that may still run while `phase` does: up to the next one that waits for all workers.
inline int last_concurrent(const Schedule& schedule, int phase) {
  const int num_phases = static_cast<int>(schedule.phases.size());
  while (phase + 1 < num_phases && schedule.phases[phase + 1].waits.empty()) phase++;
  return phase;
}

// Whether all of phase `a` is visible to phase `b` after `b` has awaited its events. Workers run the phases in order,
// and an event that has come once need not be awaited again.
inline bool happens_before(const Schedule& schedule, int a, int b) {
  for (int p = 0; p <= b; p++)
    for (int wait : schedule.phases[p].waits)
      if (wait >= a) return true;
  return false;
}

// The phases in which a workspace buffer's value is needed, both ends included.
struct Lifetime {
  int first = -1, last = -1;

  bool used() const { return first >= 0; }
  void extend(int phase) {
    first = used() ? std::min(first, phase) : phase;
    last = std::max(last, phase);
  }
  bool overlaps(const Lifetime& other) const { return first <= other.last && other.first <= last; }
};

// The lifetimes of buffers. A buffer that no job stores has none. If one job stores it, a later job that updates it in
// place without a store still reads the old value.
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
