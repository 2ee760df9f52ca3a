#include "../access.h"
#include "../passes.h"
#include "../staging.h"

namespace mpk {
namespace {

struct Place {
  int phase;  // the last phase that uses it
  int64_t offset, bytes;
};

}  // namespace

// Workers poll what others leave, with no event in between. So a place is reused only by a phase that starts to write,
// behind its events, when all workers have signalled this phase or a later one, and their polls are over. Otherwise a
// phase has a place of its own, behind all buffers. Launches follow each other. Sums of rows are read behind an event,
// and are needed as long as their norm.
void place_scratch(Draft& draft) {
  Schedule& schedule = draft.schedule;
  const std::vector<Lifetime> lifetimes = buffer_lifetimes(schedule);
  std::vector<Place> places;
  const auto place = [&](int64_t size, int first, int last) {
    const int64_t bytes = round_up(size, kWorkspaceAlignment);
    const auto free = std::find_if(places.begin(), places.end(), [&](const Place& place) {
      return place.phase < first && place.bytes >= bytes && happens_before(schedule, place.phase, first);
    });
    if (free != places.end()) {
      free->phase = last;
      return free->offset;
    }
    const int64_t offset = round_up(schedule.workspace_bytes, kWorkspaceAlignment);
    schedule.workspace_bytes = offset + bytes;
    places.push_back({last, offset, bytes});
    return offset;
  };
  for (int p = 0; p < static_cast<int>(schedule.phases.size()); p++)
    for (Job& job : schedule.phases[p].jobs) {
      if (job.cut.scratch) job.cut.scratch->offset = place(job.cut.scratch->bytes, p, p);
      if (!job.cut.row_sums) continue;
      const int last = lifetimes[norm_result(schedule.graph, job).buffer].last;
      job.cut.row_sums->offset = place(row_sums_bytes(schedule.graph, job), p, last);
    }
}

}  // namespace mpk
