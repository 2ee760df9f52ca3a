#include "emitter.h"

#include "checks.h"

namespace mpk::codegen {

ByTask<Emitter>& emitters() {
  static ByTask<Emitter> all("emitters");
  return all;
}

JobCode emit_job(const JobPlace& place) {
  const Node& node = place.node();
  const Emitter* emitter = emitters().find(*node.def);
  require(emitter != nullptr, node, "this task has no CUDA code");
  const Job& job = place.job;
  const bool alone = job.body.size() == 1 && job.prologue.empty() && job.epilogue.empty();
  require(alone || emitter->takes_companions(), node, "it takes no companions; schedule them as jobs of their own");
  JobCode code = emitter->emit(place);
  code.emitter = emitter;
  return code;
}

}  // namespace mpk::codegen
