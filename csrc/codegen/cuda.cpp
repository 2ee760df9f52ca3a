// Schedule -> the source of one kernel, and its table.
#include "torch_mpk/codegen/cuda.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>

#include "emit.h"
#include "torch_mpk/abi.h"
#include "torch_mpk/device/table.h"

namespace mpk {
namespace codegen {

constexpr int64_t kEventBytes = 32;  // events and tickets, one sector each
constexpr int64_t kPolledAlignment = 256;

Plan::Plan(const Schedule& schedule)
    : schedule(schedule), workspace_bytes(schedule.workspace_bytes), slot_bytes(choose_slot_bytes(schedule)) {
  const TBGraph& graph = schedule.graph;
  written.assign(graph.buffers().size(), false);
  for (const Buffer& buffer : graph.buffers()) {
    if (buffer.kind == BufferKind::kInput) num_inputs = std::max(num_inputs, buffer.index + 1);
    if (buffer.kind == BufferKind::kOutput) num_outputs = std::max(num_outputs, buffer.index + 1);
  }
  input_alignment.assign(num_inputs, 1);
  phases_of.resize(graph.nodes().size());
  for (size_t p = 0; p < schedule.phases.size(); p++)
    for (const Job& job : schedule.phases[p].jobs)
      for (const std::vector<int>* nodes : {&job.prologue, &job.body, &job.epilogue})
        for (int n : *nodes) phases_of[n].push_back(static_cast<int>(p));
  for (const Node& node : graph.nodes()) {
    for (const Operand& operand : node.operands) {
      const Buffer& buffer = graph.buffers()[operand.tensor.buffer];
      if (operand.is_write) written[operand.tensor.buffer] = true;
      if (buffer.kind == BufferKind::kInput)
        input_alignment[buffer.index] = std::max<int>(input_alignment[buffer.index], size_bytes(operand.tensor.dtype));
    }
    if (node.program)
      for (const Instr& instr : node.program->instrs)
        if (instr.op == Op::kSize) num_scalars = std::max(num_scalars, instr.operand + 1);
  }
}

bool Plan::happens_before(int a, int b) const {
  for (int p = 0; p <= b; p++)
    for (int wait : schedule.phases[p].waits)
      if (wait >= a) return true;
  return false;
}

bool Plan::known_before(int buffer, int phase) const {
  for (const Node& node : schedule.graph.nodes())
    for (const Operand& operand : node.operands) {
      if (!operand.is_write || operand.tensor.buffer != buffer) continue;
      for (int writer : phases_of[node.id])
        if (writer == phase || (writer < phase && !happens_before(writer, phase - 1))) return false;
    }
  return true;
}

namespace {

template <class T>
void append(std::vector<uint8_t>& bytes, const T& value) {
  const size_t at = bytes.size();
  bytes.resize(at + sizeof(T));
  std::memcpy(bytes.data() + at, &value, sizeof(T));
}

void pad(std::vector<uint8_t>& bytes, size_t multiple) {
  bytes.resize((bytes.size() + multiple - 1) / multiple * multiple);
}

uint64_t nan_bits(DType t) {
  switch (t) {
    case DType::kF16:
      return 0x7e00;
    case DType::kBF16:
      return 0x7fc0;
    case DType::kF32:
      return 0x7fc00000;
    default:
      return 0x7ff8000000000000;
  }
}

class Generator {
 public:
  Generator(const Schedule& schedule, bool profiled) : schedule_(schedule), profiled_(profiled), plan_(schedule) {}

