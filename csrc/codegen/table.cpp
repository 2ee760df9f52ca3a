#include "table.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "../schedule/staging.h"
#include "checks.h"
#include "text.h"

namespace mpk::codegen {
namespace {

using Bytes = std::vector<uint8_t>;

template <class T>
void append(Bytes& bytes, const T& value) {
  const size_t at = bytes.size();
  bytes.resize(at + sizeof(T));
  std::memcpy(bytes.data() + at, &value, sizeof(T));
}

void pad(Bytes& bytes, size_t multiple) { bytes.resize((bytes.size() + multiple - 1) / multiple * multiple); }

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

}  // namespace

size_t TableWriter::PhaseJobs::bytes() const {
  size_t total = head.size();
  for (const Bytes& job : jobs) total += job.size();
  return total;
}

size_t TableWriter::PhaseJobs::largest() const {
  size_t largest = head.size();
  for (const Bytes& job : jobs) largest = std::max(largest, head.size() + job.size());
  return largest;
}

TableWriter::TableWriter(const KernelContext& context) : context_(context) {
  const std::vector<int>* awaited = nullptr;  // by this phase, or by the last before it that awaits any
  for (const Phase& phase : context.schedule.phases) {
    for (int wait : phase.waits) signals_[wait] |= kReleases;
    if (!phase.waits.empty()) awaited = &phase.waits;
    for (const Job& job : phase.jobs) {
      for (int wait : job.loader_waits) signals_[wait] |= kPublishes | kReleases;
      if (awaited != nullptr && job.cut.input == Input::kBoxStages)
        for (int wait : *awaited) signals_[wait] |= kPublishes;
    }
  }
}

void TableWriter::begin_phase(int phase) {
  const std::vector<int>& waits = context_.schedule.phases[phase].waits;
  Bytes& head = phases_.emplace_back().head;
  append(head, PhaseRow{0, static_cast<uint32_t>(waits.size()), 0, signals_[phase]});
  for (int wait : waits) append(head, static_cast<uint32_t>(wait));
  pad(head, kAccessBytes);
  rotation_ = 0;
}

void TableWriter::add_job(const Job& job, const JobCode& code, uint32_t variant) {
  Bytes row;
  const bool streams = !code.load.empty() || !code.matrices.empty();
  const std::vector<int> waits = streams ? job.loader_waits : std::vector<int>{};
  const auto count = [](const auto& list) { return static_cast<uint16_t>(list.size()); };
  JobRow head{variant, rotation_, 0, count(code.refs), count(waits), count(code.matrices)};
  append(row, head);
  for (uint64_t ref : code.refs) append(row, ref);
  for (int wait : waits) append(row, static_cast<uint64_t>(wait));
  if (!code.matrices.empty()) append(row, code.stream);
  for (const MatrixRow& matrix : code.matrices) append(row, matrix);
  pad(row, kAccessBytes);
  head.bytes = count(row);
  std::memcpy(row.data(), &head, sizeof(head));
  rotation_ = (rotation_ + code.num_small_workers) % context_.schedule.target.num_workers;
  require(phases_.back().head.size() + row.size() <= kMaxRowBytes, context_.node(job.body.front()),
          "its operands need " + str(static_cast<int64_t>(row.size())) + " bytes, a row of the table has " +
              str(kMaxRowBytes) + ": split the expression");
  phases_.back().jobs.push_back(std::move(row));
}

Table TableWriter::finish() {
  Table table;
  table.row_bytes = static_cast<int64_t>(choose_row_bytes());
  for (const PhaseJobs& phase : phases_) append_rows(table, phase);
  append_outputs(table);
  return table;
}

// As short as possible while phases take as few rows as they can. The last phase, which runs once, does not count.
size_t TableWriter::choose_row_bytes() const {
  size_t most = 0;
  for (const PhaseJobs& phase : phases_) {
    const bool is_last = &phase == &phases_.back();
    most = std::max(most, is_last ? phase.largest() : std::min<size_t>(phase.bytes(), kMaxRowBytes));
  }
  return most;
}

// Writes a phase's rows, as few as hold its jobs.
void TableWriter::append_rows(Table& table, const PhaseJobs& phase) const {
  const size_t row_bytes = static_cast<size_t>(table.row_bytes);
  Bytes row = phase.head;
  PhaseRow head;
  std::memcpy(&head, row.data(), sizeof(head));
  const auto end_row = [&](bool last) {
    head.last = last;
    std::memcpy(row.data(), &head, sizeof(head));
    row.resize(row_bytes);
    table.bytes.insert(table.bytes.end(), row.begin(), row.end());
    table.num_rows++;
  };
  for (const Bytes& job : phase.jobs) {
    if (row.size() + job.size() > row_bytes) {
      end_row(false);
      head = {0, 0, 0, head.signal};
      row.clear();
      append(row, head);
    }
    row.insert(row.end(), job.begin(), job.end());
    head.num_jobs++;
  }
  end_row(true);
}

void TableWriter::append_outputs(Table& table) const {
  table.outputs_offset = static_cast<int64_t>(table.bytes.size());
  std::set<int> seen;
  for (const Node& node : context_.graph().nodes())
    for (const Operand& operand : node.operands) {
      const Buffer& buffer = context_.graph().buffers()[operand.tensor.buffer];
      const DType dtype = operand.tensor.dtype;
      if (!operand.is_write || buffer.kind != BufferKind::kOutput || !is_float(dtype) ||
          !seen.insert(operand.tensor.buffer).second)
        continue;
      append(table.bytes,
             OutputRow{static_cast<uint64_t>(buffer.bytes), static_cast<uint32_t>(context_.num_inputs + buffer.index),
                       static_cast<uint32_t>(size_bytes(dtype)), nan_bits(dtype)});
      table.num_output_rows++;
    }
}

}  // namespace mpk::codegen
