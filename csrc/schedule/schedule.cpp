// The passes, in order.
#include "torch_mpk/schedule/schedule.h"

#include <stdexcept>
#include <utility>

#include "passes.h"

namespace mpk {

const std::vector<Pass>& passes() {
  const auto always = [](const Target&) { return true; };
  const auto fused = [](const Target& target) { return target.fuse; };
  const auto polled = [](const Target& target) { return target.polled; };
  const auto fused_on_gpu = [](const Target& target) { return target.fuse && target.device == "cuda"; };
  const auto on_gpu = [](const Target& target) { return target.device == "cuda"; };
  // clang-format off
  static const std::vector<Pass> all = {
      {"choose_warps", choose_warps, on_gpu},
      {"fuse_epilogues", fuse_epilogues, fused},
      {"group_nodes", group_nodes, fused},
      {"find_prologues", find_prologues, fused},
      {"split_norms", split_norms, fused_on_gpu},
      {"make_single_jobs", make_single_jobs, always},
      {"attach_prologues", attach_prologues, fused},
      {"end_with_rows", end_with_rows, fused_on_gpu},
      {"assign_levels", assign_levels, always},
      {"build_phases", build_phases, always},
      {"count_tiles", count_tiles, always},
      {"find_unstored", find_unstored, always},
      {"find_loader_waits", find_loader_waits, always},
      {"lay_out_warps", lay_out_warps, on_gpu},
      {"choose_handover", choose_handover, polled},
      {"place_workspace", place_workspace, always},
      {"choose_staging", choose_staging, on_gpu},
      {"choose_kernels", choose_kernels, on_gpu},
      {"place_scratch", place_scratch, on_gpu},
      {"deal_tiles", deal_tiles, on_gpu},
  };
  // clang-format on
  return all;
}

Draft make_draft(const TBGraph& graph, const Target& target, const std::string& last_pass) {
  if (target.num_workers < 1)
    throw std::invalid_argument("schedule: a target needs at least one worker, got " +
                                std::to_string(target.num_workers));
  Draft draft(graph, target);
  std::string known;
  for (const Pass& pass : passes()) {
    if (pass.applies(target)) pass.run(draft);
    if (pass.name == last_pass) return draft;
    known += (known.empty() ? "" : ", ") + std::string(pass.name);
  }
  if (!last_pass.empty()) throw std::invalid_argument("no pass '" + last_pass + "'; there are " + known);
  return draft;
}

Schedule make_schedule(const TBGraph& graph, const Target& target) {
  return std::move(make_draft(graph, target).schedule);
}

}  // namespace mpk
