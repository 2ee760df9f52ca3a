#include <algorithm>
#include <utility>

#include "../access.h"
#include "../passes.h"
#include "../staging.h"

namespace mpk {
namespace {

// The first free place of so many bytes beside those taken.
int64_t first_fit(std::vector<std::pair<int64_t, int64_t>> taken, int64_t bytes) {
  std::sort(taken.begin(), taken.end());
  int64_t offset = 0;
  for (const auto& [begin, end] : taken) {
    if (offset + bytes <= begin) break;
    offset = std::max(offset, end);
  }
  return offset;
}

}  // namespace

// First fit, in order of first use. A byte is reused only after the phase of its last use. A launch writes every polled
// element once, so their places are not shared.
void place_workspace(Draft& draft) {
  Schedule& schedule = draft.schedule;
  const std::vector<Buffer>& buffers = draft.graph().buffers();
  const std::vector<Lifetime> lifetimes = buffer_lifetimes(schedule);
  schedule.workspace_offsets.assign(buffers.size(), -1);
  std::vector<int> order;
  for (size_t b = 0; b < lifetimes.size(); b++)
    if (lifetimes[b].used()) order.push_back(static_cast<int>(b));
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return lifetimes[a].first < lifetimes[b].first; });
  std::vector<int> placed;
  for (int b : order) {
    const int64_t bytes = round_up(buffers[b].bytes, kWorkspaceAlignment);
    int64_t& offset = schedule.workspace_offsets[b];
    if (schedule.polled[b]) {
      offset = schedule.polled_bytes;
      schedule.polled_bytes += bytes;
      continue;
    }
    std::vector<std::pair<int64_t, int64_t>> taken;
    for (int other : placed)
      if (lifetimes[other].overlaps(lifetimes[b])) {
        const int64_t begin = schedule.workspace_offsets[other];
        taken.emplace_back(begin, begin + round_up(buffers[other].bytes, kWorkspaceAlignment));
      }
    offset = first_fit(std::move(taken), bytes);
    schedule.workspace_bytes = std::max(schedule.workspace_bytes, offset + bytes);
    placed.push_back(b);
  }
}

}  // namespace mpk
