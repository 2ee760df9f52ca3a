// Schedule: which nodes run together, in which order, where their intermediates live. Decided at compile time by a pure
// function of (TBGraph, Target) and proven by `validate` before anything is built.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "torch_mpk/graph/tb_graph.h"

namespace mpk {

struct Target {
  std::string device;      // "cuda" or "cpu"
  int arch = 0;            // 90 for sm_90a, 80 for sm_80; 0 on the CPU
  int num_workers = 1;     // multiprocessors, or CPU threads
  int64_t smem_bytes = 0;  // shared memory one CTA may use; 0 on the CPU
  bool fuse = true;        // false: every node is a job of its own (the CPU; the oracle of every fusion)
  bool polled = false;     // small vectors are polled instead of awaited by their maker's event (see Schedule::polled)
};

enum class Assignment : uint8_t { kStatic, kClaimed };

// Nodes that one worker executes back to back on its share of the tiles.
struct Job {
  std::vector<int> prologue;  // row tasks recomputed by every worker; their results stay in shared memory
  std::vector<int> body;      // one node, or several linears of one input (their rows form one space)
  std::vector<int> epilogue;  // pointwise tasks on the body's output elements, inlined
  int64_t num_tiles = 1;
  Assignment assignment = Assignment::kStatic;
  std::vector<int> loader_waits;  // phases whose event the loader awaits before it loads for this job; usually none
  std::vector<int> unstored;      // buffers that exist only inside this job: never written to memory
};

// A phase begins when the events it waits for are complete: every worker has then finished those phases and all before
// them. A phase that waits for none begins when its polled operands arrive.
struct Phase {
  std::vector<Job> jobs;  // mutually independent
  std::vector<int> waits;
};

struct Schedule {
  TBGraph graph;
  Target target;
  std::vector<Phase> phases;               // event i belongs to phase i and expects `num_workers` signals
  std::vector<int64_t> workspace_offsets;  // per buffer, bytes; -1 for inputs, outputs and unstored buffers
  int64_t workspace_bytes = 0, polled_bytes = 0;
  // Per buffer: readers poll its elements themselves, so that no worker waits for the slowest one's fence. Polled
  // buffers share no bytes: they stand in a workspace of their own, of polled_bytes, in which a launch finds every
  // element absent and writes it once.
  std::vector<bool> polled;

  std::string to_json() const;
};

Schedule make_schedule(const TBGraph& graph, const Target& target);

// Throws std::runtime_error naming phase, node and buffer when a schedule is unsound: a node missing or run twice, a
// cyclic or forward wait, a last phase (where counters advance) that does not wait for the one before it, a read that
// no write happens before (nor is it polled), a write that does not happen after an earlier read or write of the
// same bytes, jobs of one phase that depend on each other, or workspace reused while it is still needed.
void validate(const Schedule& schedule);

}  // namespace mpk
