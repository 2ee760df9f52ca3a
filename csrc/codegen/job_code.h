// The code of jobs, written by kernels (csrc/kernels). A job becomes the body of a struct (its "variant") with
// everything static, and a list of references to memory for its table row. Jobs with equal variants share code. Kernels
// only write down what the schedule decided.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../schedule/kernel.h"
#include "context.h"
#include "torch_mpk/abi/table.h"
#include "torch_mpk/graph/experts.h"
#include "torch_mpk/schedule/schedule.h"

namespace mpk::codegen {

struct JobCode {
  std::string kind;               // the variant's name without its number: "Points"
  std::string compute;            // the consumers' function, called with (c, job)
  std::string load = "";          // the loader's function, for what the table does not say; empty: none
  std::string staged_bytes = "";  // expression of the staged bytes, where <V> stands for the variant; empty: none
  std::string body = "";          // of the variant's struct
  std::vector<std::string> headers = {};
  std::vector<uint64_t> refs = {};
  StreamRow stream = {};  // of `matrices`
  std::vector<MatrixRow> matrices = {};
  bool has_extra = false;          // a result needs operands of its own, which are fetched early
  std::string shared_loop = "";    // variants of a kernel that name the same loop may share code, see Kernel::share
  uint32_t num_small_workers = 0;  // nonzero: so few workers suffice, and the next job may begin with another worker
  bool loads_early = false;        // `load` itself awaits results of the launch, after loads that need none
  bool has_stages = false;         // producer warps stage for the others, see StageBarriers in device/launch.cuh
  ExpertStack experts = {};        // that it chooses from, if `body` has what experts::note_pairs takes
  const Kernel* kernel = nullptr;  // which wrote this; set by emit_job
};

// A job to be written.
struct JobPlace {
  KernelContext& context;
  int phase;
  const Job& job;

  const Node& node() const { return context.node(job.body.front()); }
};

// A variant of the launch's code.
struct Variant {
  uint32_t number;
  std::string name;
  const JobCode& code;
};

// Code that several variants share, instead of a call for each.
struct SharedCode {
  std::vector<uint32_t> variants;  // their numbers
  std::string declarations;        // before the launch's
  std::string compute;             // statements of Kernel::compute, which return if the job has one of these variants
};

// Throws Unsupported naming the node when it cannot be generated.
JobCode emit_job(const JobPlace& place);

}  // namespace mpk::codegen
