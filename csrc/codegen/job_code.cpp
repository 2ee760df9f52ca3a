#include "job_code.h"

#include "checks.h"

namespace mpk {

std::optional<codegen::SharedCode> Kernel::share(const std::vector<codegen::Variant>&) const { return std::nullopt; }

namespace codegen {
JobCode emit_job(const JobPlace& place) {
  const Node& node = place.node();
  const Job& job = place.job;
  const Kernel* kernel = find_kernel(job.cut.kernel);
  require(kernel != nullptr, node, why_none(job));
  const bool alone = job.body.size() == 1 && job.prologue.empty() && job.epilogue.empty();
  require(alone || kernel->takes_companions(), node, "it takes no companions; schedule them as jobs of their own");
  JobCode code = kernel->emit(place);
  code.kernel = kernel;
  return code;
}

}  // namespace codegen
}  // namespace mpk
