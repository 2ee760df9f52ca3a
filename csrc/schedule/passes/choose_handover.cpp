#include <algorithm>

#include "../access.h"
#include "../kernel.h"
#include "../passes.h"
#include "torch_mpk/abi/partition.h"

namespace mpk {
namespace {

// The most of a row that a warp polls, since its lanes keep polled elements in registers.
constexpr int64_t kMaxPolledByWarp = 6144;

bool has_short_rows_to_poll(const Draft& draft, const Tensor& t) {
  if (t.numel() == 0) return true;
  const int64_t row = t.shape.empty() ? 1 : t.shape.back();
  return row <= kMaxPolledByWarp * warps_of_row(t.numel() / row, draft.schedule.warps.consumers);
}

// Whether each element of the node's result can be marked as it is stored.
bool can_be_marked(const Draft& draft, int n, const Tensor& made) {
  const int maker = draft.job_of[n] < 0 ? n : draft.jobs[draft.job_of[n]].body.front();
  if (draft.is_in_run(n)) return false;
  if (maker != n && draft.node(n).def->role == Role::kRow) return false;  // its missing factor is behind an event
  const int64_t bytes = made.numel() * size_bytes(made.dtype);
  return draft.node(maker).def->hands_over && draft.is_workspace(made.buffer) && is_float(made.dtype) &&
         size_bytes(made.dtype) == 2 && made.is_contiguous() && bytes == draft.graph().buffers()[made.buffer].bytes;
}

// Per node: its jobs, each in its phase.
struct Place {
  int phase;
  const Job* job;
};
using Places = std::vector<std::vector<Place>>;

Places places_of(const Draft& draft) {
  const std::vector<Phase>& phases = draft.schedule.phases;
  Places places(draft.num_nodes());
  for (size_t p = 0; p < phases.size(); p++)
    for (const Job& job : phases[p].jobs)
      for (int n : members(job)) places[n].push_back({static_cast<int>(p), &job});
  return places;
}

// The most elements of a result that a worker polls, in any job with the reader, with any of its kernels.
int64_t polled_elements(const Draft& draft, const Places& places, const Node& reader, const Tensor& made) {
  int64_t most = 0;
  for (const auto& [phase, job] : places[reader.id]) {
    std::vector<int64_t> polled;
    if (!contains(job->epilogue, reader.id))
      for (const Kernel* kernel : kernels_of(draft.schedule, *job))
        if (!kernel->refusal(draft.schedule, *job))
          polled.push_back(kernel->polled_elements(draft.schedule, *job, made));
    most = std::max(most, polled.empty() ? made.numel() : *std::ranges::max_element(polled));
  }
  return most;
}

// Whether the reader of a result can poll its elements.
bool can_poll(const Draft& draft, const Places& places, const Node& reader, const Operand& made) {
  const int buffer = made.tensor.buffer;
  const int64_t polled = polled_elements(draft, places, reader, made.tensor);
  if (writes(reader, buffer) || polled > kMaxPolledElements || draft.is_in_run(reader.id)) return false;
  const auto& operands = reader.operands;
  switch (reader.def->role) {
    case Role::kRow:
      return draft.is_prologue[reader.id] && operands.front().tensor.buffer == buffer &&
             has_short_rows_to_poll(draft, operands.front().tensor) &&
             std::none_of(operands.begin() + 1, operands.end(),
                          [&](const Operand& operand) { return operand.tensor.buffer == buffer; });
    case Role::kStream:
      return std::all_of(operands.begin(), operands.end(), [&](const Operand& operand) {
        return operand.tensor.buffer != buffer ||
               (reader.def->find(operand.name)->is_staged &&
                (has_short_rows_to_poll(draft, operand.tensor) || polled < operand.tensor.numel()));
      });
    default:
      return !draft.jobs[draft.job_of[reader.id]].epilogue.empty() && reads_at_same_point(reader, made);
  }
}

bool travels_polled(const Draft& draft, const Places& places, int n, const Operand& made) {
  const int buffer = made.tensor.buffer;
  if (!can_be_marked(draft, n, made.tensor)) return false;
  // An element must not change once it has come.
  for (const Dependency* edge : draft.in[n])
    if (edge->buffer == buffer) return false;
  return std::all_of(draft.out[n].begin(), draft.out[n].end(), [&](const Dependency* edge) {
    return edge->buffer != buffer ||
           (edge->hazard == Hazard::kReadAfterWrite && can_poll(draft, places, draft.node(edge->to), made));
  });
}

// Per phase: the newest phase whose results it needs and does not poll; -1: none.
std::vector<int> newest_awaited(const Draft& draft, const Places& places) {
  std::vector<int> newest(draft.schedule.phases.size(), -1);
  for (const Dependency& edge : draft.edges) {
    const bool arrives_otherwise = draft.schedule.polled[edge.buffer] || draft.is_prologue[edge.from];
    if (edge.hazard == Hazard::kReadAfterWrite && arrives_otherwise) continue;
    for (const Place& to : places[edge.to])
      for (const Place& from : places[edge.from])
        if (from.job != to.job) newest[to.phase] = std::max(newest[to.phase], from.phase);
  }
  return newest;
}

}  // namespace

// Vectors that stream tasks make and stage are polled. A phase reads everything else behind a completed event, and so
// does the last phase. Many rows are too many to be polled.
void choose_handover(Draft& draft) {
  const Places places = places_of(draft);
  for (int n = 0; n < draft.num_nodes() && !draft.schedule.warps.hands_over_rows; n++)
    for (const Operand* made : outputs(draft.node(n)))
      draft.schedule.polled[made->tensor.buffer] = travels_polled(draft, places, n, *made);
  const std::vector<int> newest = newest_awaited(draft, places);
  std::vector<Phase>& phases = draft.schedule.phases;
  int complete = -1;                                     // all phases up to here are over for every worker
  const int last = static_cast<int>(phases.size()) - 1;  // advances counters, for a launch that succeeds
  for (int p = 1; p <= last; p++) {
    if (newest[p] > complete || p == last) {
      complete = p - 1;
    } else {
      phases[p].waits.clear();
    }
  }
}

}  // namespace mpk
