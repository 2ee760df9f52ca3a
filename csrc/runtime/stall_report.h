// Describes the stall records of an aborted launch in words.
#pragma once

#include <string>
#include <vector>

#include "torch_mpk/abi/control.h"

namespace mpk {

// A table with one line for each run of workers that wait in the same place. `stalls` has one record for each worker.
std::string describe_stalls(const std::vector<StallRecord>& stalls, const std::vector<std::string>& phase_names);

}  // namespace mpk