  CudaProgram run() {
    check_target();
    const int num_phases = static_cast<int>(schedule_.phases.size());
    events_offset_ = 32;
    tickets_offset_ = events_offset_ + num_phases * kEventBytes;
    for (int p = 0; p < num_phases; p++)
      for (const Job& job : schedule_.phases[p].jobs)
        for (int wait : job.loader_waits) signals_[wait] |= kPublishes | kReleases;
    for (const Phase& phase : schedule_.phases)
      for (int wait : phase.waits) signals_[wait] |= kReleases;

    std::vector<PhaseJobs> phases;
    for (int p = 0; p < num_phases; p++) phases.push_back(jobs_of(p));
    row_bytes_ = row_bytes(phases);
    std::vector<std::vector<uint8_t>> rows;
    for (const PhaseJobs& phase : phases) append_rows(rows, phase);
    num_rows_ = static_cast<int>(rows.size());
    CudaProgram program;
    program.table = make_table(rows);
    program.kernel_name = "torch_mpk_kernel";
    program.num_workers = schedule_.target.num_workers;
    program.num_threads = kThreads;
    program.smem_bytes = schedule_.target.smem_bytes;
    polled_offset_ = (plan_.workspace_bytes + kPolledAlignment - 1) / kPolledAlignment * kPolledAlignment;
    program.workspace_bytes = polled_offset_ + 2 * schedule_.polled_bytes;
    program.stalls_offset = tickets_offset_ + num_phases * kEventBytes;
    program.control_bytes = program.stalls_offset + static_cast<int64_t>(sizeof(StallRecord)) * program.num_workers;
    if (profiled_) {
      program.stamps_offset = program.control_bytes;
      program.control_bytes += static_cast<int64_t>(sizeof(PhaseStamps)) * program.num_workers * num_phases;
    }
    program.num_phases = num_phases;
    program.num_inputs = plan_.num_inputs;
    program.num_outputs = plan_.num_outputs;
    program.num_scalars = plan_.num_scalars;
    program.input_alignment = plan_.input_alignment;
    for (int p = 0; p < num_phases; p++) program.phase_names.push_back(phase_name(schedule_.phases[p]));
    program.source = source(program);
    return program;
  }

 private:
  void check_target() const {
    const Target& target = schedule_.target;
    if (target.device != "cuda" || target.arch < 80)
      throw std::runtime_error("codegen: the schedule is for device '" + target.device + "', arch " + str(target.arch) +
                               "; expected cuda with compute capability 8.0 or newer");
    if (schedule_.phases.empty()) throw std::runtime_error("codegen: the schedule has no phases");
    if (plan_.num_scalars > kMaxScalars)
      throw Unsupported("the graph takes " + str(plan_.num_scalars) + " sizes, a launch at most " + str(kMaxScalars));
    const int64_t bytes = static_cast<int64_t>(sizeof(LaunchParams)) + 8 * (plan_.num_inputs + plan_.num_outputs);
    if (bytes > kMaxLaunchBytes)
      throw Unsupported("the graph has " + str(plan_.num_inputs) + " inputs and " + str(plan_.num_outputs) +
                        " outputs, whose pointers do not fit the " + str(kMaxLaunchBytes) + " bytes of a launch");
  }

  // The same text as before gets the same number.
  uint32_t variant(const JobCode& code) {
    const auto [found, fresh] =
        numbers_.try_emplace(code.kind + code.compute + code.body, static_cast<uint32_t>(variants_.size()));
    if (fresh) variants_.push_back(code);
    return found->second;
  }

  std::vector<uint8_t> job_row(int p, const Job& job, bool may_claim, uint32_t& rotation) {
    const JobCode code = emit_job(plan_, p, job, may_claim);
    std::vector<uint8_t> row;
    const bool streams = !code.load.empty() || !code.matrices.empty();
    const std::vector<int> waits = streams ? job.loader_waits : std::vector<int>{};
    const auto count = [](const auto& list) { return static_cast<uint16_t>(list.size()); };
    JobRow head{variant(code), rotation, 0, count(code.refs), count(waits), count(code.matrices)};
    append(row, head);
    for (uint64_t ref : code.refs) append(row, ref);
    for (int wait : waits) append(row, static_cast<uint64_t>(wait));
    if (!code.matrices.empty()) append(row, code.stream);
    for (const MatrixRow& matrix : code.matrices) append(row, matrix);
    pad(row, 16);
    head.bytes = count(row);
    std::memcpy(row.data(), &head, sizeof(head));
    rotation = (rotation + code.num_small_workers) % schedule_.target.num_workers;
    return row;
  }

  // A phase's part of the table, yet to be cut into rows.
  struct PhaseJobs {
    std::vector<uint8_t> head;  // PhaseRow and waits
    std::vector<std::vector<uint8_t>> jobs;

    size_t bytes() const {
      size_t total = head.size();
      for (const auto& job : jobs) total += job.size();
      return total;
    }
    size_t largest() const {
      size_t largest = head.size();
      for (const auto& job : jobs) largest = std::max(largest, head.size() + job.size());
      return largest;
    }
  };

