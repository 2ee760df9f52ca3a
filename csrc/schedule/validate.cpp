// Proves, independently of how the schedule was made, that every possible execution of it computes the graph.
#include "proof.h"

namespace mpk {

void validate(const Schedule& schedule) {
  check_order(schedule);
  check_warps(schedule);
  check_mailboxes(schedule);
  check_cuts(schedule);
  check_scratch(schedule);
}

}  // namespace mpk
