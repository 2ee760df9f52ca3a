// Names of a kernel's jobs and tensors, for people.
#pragma once

#include <string>

#include "context.h"

namespace mpk::codegen {

// A job's nodes with their labels and tensors, each a line of comment.
std::string job_comment(const KernelContext& context, size_t phase, const Job& job);

}  // namespace mpk::codegen
