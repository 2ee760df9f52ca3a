// Names of a schedule's phases, and the memory that they touch.
#include <algorithm>
#include <set>
#include <tuple>

#include "access.h"

namespace mpk {
namespace {

// A view's bytes. Elements that a stride of 0 repeats count once. A program reads of a table what its points need.
int64_t touched_bytes(const Node& node, const Tensor& t) {
  int64_t elements = 1;
  for (size_t d = 0; d < t.shape.size(); d++)
    if (t.strides[d] != 0) elements *= t.shape[d];
  if (node.program) elements = std::min(elements, node.program->num_points());
  return elements * size_bytes(t.dtype);
}

}  // namespace

std::string phase_name(const Schedule& schedule, const Phase& phase) {
  std::string name;
  for (const Job& job : phase.jobs)
    for (int n : job.body) name += (name.empty() ? "" : ", ") + schedule.graph.nodes()[n].title();
  return name;
}

int64_t phase_bytes(const Schedule& schedule, const Phase& phase) {
  std::set<std::tuple<int, int64_t, std::vector<int64_t>, std::vector<int64_t>>> counted;
  int64_t bytes = 0;
  for (const Job& job : phase.jobs)
    for (int n : members(job)) {
      const Node& node = schedule.graph.nodes()[n];
      for (const Operand& operand : node.operands) {
        const Tensor& t = operand.tensor;
        const bool is_stored = std::ranges::count(job.unstored, t.buffer) == 0;
        if (is_stored && counted.emplace(t.buffer, t.offset, t.shape, t.strides).second)
          bytes += touched_bytes(node, t);
      }
    }
  return bytes;
}

}  // namespace mpk
