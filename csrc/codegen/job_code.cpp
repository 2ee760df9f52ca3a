#include "job_code.h"

#include <algorithm>
#include <utility>

#include "checks.h"

namespace mpk {

std::optional<codegen::SharedCode> Kernel::share(const std::vector<codegen::Variant>&) const { return std::nullopt; }

namespace codegen {
namespace {

std::string why_none(const Job& job) {
  if (job.others.empty()) return "this task has no CUDA code";
  std::vector<std::pair<std::string, std::string>> whys;  // a refusal, and the kernels that give it
  for (const Alternative& other : job.others) {
    const auto same = [&](const auto& why) { return why.first == other.refusal; };
    const auto found = std::find_if(whys.begin(), whys.end(), same);
    if (found == whys.end())
      whys.emplace_back(other.refusal, other.kernel);
    else
      found->second += ", " + other.kernel;
  }
  if (whys.size() == 1) return whys.front().first;
  std::string text;
  for (const auto& [refusal, kernels] : whys) text += (text.empty() ? "" : "; ") + refusal + " (" + kernels + ")";
  return text;
}

}  // namespace

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
