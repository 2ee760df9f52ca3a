// Launches' times in the layout that Python reads.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "torch_mpk/launch_times.h"

namespace mpk {

// Bytes of PhaseTimes[num_workers][num_phases] for each launch.
inline std::vector<pybind11::bytes> as_bytes(const std::vector<LaunchTimes>& launches) {
  std::vector<pybind11::bytes> all;
  for (const LaunchTimes& times : launches)
    all.emplace_back(reinterpret_cast<const char*>(times.data()), times.size() * sizeof(PhaseTimes));
  return all;
}

}  // namespace mpk