  PhaseJobs jobs_of(int p) {
    const Phase& phase = schedule_.phases[p];
    int num_streams = 0;
    for (const Job& job : phase.jobs) num_streams += plan_.node(job.body.front()).def->streams();
    PhaseJobs result;
    append(result.head, PhaseRow{0, static_cast<uint32_t>(phase.waits.size()), 0, signals_[p]});
    for (int wait : phase.waits) append(result.head, static_cast<uint32_t>(wait));
    pad(result.head, 16);
    uint32_t rotation = 0;
    for (const Job& job : phase.jobs) {
      result.jobs.push_back(job_row(p, job, num_streams == 1, rotation));
      if (const size_t bytes = result.jobs.back().size(); result.head.size() + bytes > kMaxRowBytes)
        fail(plan_.node(job.body.front()), "its operands need " + str(static_cast<int64_t>(bytes)) +
                                               " bytes, a row of the table has " + str(kMaxRowBytes) +
                                               ": split the expression");
    }
    return result;
  }

  // So long that phases take as few rows as they can, but for the last one, which runs only once.
  static size_t row_bytes(const std::vector<PhaseJobs>& phases) {
    size_t most = 0;
    for (const PhaseJobs& phase : phases) {
      const bool is_last = &phase == &phases.back();
      most = std::max(most, is_last ? phase.largest() : std::min<size_t>(phase.bytes(), kMaxRowBytes));
    }
    return most;
  }

  // The rows of a phase: as few as hold its jobs.
  void append_rows(std::vector<std::vector<uint8_t>>& rows, const PhaseJobs& phase) const {
    std::vector<uint8_t> row = phase.head;
    PhaseRow head;
    std::memcpy(&head, row.data(), sizeof(head));
    const auto finish = [&](bool last) {
      head.last = last;
      std::memcpy(row.data(), &head, sizeof(head));
      row.resize(row_bytes_);
      rows.push_back(row);
    };
    for (const std::vector<uint8_t>& job : phase.jobs) {
      if (row.size() + job.size() > row_bytes_) {
        finish(false);
        head = {0, 0, 0, head.signal};
        row.clear();
        append(row, head);
      }
      row.insert(row.end(), job.begin(), job.end());
      head.num_jobs++;
    }
    finish(true);
  }

  std::vector<uint8_t> make_table(const std::vector<std::vector<uint8_t>>& rows) {
    std::vector<uint8_t> table;
    for (const std::vector<uint8_t>& row : rows) table.insert(table.end(), row.begin(), row.end());
    outputs_offset_ = static_cast<int64_t>(table.size());
    std::set<int> seen;
    for (const Node& node : schedule_.graph.nodes())
      for (const Operand& operand : node.operands) {
        const Buffer& buffer = schedule_.graph.buffers()[operand.tensor.buffer];
        const DType dtype = operand.tensor.dtype;
        if (!operand.is_write || buffer.kind != BufferKind::kOutput || !is_float(dtype) ||
            !seen.insert(operand.tensor.buffer).second)
          continue;
        append(table,
               OutputRow{static_cast<uint64_t>(buffer.bytes), static_cast<uint32_t>(plan_.num_inputs + buffer.index),
                         static_cast<uint32_t>(size_bytes(dtype)), nan_bits(dtype)});
        num_output_rows_++;
      }
    return table;
  }

  std::string phase_name(const Phase& phase) const {
    std::string name;
    for (const Job& job : phase.jobs)
      for (int n : job.body) {
        const Node& node = plan_.node(n);
        name += (name.empty() ? "" : ", ") + node.def->name + (node.label.empty() ? "" : " " + node.label);
      }
    return name;
  }

