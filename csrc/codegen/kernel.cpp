#include "kernel.h"

#include <algorithm>
#include <set>

#include "../arch/arch.h"
#include "text.h"

namespace mpk::codegen {
namespace {

constexpr int64_t kFewestStagedBytes = 256;

// A member of the kernel's struct.
std::string member(const char* type, const char* name, const std::string& value) {
  return std::string("  static constexpr ") + type + " " + name + " = " + value + ";\n";
}
std::string member(const char* type, const char* name, int64_t value) { return member(type, name, str(value)); }

// The macros that device code is compiled with, see device/warps.cuh.
std::string warps(const WarpLayout& layout) {
  return "#define MPK_CONSUMER_WARPS " + str(layout.consumers) + "\n#define MPK_LOADER_WARPS " + str(layout.loaders) +
         "\n" +
         (layout.moves_registers ? "#define MPK_WARPGROUPS " + str(layout.consumers / kWarpgroupWarps) + "\n" : "");
}

std::string includes(const Target& target, const Variants& variants, const Offsets& offsets) {
  std::set<std::string> headers = {"torch_mpk/device/megakernel.cuh", "torch_mpk/device/points.cuh"};
  for (const JobCode& code : variants.codes()) headers.insert(code.headers.begin(), code.headers.end());
  if (offsets.pairs != 0) headers.insert("torch_mpk/device/tasks/expert_stamps.cuh");
  std::string text = told_to_device_code(target.arch, target.device_arch);
  for (const std::string& header : headers) text += "#include \"" + header + "\"\n";
  return text;
}

// The most shared memory that a job stages, by the schedule.
int64_t most_staged(const Schedule& schedule) {
  int64_t most = kFewestStagedBytes;
  for (const Phase& phase : schedule.phases)
    for (const Job& job : phase.jobs) most = std::max(most, job.cut.staged_bytes);
  return most;
}

// The bytes that the code stages, as an expression.
std::string staged_bytes(const Variants& variants) {
  std::string staged = str(kFewestStagedBytes);
  for (size_t i = 0; i < variants.codes().size(); i++) {
    std::string bytes = variants.codes()[i].staged_bytes;
    if (bytes.empty()) continue;
    for (size_t at = bytes.find("<V>"); at != std::string::npos; at = bytes.find("<V>"))
      bytes.replace(at, 3, "<" + variants.name(i) + ">");
    staged = "larger(" + staged + ",\n      " + bytes + ")";
  }
  return staged;
}

// The place of the ring. Boxes need it aligned, and jobs with stages have barriers in front of it.
std::string stages(const KernelContext& context, const Variants& variants) {
  const bool has_stages = context.has_swizzle || std::ranges::any_of(variants.codes(), &JobCode::has_stages);
  const std::string staged_end = "kStagedOffset + round_up(kStagedBytes)", alignment = str(kBoxAlignment);
  bool joins_boxes = false;
  for (const Phase& phase : context.schedule.phases)
    for (const Job& job : phase.jobs) joins_boxes |= job.cut.shape && job.cut.shape->joins_boxes();
  const std::string flags = member("bool", "kHasBoxes", truth(context.has_swizzle)) +
                            member("bool", "kJoinsBoxes", truth(joins_boxes)) +
                            member("bool", "kHasStages", truth(has_stages));
  if (!has_stages) return flags + member("int", "kRingOffset", staged_end);
  return flags + member("int", "kStagesOffset", staged_end) +
         member("int", "kRingOffset",
                "(kStagesOffset + int(sizeof(StageBarriers)) + " + str(kBoxAlignment - 1) + ") / " + alignment + " * " +
                    alignment);
}

std::string layout(const KernelContext& context, const Variants& variants, const Table& table, const Offsets& offsets,
                   const CudaProgram& program) {
  const WarpLayout& warps = context.schedule.warps;
  const std::string most = str(warps.max_slots);
  return member("int", "kFullArrivals", warps.full_arrivals) + member("int", "kEmptyArrivals", warps.empty_arrivals) +
         member("int", "kNumRows", table.num_rows) + member("int", "kNumPhases", program.num_phases) +
         member("int", "kNumWorkers", program.num_workers) + member("int", "kNumOutputs", table.num_output_rows) +
         member("int64_t", "kEventsOffset", offsets.events) + member("int64_t", "kTicketsOffset", offsets.tickets) +
         member("int64_t", "kStallsOffset", program.stalls_offset) +
         member("int64_t", "kStampsOffset", program.stamps_offset) +
         (offsets.pairs == 0 ? ""
                             : member("int64_t", "kPairsOffset", offsets.pairs) +
                                   member("int", "kMostExperts", most_experts(program.phase_experts))) +
         member("int64_t", "kOutputsOffset", table.outputs_offset) +
         member("int64_t", "kPolledOffset", offsets.polled) +
         member("int64_t", "kPolledBytes", context.schedule.polled_bytes) +
         member("int", "kRowBytes", table.row_bytes) + member("int", "kRowsOffset", "sizeof(Shared)") +
         member("int", "kStagedOffset", "round_up(kRowsOffset + kPhasesAhead * kRowBytes)") +
         member("int", "kStagedBytes", staged_bytes(variants)) + stages(context, variants) +
         member("int", "kSlotBytes", warps.slot_bytes) +
         member("int", "kFittingSlots", "(" + str(program.smem_bytes) + " - kRingOffset) / kSlotBytes") +
         member("int", "kSlots", "kFittingSlots < " + most + " ? kFittingSlots : " + most) +
         "  static_assert(kSlots >= kFewestSlots, \"no shared memory is left for the ring\");\n" +
         "  static_assert(kStagedBytes <= " + str(most_staged(context.schedule)) +
         ", \"a job stages more than the schedule says\");\n\n";
}

// The functions that consumers and the loader call for a job, by its variant. `awaits`: the loader's code must await
// what its copies depend on.
std::string dispatch(const Variants& variants, const std::vector<SharedCode>& shared, bool awaits, bool notes_pairs) {
  std::set<uint32_t> sharing;
  std::string shared_compute, compute, load;
  for (const SharedCode& code : shared) {
    sharing.insert(code.variants.begin(), code.variants.end());
    shared_compute += code.compute;
  }
  for (size_t i = 0; i < variants.codes().size(); i++) {
    const JobCode& code = variants.codes()[i];
    const std::string label = "      case " + str(static_cast<int64_t>(i)) + ": return ", name = variants.name(i);
    const bool notes = notes_pairs && code.experts.first != 0;
    if (sharing.count(static_cast<uint32_t>(i)) == 0)
      compute += label + code.compute + "<" + name + ">(c, job)" +
                 (notes ? ", experts::note_pairs<" + name + ">(c, job)" : "") + ";\n";
    if (!code.load.empty())
      load += label + (awaits && !code.loads_early ? "!l.await(job) ? void() : " : "") + code.load + "<" + name +
              ">(l, job);\n";
  }
  return "  template <class C>\n  static MPK_DEVICE void compute(C& c, const Job& job) {\n" + shared_compute +
         "    switch (job.variant) {\n" + compute +
         "    }\n  }\n\n  template <class L>\n  static MPK_DEVICE void load(L& l, const Job& job) {\n    switch "
         "(job.variant) {\n" +
         load + "      default: break;\n    }\n  }\n";
}

// The kernel function. Its parameter is a launch's.
std::string entry_point(const KernelContext& context, const CudaProgram& program) {
  return "struct LaunchBlock {\n  LaunchParams params;\n  void* pointers[" +
         str(std::max(1, context.num_inputs + context.num_outputs)) +
         "];\n};\n\n}  // namespace torch_mpk_kernel_parts\n\nextern \"C\" __global__ void "
         "__launch_bounds__(mpk::kThreads, 1) " +
         program.kernel_name +
         "(const __grid_constant__ torch_mpk_kernel_parts::LaunchBlock block) {\n  "
         "mpk::run<torch_mpk_kernel_parts::Kernel>(block.params, block.pointers);\n}\n";
}

}  // namespace

uint32_t Variants::number_of(JobCode code) {
  const auto [found, fresh] =
      numbers_.try_emplace(code.kind + code.compute + code.body, static_cast<uint32_t>(codes_.size()));
  if (fresh) codes_.push_back(std::move(code));
  return found->second;
}

std::vector<SharedCode> Variants::shared() const {
  std::vector<SharedCode> all;
  std::set<const Kernel*> asked;
  for (const JobCode& code : codes_) {
    if (!asked.insert(code.kernel).second) continue;
    std::vector<Variant> own;
    for (size_t i = 0; i < codes_.size(); i++)
      if (codes_[i].kernel == code.kernel) own.push_back({static_cast<uint32_t>(i), name(i), codes_[i]});
    if (std::optional<SharedCode> shared = code.kernel->share(own)) all.push_back(std::move(*shared));
  }
  return all;
}

std::string kernel_source(const KernelContext& context, const Variants& variants, const Table& table,
                          const Offsets& offsets, const CudaProgram& program) {
  std::string text = "// Generated by torch_mpk from a schedule of " + str(program.num_phases) + " phases.\n" +
                     warps(context.schedule.warps) + includes(context.schedule.target, variants, offsets) +
                     "\nnamespace torch_mpk_kernel_parts {\n\nusing namespace mpk;\n\n";
  for (size_t i = 0; i < variants.codes().size(); i++)
    text += variants.comment(static_cast<uint32_t>(i)) + "struct " + variants.name(i) + " {\n" +
            variants.codes()[i].body + "};\n\n";
  text +=
      "constexpr int larger(int a, int b) { return a > b ? a : b; }\nconstexpr int round_up(int v) { return (v + 127) "
      "/ "
      "128 * 128; }\n\n";
  const std::vector<SharedCode> shared = variants.shared();
  for (const SharedCode& code : shared) text += code.declarations;
  return text + "struct Kernel {\n" + layout(context, variants, table, offsets, program) +
         dispatch(variants, shared, context.schedule.warps.moves_registers, offsets.pairs != 0) + "};\n\n" +
         entry_point(context, program);
}

}  // namespace mpk::codegen
