#include "../passes.h"

namespace mpk {

void make_single_jobs(Draft& draft) {
  for (int n = 0; n < draft.num_nodes(); n++)
    if (draft.job_of[n] < 0 && !draft.is_prologue[n]) draft.new_job({n});
}

}  // namespace mpk