  std::string source(const CudaProgram& program) const {
    std::set<std::string> headers = {"torch_mpk/device/points.cuh"};
    for (const JobCode& code : variants_) headers.insert(code.headers.begin(), code.headers.end());
    std::string text = "// Generated by torch_mpk from a schedule of " + str(program.num_phases) + " phases.\n";
    for (const std::string& header : headers) text += "#include \"" + header + "\"\n";
    text += "\nnamespace torch_mpk_kernel_parts {\n\nusing namespace mpk;\n\n";
    std::string compute, load, staged = "256";
    const std::vector<size_t> sharing = variants_of_shared_loop();
    for (size_t i = 0; i < variants_.size(); i++) {
      const JobCode& code = variants_[i];
      const std::string number = str(static_cast<int64_t>(i)), name = variant_name(i);
      text += "struct " + name + " {\n" + code.body + "};\n\n";
      const std::string label = "      case " + number + ": return ";
      if (std::find(sharing.begin(), sharing.end(), i) == sharing.end())
        compute += label + code.compute + "<" + name + ">(c, job);\n";
      if (!code.load.empty()) load += label + code.load + "<" + name + ">(l, job);\n";
      std::string bytes = code.staged_bytes;
      if (bytes.empty()) continue;
      for (size_t at = bytes.find("<V>"); at != std::string::npos; at = bytes.find("<V>"))
        bytes.replace(at, 3, "<" + name + ">");
      staged = "larger(" + staged + ",\n      " + bytes + ")";
    }
    text +=
        "constexpr int larger(int a, int b) { return a > b ? a : b; }\nconstexpr int round_up(int v) { return (v + "
        "127) / 128 * 128; }\n\n";
    auto constant = [](const char* type, const char* name, const std::string& value) {
      return std::string("  static constexpr ") + type + " " + name + " = " + value + ";\n";
    };
    if (!sharing.empty()) text += linears(sharing);
    text += "struct Kernel {\n" + constant("int", "kNumRows", str(num_rows_)) +
            constant("int", "kNumPhases", str(program.num_phases)) +
            constant("int", "kNumWorkers", str(program.num_workers)) +
            constant("int", "kNumOutputs", str(num_output_rows_)) +
            constant("int64_t", "kEventsOffset", str(events_offset_)) +
            constant("int64_t", "kTicketsOffset", str(tickets_offset_)) +
            constant("int64_t", "kStallsOffset", str(program.stalls_offset)) +
            constant("int64_t", "kStampsOffset", str(program.stamps_offset)) +
            constant("int64_t", "kOutputsOffset", str(outputs_offset_)) +
            constant("int64_t", "kPolledOffset", str(polled_offset_)) +
            constant("int64_t", "kPolledBytes", str(schedule_.polled_bytes)) +
            constant("int", "kRowBytes", str(static_cast<int64_t>(row_bytes_))) +
            constant("int", "kRowsOffset", "sizeof(Shared)") +
            constant("int", "kStagedOffset", "round_up(kRowsOffset + kPhasesAhead * kRowBytes)") +
            constant("int", "kStagedBytes", staged) +
            constant("int", "kRingOffset", "kStagedOffset + round_up(kStagedBytes)") +
            constant("int", "kSlotBytes", str(plan_.slot_bytes)) +
            constant("int", "kFittingSlots", "(" + str(program.smem_bytes) + " - kRingOffset) / kSlotBytes") +
            constant("int", "kSlots", "kFittingSlots < kMaxSlots ? kFittingSlots : kMaxSlots") +
            "  static_assert(kSlots >= 2, \"no shared memory is left for the ring\");\n\n" +
            "  template <class C>\n  static MPK_DEVICE void compute(C& c, const Job& job) {\n" +
            (sharing.empty() ? "" : "    if (Linears::has(job)) return linear::compute_shared<Linears>(c, job);\n") +
            "    switch (job.variant) {\n" + compute +
            "    }\n  }\n\n  template <class L>\n  static MPK_DEVICE void load(L& l, const Job& job) {\n    switch "
            "(job.variant) {\n" +
            load + "      default: break;\n    }\n  }\n};\n\n";
    text += "struct LaunchBlock {\n  LaunchParams params;\n  void* pointers[" +
            str(std::max(1, plan_.num_inputs + plan_.num_outputs)) +
            "];\n};\n\n}  // namespace torch_mpk_kernel_parts\n\nextern \"C\" __global__ void "
            "__launch_bounds__(mpk::kThreads, 1) " +
            program.kernel_name +
            "(const __grid_constant__ torch_mpk_kernel_parts::LaunchBlock block) {\n  "
            "mpk::run<torch_mpk_kernel_parts::Kernel>(block.params, block.pointers);\n}\n";
    return text;
  }

  std::string variant_name(size_t i) const { return variants_[i].kind + str(static_cast<int64_t>(i)); }

