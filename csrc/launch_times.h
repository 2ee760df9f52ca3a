// Launches' times in the layout that Python reads.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "torch_mpk/launch_times.h"

namespace mpk {

// Bytes of PhaseTimes[num_workers][num_phases] for each launch, and behind them those of `waited` and `pairs`.
inline std::vector<pybind11::bytes> as_bytes(const std::vector<LaunchTimes>& launches) {
  std::vector<pybind11::bytes> all;
  const auto append = [](std::string& bytes, const auto& items) {
    bytes.append(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(items[0]));
  };
  for (const LaunchTimes& times : launches) {
    std::string bytes;
    append(bytes, times.phases);
    append(bytes, times.waited);
    append(bytes, times.pairs);
    all.emplace_back(bytes);
  }
  return all;
}

}  // namespace mpk
