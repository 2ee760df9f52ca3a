#include "../access.h"
#include "../passes.h"
#include "../staging.h"

namespace mpk {
namespace {

struct Place {
  int phase;  // the last that uses it
  int64_t offset, bytes;
};

}  // namespace

// Results of pieces are polled, with no event between writer and reader, so a place is used again only by a phase that
// begins to write, behind its events, when all workers have signalled this one or a later: their polls are over.
// Otherwise a phase has its own, behind all buffers. Launches follow each other.
void place_pieces(Draft& draft) {
  Schedule& schedule = draft.schedule;
  std::vector<Place> places;
  for (int p = 0; p < static_cast<int>(schedule.phases.size()); p++)
    for (Job& job : schedule.phases[p].jobs) {
      if (!job.pieces) continue;
      const int64_t bytes = round_up(job.pieces->bytes(), kWorkspaceAlignment);
      const auto free = std::find_if(places.begin(), places.end(), [&](const Place& place) {
        return place.phase < p && place.bytes >= bytes && happens_before(schedule, place.phase, p);
      });
      if (free != places.end()) {
        free->phase = p;
        job.pieces->offset = free->offset;
        continue;
      }
      job.pieces->offset = round_up(schedule.workspace_bytes, kWorkspaceAlignment);
      schedule.workspace_bytes = job.pieces->offset + bytes;
      places.push_back({p, job.pieces->offset, bytes});
    }
}

}  // namespace mpk
