// The table that a kernel reads: rows for each phase (see torch_mpk/abi/table.h), then descriptions of its outputs.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "context.h"
#include "job_code.h"

namespace mpk::codegen {

struct Table {
  std::vector<uint8_t> bytes;
  int64_t row_bytes = 0, outputs_offset = 0;
  int num_rows = 0, num_output_rows = 0;
};

// Adds phases and their jobs in order.
class TableWriter {
 public:
  explicit TableWriter(const KernelContext& context);

  void begin_phase(int phase);
  void add_job(const Job& job, const JobCode& code, uint32_t variant);
  Table finish();

 private:
  // A phase's part of the table, before it is cut into rows.
  struct PhaseJobs {
    std::vector<uint8_t> head;  // PhaseRow and waits
    std::vector<std::vector<uint8_t>> jobs;

    size_t bytes() const;
    size_t largest() const;
  };

  size_t choose_row_bytes() const;
  void append_rows(Table& table, const PhaseJobs& phase) const;
  void append_outputs(Table& table) const;

  const KernelContext& context_;
  std::map<int, uint32_t> signals_;  // per phase, see Signal
  std::vector<PhaseJobs> phases_;
  uint32_t rotation_ = 0;  // of the phase's next job
};

}  // namespace mpk::codegen
