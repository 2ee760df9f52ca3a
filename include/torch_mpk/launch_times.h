// The times at which a launch's workers passed its phases, as both devices' runtimes record them.
#pragma once

#include <cstdint>
#include <vector>

namespace mpk {

// In nanoseconds of a clock that all workers share; 0: no time.
struct PhaseTimes {
  int64_t begin;     // entered the phase
  int64_t joined;    // all of the worker had left the phase before
  int64_t ready;     // the awaited phases were over
  int64_t staged;    // the first activations stood in shared memory, or had been pushed to other ranks
  int64_t computed;  // was finished
  // The loader's times, see LoaderStamps.
  int64_t load_begin, described, waits, awaited, loaded;
  int64_t loaded_bytes;
};
static_assert(sizeof(PhaseTimes) == 11 * sizeof(int64_t));  // as Python reads it

struct LaunchTimes {
  std::vector<PhaseTimes> phases;  // [num_workers][num_phases]
  // Nanoseconds for which a worker has waited for each rank: [num_workers][num_phases][ranks]; none for a single rank.
  std::vector<int64_t> waited;
  // Pairs of a row and a choice that chose each expert: [num_phases][num_experts], with as many experts as the phase
  // with most has. Zeros where a phase has none, or its kernel does not say.
  std::vector<int64_t> pairs;

  LaunchTimes(int64_t num_workers, int64_t num_phases, int ranks, int64_t num_experts)
      : phases(num_workers * num_phases),
        waited(ranks > 1 ? num_workers * num_phases * ranks : 0),
        pairs(num_phases * num_experts) {}
};

}  // namespace mpk
