// The code of jobs, as kernels (csrc/kernels) write it. A job becomes the body of a struct (its "variant") that holds
// everything static, and the list of references to memory that its row of the table carries; jobs with equal bodies
// share code. Kernels only write down what the schedule decided.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../schedule/kernel.h"
#include "context.h"
#include "torch_mpk/abi/table.h"
#include "torch_mpk/schedule/schedule.h"

namespace mpk::codegen {

struct JobCode {
  std::string kind;               // the variant's name, but for its number: "Points"
  std::string compute;            // the consumers' function, called with (c, job)
  std::string load = "";          // the loader's, for what the table does not say; empty: nothing
  std::string staged_bytes = "";  // expression of the shared memory staged, <V> standing for the variant; empty: none
  std::string body = "";          // of the variant's struct
  std::vector<std::string> headers = {};
  std::vector<uint64_t> refs = {};
  StreamRow stream = {};  // of `matrices`
  std::vector<MatrixRow> matrices = {};
  bool has_extra = false;          // a result needs something besides, which is fetched early
  std::string shared_loop = "";    // variants of one kernel with the same may share code, see Kernel::share
  uint32_t num_small_workers = 0;  // nonzero: so few workers suffice, and the next job may begin with another one
  bool loads_early = false;        // `load` awaits by itself what the launch computes, behind what it can load before
  bool takes_windows = false;      // some warps stage the next of what others compute with, see device/windows.cuh
  const Kernel* kernel = nullptr;  // that wrote this; emit_job says it
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

// Code that several variants share, in place of a call for each.
struct SharedCode {
  std::vector<uint32_t> variants;  // their numbers
  std::string declarations;        // before the launch's
  std::string compute;             // statements of Kernel::compute that return where the job's variant is one of these
};

// Throws Unsupported naming the node when it cannot be generated.
JobCode emit_job(const JobPlace& place);

}  // namespace mpk::codegen
