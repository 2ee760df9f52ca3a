#include <algorithm>

#include "proof.h"
#include "staging.h"
#include "torch_mpk/abi/sizes.h"

namespace mpk {
namespace {

// Bytes of the workspace, and the phases in which they are needed.
struct Use {
  std::string what;
  int64_t begin, end;
  Lifetime lifetime;
};

std::vector<Use> uses_of_buffers(const Schedule& s, const std::vector<Lifetime>& lifetimes) {
  std::vector<Use> uses;
  for (size_t b = 0; b < lifetimes.size(); b++) {
    if (!lifetimes[b].used() || s.polled[b]) continue;
    const int64_t begin = s.workspace_offsets[b];
    uses.push_back({name_buffer(s, static_cast<int>(b)), begin, begin + s.graph.buffers()[b].bytes, lifetimes[b]});
  }
  return uses;
}

// The places of the sums that a norm's readers add up.
void check_row_sums(const Schedule& s, const Job& job) {
  const std::string name = "the sums of rows of " + name_node(s, job.body.front());
  const int norm = norm_of(job);
  if (norm < 0 || !s.graph.nodes()[norm].def->scales_rows || !job.cut.shape) unsound(name + " are of no norm");
  if (job.cut.row_sums->count < 1 || job.cut.row_sums->offset % kAccessBytes != 0)
    unsound(name + " are " + std::to_string(job.cut.row_sums->count) + ", at offset " +
            std::to_string(job.cut.row_sums->offset));
}

}  // namespace

void check_scratch(const Schedule& s) {
  const Order order(s);
  const std::vector<Lifetime> lifetimes = buffer_lifetimes(s);
  std::vector<Use> uses = uses_of_buffers(s, lifetimes);
  const auto add = [&](const std::string& what, int64_t offset, int64_t bytes, Lifetime lifetime) {
    const Use use{what, offset, offset + bytes, lifetime};
    if (use.begin < 0 || use.end > s.workspace_bytes) unsound(what + " lie outside the workspace");
    for (const Use& other : uses)
      if (use.begin < other.end && other.begin < use.end && !order.follow_each_other(use.lifetime, other.lifetime))
        unsound(what + " and " + other.what + " share workspace while both are needed");
    uses.push_back(use);
  };
  for (int p = 0; p < static_cast<int>(s.phases.size()); p++)
    for (const Job& job : s.phases[p].jobs) {
      const std::string name = name_node(s, job.body.front());
      if (const std::optional<Scratch>& scratch = job.cut.scratch) {
        if (scratch->bytes < 1 || scratch->offset % kAccessBytes != 0)
          unsound("what workers leave of " + name + " is not aligned to 16 bytes, or nothing");
        add("what workers leave of " + name, scratch->offset, scratch->bytes, {p, last_concurrent(s, p)});
      }
      if (job.cut.row_sums) {
        check_row_sums(s, job);
        add("the sums of rows of " + name, job.cut.row_sums->offset, row_sums_bytes(s.graph, job),
            lifetimes[norm_result(s.graph, job).buffer]);
      }
    }
}

}  // namespace mpk
