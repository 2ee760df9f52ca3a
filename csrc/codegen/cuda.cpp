// Schedule -> the source of a kernel, and its table.
#include "torch_mpk/codegen/cuda.h"

#include <algorithm>
#include <stdexcept>

#include "../arch/arch.h"
#include "job_code.h"
#include "kernel.h"
#include "names.h"
#include "table.h"
#include "text.h"
#include "torch_mpk/abi/launch.h"
#include "torch_mpk/codegen/unsupported.h"
#include "torch_mpk/schedule/mailboxes.h"

namespace mpk {
namespace codegen {
namespace {

constexpr int64_t kPolledAlignment = 256;

void check_target(const Schedule& schedule) {
  const Target& target = schedule.target;
  if (target.device != "cuda")
    throw std::runtime_error("codegen: the schedule is for device '" + target.device + "', expected cuda");
  arch_of(target.arch);
  if (schedule.phases.empty()) throw std::runtime_error("codegen: the schedule has no phases");
}

void check_launch(const KernelContext& context) {
  if (context.num_scalars > kMaxScalars)
    throw Unsupported("the graph takes " + str(context.num_scalars) + " sizes, a launch at most " + str(kMaxScalars));
  const int64_t bytes = static_cast<int64_t>(sizeof(LaunchParams)) + 8 * (context.num_inputs + context.num_outputs);
  if (bytes > kMaxLaunchBytes)
    throw Unsupported("the graph has " + str(context.num_inputs) + " inputs and " + str(context.num_outputs) +
                      " outputs, whose pointers do not fit the " + str(kMaxLaunchBytes) + " bytes of a launch");
}

// Writes every job's code and table row, and which experts each phase chooses from.
Table emit_jobs(KernelContext& context, Variants& variants, bool named, std::vector<ExpertStack>& phase_experts) {
  TableWriter table(context);
  for (size_t p = 0; p < context.schedule.phases.size(); p++) {
    table.begin_phase(static_cast<int>(p));
    ExpertStack& experts = phase_experts.emplace_back();
    for (const Job& job : context.schedule.phases[p].jobs) {
      const JobCode code = emit_job({context, static_cast<int>(p), job});
      experts = {std::max(experts.first, code.experts.first), experts.second + code.experts.second};
      const uint32_t variant = variants.number_of(code);
      table.add_job(job, code, variant);
      if (named) variants.add_comment(variant, job_comment(context, p, job));
    }
  }
  return table.finish();
}

// The device's own architecture, if all code of its generation is compiled for it, or a task has code for it. Other
// devices may lack the instructions.
int compiled_for(const KernelContext& context) {
  const Target& target = context.schedule.target;
  const bool is_own = std::ranges::any_of(context.graph().nodes(), [&](const Node& node) {
    return node.def && node.def->headers.contains(target.device_arch);
  });
  return is_own || arch_of(target.arch).is_compiled_by_device ? target.device_arch : target.arch;
}

// Lays out the memory that outlives a launch.
Offsets place_state(const KernelContext& context, bool profiled, CudaProgram& program) {
  Offsets offsets = {};
  offsets.events = kEventsOffset;
  offsets.tickets = tickets_offset(program.num_phases);
  offsets.polled = (context.schedule.workspace_bytes + kPolledAlignment - 1) / kPolledAlignment * kPolledAlignment;
  program.workspace_bytes = offsets.polled + 2 * context.schedule.polled_bytes;
  program.stalls_offset = stalls_offset(program.num_phases);
  program.control_bytes = program.stalls_offset + static_cast<int64_t>(sizeof(StallRecord)) * program.num_workers;
  if (profiled) {
    program.stamps_offset = program.control_bytes;
    program.control_bytes +=
        kLaunchesKept * (launch_stamps_bytes(program.num_workers, program.num_phases) +
                         rank_stamps_bytes(program.num_workers, program.num_phases, program.ranks));
    if (const int64_t experts = most_experts(program.phase_experts)) {
      offsets.pairs = program.control_bytes;
      program.control_bytes += kLaunchesKept * pair_stamps_bytes(program.num_phases, experts);
    }
  }
  return offsets;
}

}  // namespace
}  // namespace codegen

CudaProgram generate_cuda(const Schedule& schedule, bool profiled, bool named) {
  using namespace codegen;
  check_target(schedule);
  KernelContext context(schedule);
  check_launch(context);
  Variants variants;
  CudaProgram program;
  Table table = emit_jobs(context, variants, named, program.phase_experts);
  program.kernel_name = "torch_mpk_kernel";
  program.arch = compiled_for(context);
  program.num_workers = schedule.target.num_workers;
  program.num_threads = schedule.warps.threads();
  program.smem_bytes = schedule.target.smem_bytes;
  program.num_phases = static_cast<int>(schedule.phases.size());
  program.num_inputs = context.num_inputs;
  program.num_outputs = context.num_outputs;
  program.num_scalars = context.num_scalars;
  program.input_alignment = context.input_alignment;
  program.maps = context.maps;
  for (const Phase& phase : schedule.phases) {
    program.phase_names.push_back(phase_name(schedule, phase));
    program.phase_bytes.push_back(phase_bytes(schedule, phase));
  }
  const Mailboxes mailboxes = place_mailboxes(schedule);
  program.ranks = mailboxes.ranks;
  program.group = mailboxes.group;
  program.exchange_key = mailboxes.key;
  program.mailbox_bytes = mailboxes.bytes();
  const Offsets offsets = place_state(context, profiled, program);
  program.source = kernel_source(context, variants, table, offsets, program);
  program.table = std::move(table.bytes);
  return program;
}

}  // namespace mpk
