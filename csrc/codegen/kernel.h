// The source of a kernel, from the code of its variants.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "job_code.h"
#include "table.h"
#include "torch_mpk/codegen/cuda.h"

namespace mpk::codegen {

// The variants of a kernel. Jobs with equal text have one number.
class Variants {
 public:
  uint32_t number_of(JobCode code);
  // Adds a comment above the variant of this number.
  void add_comment(uint32_t number, const std::string& text) { comments_[number] += text; }

  const std::vector<JobCode>& codes() const { return codes_; }
  std::string name(size_t number) const { return codes_[number].kind + std::to_string(number); }
  std::string comment(uint32_t number) const {
    const auto found = comments_.find(number);
    return found == comments_.end() ? "" : found->second;
  }

  // The code that kernels let their variants share.
  std::vector<SharedCode> shared() const;

 private:
  std::vector<JobCode> codes_;
  std::map<std::string, uint32_t> numbers_;
  std::map<uint32_t, std::string> comments_;
};

// Offsets in the control block and in the workspace.
struct Offsets {
  int64_t events, tickets, polled, pairs;  // the last: 0 where pairs of experts are not counted
};

std::string kernel_source(const KernelContext& context, const Variants& variants, const Table& table,
                          const Offsets& offsets, const CudaProgram& program);

}  // namespace mpk::codegen
