// What kernels of quantised weights share: the format of a job, and the places of what belongs to blocks of weights.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../../codegen/context.h"
#include "torch_mpk/graph/weight_format.h"

namespace mpk {

// The format of all of a job's weights.
inline WeightFormat format_of(const Schedule& schedule, const Job& job) {
  return WeightFormat::of(schedule.graph.nodes()[job.body.front()]);
}

// The operands that a weight is made of.
extern const std::vector<std::string> kOfWeight;

// Why no kernel takes the job's weights together.
std::optional<std::string> refuses_weights(const Schedule& schedule, const Job& job);

// Members that say where an operand is that has a value for each block, of each of the job's nodes.
std::string write_blocks(const codegen::KernelContext& context, codegen::Refs& refs, const Job& job,
                         const char* operand, const std::string& type, const std::string& name);
// Members for the tables in which single columns, numbers and scales are looked up.
std::string write_tables(const codegen::KernelContext& context, codegen::Refs& refs, const Job& job);
// A member that says how many rows a block has.
std::string write_block_rows(const codegen::KernelContext& context, const Job& job);

}  // namespace mpk
