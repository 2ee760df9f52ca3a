// The parts of a schedule's JSON that drafts share.
#pragma once

#include <string>

#include "torch_mpk/schedule/schedule.h"

namespace mpk {

const char* name_of(Input input);

std::string job_json(const TBGraph& graph, const Job& job);

}  // namespace mpk
