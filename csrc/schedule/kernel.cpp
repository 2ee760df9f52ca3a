#include "kernel.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>

#include "../arch/arch.h"
#include "access.h"
#include "passes.h"

namespace mpk {
namespace {

using List = std::vector<const Kernel*>;

// Filled in static initialisers, in any order.
struct Kernels {
  std::map<std::string, const Kernel*> by_name;
  std::map<std::string, List> of_tasks;
  std::map<Role, List> of_roles;
  List of_runs;
  std::map<std::string, List> by_run;  // each kernel alone
};

Kernels& kernels() {
  static Kernels all;
  return all;
}

bool add_to(List& list, const Kernel& kernel) {
  if (!kernels().by_name.emplace(kernel.name(), &kernel).second)
    throw std::logic_error("there are two kernels '" + kernel.name() + "'");
  list.push_back(&kernel);
  std::sort(list.begin(), list.end(), [](const Kernel* a, const Kernel* b) { return a->name() < b->name(); });
  return true;
}

std::string name_of(const Node& node) { return node.def->name + (node.label.empty() ? "" : " (" + node.label + ")"); }

}  // namespace

std::optional<std::string> Kernel::refusal(const Schedule& schedule, const Job& job) const {
  for (int n : job.body)
    if (auto why = refuses_node(schedule.graph.nodes()[n], schedule.target)) return why;
  if (!tiles_behind(schedule.graph, job).empty() && !ends_with_tiles(schedule, job)) return "tile tasks end the job";
  return refuses(schedule, job);
}

Demands of_warpgroups() {
  Demands demands;
  demands.consumers = kWarpgroups * kWarpgroupWarps;
  demands.registers = kMultiplyingRegisters;
  demands.slot_bytes = kTileSlotBytes;
  demands.moves_registers = demands.all_read_entries = demands.loads_inputs = demands.hands_over_rows = true;
  return demands;
}

bool add_kernel(const std::string& task, const Kernel& kernel) { return add_to(kernels().of_tasks[task], kernel); }
bool add_kernel(Role role, const Kernel& kernel) { return add_to(kernels().of_roles[role], kernel); }
bool add_run_kernel(const Kernel& kernel) {
  kernels().by_run[kernel.name()] = {&kernel};
  return add_to(kernels().of_runs, kernel);
}

List kernels_of(const TaskDef& def) {
  const auto own = kernels().of_tasks.find(def.name);
  if (own == kernels().of_tasks.end()) return kernels().of_roles[def.role];
  List all = own->second;
  if (def.role == Role::kTile) {
    const List& shared = kernels().of_roles[def.role];
    all.insert(all.end(), shared.begin(), shared.end());
  }
  return all;
}

const List& run_kernels() { return kernels().of_runs; }

List kernels_of(const Schedule& schedule, const Job& job) {
  if (!job.run.empty()) return kernels().by_run[job.run];
  return kernels_of(*schedule.graph.nodes()[job.body.front()].def);
}

const Kernel* find_kernel(const std::string& name) {
  const auto found = kernels().by_name.find(name);
  return found == kernels().by_name.end() ? nullptr : found->second;
}

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

std::optional<std::string> refusal(const TBGraph& graph, const Target& target) {
  const Draft draft = make_draft(graph, target, "choose_kernels");
  for (const Phase& phase : draft.schedule.phases)
    for (const Job& job : phase.jobs)
      if (job.cut.kernel.empty()) return name_of(draft.node(job.body.front())) + ": " + why_none(job);
  return std::nullopt;
}

double memory_ns(const Schedule& schedule, const Job& job) {
  const int64_t bytes = phase_bytes(schedule, Phase{{job}, {}});
  return double(bytes) / arch_of(schedule.target.arch).costs.memory_bytes_per_ns / double(schedule.target.num_workers);
}

std::optional<double> launch_ns(const Schedule& schedule) {
  const Costs& costs = arch_of(schedule.target.arch).costs;
  double ns = 0;
  for (size_t p = 0; p < schedule.phases.size(); p++) {
    if (p > 0) ns += (schedule.phases[p].waits.empty() ? costs.hop_cycles : costs.event_cycles) / costs.cycles_per_ns;
    for (const Job& job : schedule.phases[p].jobs) {
      if (job.cut.kernel.empty()) return std::nullopt;
      ns += job.cut.cost_ns;
    }
  }
  return ns;
}

}  // namespace mpk
