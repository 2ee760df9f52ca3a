#include "draft.h"

#include <algorithm>
#include <utility>

#include "../graph/json.h"
#include "access.h"
#include "schedule_json.h"

namespace mpk {

Draft::Draft(const TBGraph& graph, const Target& target, std::vector<TakenRuns> runs)
    : schedule{graph, target, {}, {}, 0, 0, std::vector<bool>(graph.buffers().size(), false), {}},
      edges(graph.dependencies()),
      in(graph.nodes().size()),
      out(graph.nodes().size()),
      runs(std::move(runs)),
      job_of(graph.nodes().size(), -1),
      is_prologue(graph.nodes().size(), false) {
  for (const Dependency& edge : edges) {
    in[edge.to].push_back(&edge);
    out[edge.from].push_back(&edge);
  }
}

int Draft::new_job(std::vector<int> body) {
  for (int n : body) job_of[n] = static_cast<int>(jobs.size());
  Job& job = jobs.emplace_back();
  job.body = std::move(body);
  return static_cast<int>(jobs.size()) - 1;
}

std::vector<int> Draft::stored_nodes(int job) const {
  std::vector<int> nodes = jobs[job].body;
  nodes.insert(nodes.end(), jobs[job].epilogue.begin(), jobs[job].epilogue.end());
  return nodes;
}

namespace {

bool is_literal(const OperandSpec& spec) {
  return !spec.dims.empty() && std::all_of(spec.dims.begin(), spec.dims.end(), [](const std::string& dim) {
    return dim.find_first_not_of("0123456789") == std::string::npos;
  });
}

// Whether rows are of one length, and their elements side by side in both or apart in both.
bool have_like_rows(const Tensor& a, const Tensor& b) {
  if (a.shape.empty() || b.shape.empty()) return a.shape.empty() == b.shape.empty();
  return a.shape.back() == b.shape.back() && (a.strides.back() == 1) == (b.strides.back() == 1);
}

// Whether two nodes of one task read their common operand alike: their attributes and element types are equal, and so
// are operands whose size the signature fixes, such as a scale of x. What the loader reads is there in both or neither,
// in rows of one length, so that quantised weights of one storage are packed alike.
bool works_alike(const Node& a, const Node& b) {
  if (a.attrs != b.attrs) return false;
  return std::all_of(a.def->operands.begin(), a.def->operands.end(), [&](const OperandSpec& spec) {
    const Operand *of_a = a.find(spec.name), *of_b = b.find(spec.name);
    if ((is_literal(spec) || spec.is_loaded) && (of_a == nullptr) != (of_b == nullptr)) return false;
    if (of_a == nullptr || of_b == nullptr) return true;
    if (spec.is_loaded && !have_like_rows(of_a->tensor, of_b->tensor)) return false;
    return of_a->tensor.dtype == of_b->tensor.dtype && (!is_literal(spec) || same_view(of_a->tensor, of_b->tensor));
  });
}

}  // namespace

bool Draft::have_same_input(const std::vector<int>& nodes) const {
  const Node& first = node(nodes.front());
  const std::string& common = first.def->joined_by;
  if (nodes.size() == 1 || common.empty()) return nodes.size() == 1;
  return std::all_of(nodes.begin(), nodes.end(), [&](int n) {
    return node(n).def == first.def && same_view(node(n).operand(common).tensor, first.operand(common).tensor) &&
           works_alike(node(n), first);
  });
}

bool Draft::reaches(int from, int to, const std::vector<int>& set) const {
  std::vector<int> stack;
  std::vector<bool> seen(num_nodes());
  for (const Dependency* edge : out[from])
    if (std::find(set.begin(), set.end(), edge->to) == set.end()) stack.push_back(edge->to);
  while (!stack.empty()) {
    const int n = stack.back();
    stack.pop_back();
    if (n == to) return true;
    if (seen[n]) continue;
    seen[n] = true;
    // Nodes of one job start and end together, so a path may continue from any of them.
    const auto visit = [&](int m) {
      for (const Dependency* edge : out[m]) stack.push_back(edge->to);
    };
    visit(n);
    if (job_of[n] >= 0)
      for (int m : stored_nodes(job_of[n])) visit(m);
  }
  return false;
}

bool Draft::contractible(const std::vector<int>& nodes) const {
  for (int a : nodes)
    for (int b : nodes)
      if (a < b && reaches(a, b, nodes)) return false;
  return true;
}

std::string Draft::to_json() const {
  std::vector<int> recomputed;
  for (int n = 0; n < num_nodes(); n++)
    if (is_prologue[n]) recomputed.push_back(n);
  return "{\"jobs\": " +
         json::array(
             jobs, [&](const Job& job) { return job_json(graph(), job); }, ",\n  ") +
         ",\n\"recomputed\": " + json::numbers(recomputed) + ",\n\"levels\": " + json::numbers(levels) +
         ",\n\"schedule\": " + schedule.to_json() + "}\n";
}

}  // namespace mpk
