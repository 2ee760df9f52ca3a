// When the workers of a launch passed its phases: what the runtimes of both devices record.
#pragma once

#include <cstdint>
#include <vector>

namespace mpk {

// In nanoseconds of a clock that all workers share; 0 where a worker has nothing to say.
struct PhaseTimes {
  int64_t begin;     // came to the phase
  int64_t joined;    // all of the worker was done with the phase before
  int64_t ready;     // the phases that it waits for were
  int64_t staged;    // the first activations stood in shared memory
  int64_t computed;  // was done
  // The same of the loader, see LoaderStamps.
  int64_t load_begin, described, waits, awaited, loaded;
  int64_t loaded_bytes;
};
static_assert(sizeof(PhaseTimes) == 11 * sizeof(int64_t));  // as Python reads it

using LaunchTimes = std::vector<PhaseTimes>;  // [num_workers][num_phases]

}  // namespace mpk