  // The linears that share a tile loop: those of the first element type there is. One alone needs no choice.
  std::vector<size_t> variants_of_shared_loop() const {
    std::vector<size_t> sharing;
    std::string type;
    for (size_t i = 0; i < variants_.size(); i++) {
      const JobCode& code = variants_[i];
      if (type.empty()) type = code.shared_loop;
      if (!type.empty() && code.shared_loop == type) sharing.push_back(i);
    }
    return sharing.size() > 1 ? sharing : std::vector<size_t>{};
  }

  // Code that runs `leaf` of the job's variant, which is one of these. By comparisons: a switch would jump to an
  // address from a table in memory, which takes longer where the code is not in a loop.
  template <class Leaf>
  static std::string by_variant(const std::vector<size_t>& variants, size_t begin, size_t end, Leaf leaf) {
    if (end - begin == 1) return leaf(variants[begin]);
    const size_t middle = (begin + end) / 2;
    const std::string first = by_variant(variants, begin, middle, leaf), rest = by_variant(variants, middle, end, leaf);
    return "    if (job.variant < " + str(static_cast<int64_t>(variants[middle])) + "u) {\n" + first +
           "    } else {\n" + rest + "    }\n";
  }

  // What compute_shared asks of them, by variant.
  std::string linears(const std::vector<size_t>& sharing) const {
    std::vector<size_t> with_extra;
    std::string extras, has, has_extra;
    uint32_t row_counts = 0;
    const auto add = [](std::string& list, size_t i) {
      list += (list.empty() ? "job.variant == " : " || job.variant == ") + str(static_cast<int64_t>(i));
    };
    for (size_t i : sharing) {
      const JobCode& code = variants_[i];
      row_counts |= 1u << (code.stream.stream.tile_rows * code.stream.stream.chunk_parts);
      extras += "    " + variant_name(i) + "::Extra of_" + variant_name(i) + ";\n";
      add(has, i);
      if (!code.has_extra) continue;
      with_extra.push_back(i);
      add(has_extra, i);
    }
    const auto choose = [&](const std::vector<size_t>& variants, const auto& leaf) {
      return variants.empty()
                 ? ""
                 : by_variant(variants, 0, variants.size(), [&](size_t i) { return leaf(variant_name(i)); });
    };
    const std::string prepare =
        choose(sharing, [](const std::string& name) { return "    return linear::prepare<" + name + ">(c, job);\n"; });
    const std::string preload = choose(with_extra, [](const std::string& name) {
      return "    extra.of_" + name + " = " + name + "::preload(job, segment, 0, n);\n";
    });
    const std::string finish = choose(sharing, [](const std::string& name) {
      return "    linear::finish_row<" + name + ">(c, job, segment, n, values, extra.of_" + name + ");\n";
    });
    return "struct Linears {\n  using T = " + variant_name(sharing.front()) +
           "::T;\n  static constexpr uint32_t kRowCounts = " + str(row_counts) +
           ";\n  static MPK_DEVICE bool has(const Job& job) { return " + has +
           "; }\n  static MPK_DEVICE bool has_extra(const Job& job) { return " +
           (has_extra.empty() ? "false" : has_extra) + "; }\n  union Extra {\n    uint32_t none;\n" + extras +
           "  };\n  template <class C>\n  static MPK_DEVICE bool prepare(C& c, const Job& job) {\n" + prepare +
           "  }\n  static MPK_DEVICE Extra preload(const Job& job, int segment, uint32_t n) {\n    Extra extra{};\n" +
           preload + "    return extra;\n  }\n  template <class C>\n" +
           "  static MPK_DEVICE void finish(C& c, const Job& job, int segment, uint32_t n, const float "
           "(&values)[4],\n" +
           "                                const Extra& extra) {\n" + finish + "  }\n};\n\n";
  }

  const Schedule& schedule_;
  const bool profiled_;
  Plan plan_;
  std::map<std::string, uint32_t> numbers_;
  std::vector<JobCode> variants_;
  std::map<int, uint32_t> signals_;  // per phase, see Signal
  int64_t events_offset_ = 0, tickets_offset_ = 0, outputs_offset_ = 0, polled_offset_ = 0;
  size_t row_bytes_ = 0;
  int num_rows_ = 0, num_output_rows_ = 0;
};

}  // namespace
}  // namespace codegen

CudaProgram generate_cuda(const Schedule& schedule, bool profiled) {
  return codegen::Generator(schedule, profiled).run();
}

}  // namespace mpk
