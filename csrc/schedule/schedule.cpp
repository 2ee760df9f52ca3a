// The passes, in order.
#include "torch_mpk/schedule/schedule.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "kernel.h"
#include "passes.h"
#include "rewrite.h"

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
      {"join_runs", join_runs, fused_on_gpu},
      {"fuse_epilogues", fuse_epilogues, fused},
      {"group_nodes", group_nodes, fused},
      {"find_prologues", find_prologues, fused},
      {"split_norms", split_norms, fused_on_gpu},
      {"make_single_jobs", make_single_jobs, always},
      {"attach_prologues", attach_prologues, fused},
      {"end_with_rows", end_with_rows, fused_on_gpu},
      {"end_with_tiles", end_with_tiles, fused_on_gpu},
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

namespace {

Draft run_passes(const TBGraph& graph, const Target& target, std::vector<TakenRuns> runs, const std::string& last) {
  Draft draft(graph, target, std::move(runs));
  for (const Pass& pass : passes()) {
    if (pass.applies(target)) pass.run(draft);
    if (pass.name == last) break;
  }
  return draft;
}

int64_t count_runs(const Schedule& schedule, const std::string& kernel) {
  int64_t count = 0;
  for (const Phase& phase : schedule.phases)
    count += std::ranges::count_if(phase.jobs, [&](const Job& job) { return job.run == kernel; });
  return count;
}

bool finds_runs(const Kernel& kernel, const TBGraph& graph) {
  return std::ranges::any_of(graph.nodes(),
                             [&](const Node& node) { return kernel.find_run(graph, node.id).size() > 1; });
}

// Takes a kernel's runs if the whole launch is faster with them: their savings, phases among them, are known once
// everything is placed.
std::vector<TakenRuns> choose_runs(const TBGraph& graph, const Target& target) {
  std::vector<TakenRuns> taken;
  if (target.device != "cuda" || !target.fuse) return taken;
  std::vector<const Kernel*> kernels;  // each takes all passes once more
  std::ranges::copy_if(run_kernels(), std::back_inserter(kernels),
                       [&](const Kernel* kernel) { return finds_runs(*kernel, graph); });
  if (kernels.empty()) return taken;
  std::optional<double> best = launch_ns(run_passes(graph, target, taken, "").schedule);
  for (const Kernel* kernel : kernels) {
    std::vector<TakenRuns> tried = taken;
    tried.push_back({kernel});
    const Schedule schedule = run_passes(graph, target, tried, "").schedule;
    const std::optional<double> ns = launch_ns(schedule);
    const int64_t count = count_runs(schedule, kernel->name());
    if (count == 0 || !ns || (best && *ns >= *best)) continue;
    if (best) tried.back().saved_ns = (*best - *ns) / static_cast<double>(count);
    taken = tried;
    best = ns;
  }
  return taken;
}

// A launch of a graph, and its cost if all jobs have kernels.
struct Launch {
  TBGraph graph;
  std::vector<TakenRuns> runs;
  Draft draft;
  std::optional<double> ns;

  Launch(const TBGraph& graph, const Target& target)
      : graph(graph),
        runs(choose_runs(graph, target)),
        draft(run_passes(graph, target, runs, "")),
        ns(launch_ns(draft.schedule)) {}
  bool beats(const Launch& other) const { return ns && (!other.ns || *ns < *other.ns); }
};

// The fastest launch: of the graph, of what all rewrites make of it, or one of them.
std::unique_ptr<Launch> choose_launch(const TBGraph& graph, const TBGraph& rewritten, const Target& target) {
  auto best = std::make_unique<Launch>(graph, target), all = std::make_unique<Launch>(rewritten, target);
  // Without kernels for either, those that the other graph lacks say what is missing.
  if (!best->ns || all->beats(*best)) best = std::move(all);
  const std::vector<TBGraph> apart = rewritten_apart(graph, target);
  if (apart.size() < 2) return best;
  for (const TBGraph& each : apart)
    if (auto one = std::make_unique<Launch>(each, target); one->beats(*best)) best = std::move(one);
  return best;
}

}  // namespace

Draft make_draft(const TBGraph& given, const Target& target, const std::string& last_pass) {
  if (target.num_workers < 1)
    throw std::invalid_argument("schedule: a target needs at least one worker, got " +
                                std::to_string(target.num_workers));
  const auto is_last = [&](const Pass& pass) { return pass.name == last_pass; };
  if (!last_pass.empty() && std::ranges::none_of(passes(), is_last)) {
    std::string known;
    for (const Pass& pass : passes()) known += (known.empty() ? "" : ", ") + std::string(pass.name);
    throw std::invalid_argument("no pass '" + last_pass + "'; there are " + known);
  }
  const std::optional<TBGraph> apart = with_rows_apart(given, target);
  const TBGraph& graph = apart ? *apart : given;
  const std::optional<TBGraph> other = rewritten(graph, target);
  if (!other) return run_passes(graph, target, choose_runs(graph, target), last_pass);
  const std::unique_ptr<Launch> best = choose_launch(graph, *other, target);
  return last_pass.empty() ? std::move(best->draft) : run_passes(best->graph, target, std::move(best->runs), last_pass);
}

Schedule make_schedule(const TBGraph& graph, const Target& target) {
  return std::move(make_draft(graph, target).schedule);
}

}  // namespace mpk
