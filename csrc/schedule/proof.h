// The common parts of the validator: names, the error for an unsound schedule, and the order of phases.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "access.h"
#include "torch_mpk/kernel_api.h"

namespace mpk {

[[noreturn]] inline void unsound(const std::string& what) { throw std::runtime_error("unsound schedule: " + what); }

inline std::string name_node(const Schedule& schedule, int n) {
  const Node& node = schedule.graph.nodes()[n];
  return node.def->name + " (node " + std::to_string(n) + (node.label.empty() ? "" : ", " + node.label) + ")";
}

inline std::string name_buffer(const Schedule& schedule, int b) {
  return "buffer '" + schedule.graph.buffers()[b].name + "'";
}

// The validator's own computation of what passes and code generation get from `happens_before` of access.h.
class Order {
 public:
  // Throws what `validate` throws if a phase waits for one that does not precede it.
  explicit Order(const Schedule& schedule);

  // Whether all of phase a is visible to phase b.
  bool happens_before(int a, int b) const { return before_[a][b]; }
  // Whether all use of one happens before all use of the other, so that they may share bytes.
  bool follow_each_other(const Lifetime& a, const Lifetime& b) const;

 private:
  std::vector<std::vector<bool>> before_;
};

// A job whose cut is to be proven, as kernels see it.
class MPK_KERNEL_API CutProof {
 public:
  CutProof(const Schedule& schedule, const Job& job) : schedule_(schedule), job_(job) {}

  const Schedule& schedule() const { return schedule_; }
  const Job& job() const { return job_; }
  const Cut& cut() const { return job_.cut; }
  const Node& first() const { return schedule_.graph.nodes()[job_.body.front()]; }
  // The row tasks behind the nodes of its body.
  std::vector<const Node*> rows_behind() const;
  // The rows of its first node's result, and the bytes of their elements.
  int64_t rows() const { return output(first()).tensor.shape.front(); }
  int64_t element() const { return size_bytes(output(first()).tensor.dtype); }

  [[noreturn]] void fail(const std::string& what) const { unsound(name_node(schedule_, first().id) + ": " + what); }
  void require(bool holds, const std::string& what) const {
    if (!holds) fail(what);
  }
  // Requires that it has so many bytes of scratch.
  void require_scratch(int64_t bytes) const;
  // Requires that no row tasks end it, and that no norm does, either.
  void require_no_rows_behind() const;
  void require_plain_end() const;
  // Requires that it has no stream and no fields, either, and no scratch but so many bytes.
  void require_nothing_else(int64_t scratch_bytes = 0) const;
  static std::string str(int64_t v) { return std::to_string(v); }

 private:
  const Schedule& schedule_;
  const Job& job_;
};

// Checks that every node runs once, after its operands' makers, and that its result stays until it is read.
void check_order(const Schedule& schedule);

// Checks that tiles cover their jobs and fit the ring, and that every tile is computed once.
void check_cuts(const Schedule& schedule);

// Checks that scratch has places of its own while it is needed.
void check_scratch(const Schedule& schedule);

// Checks exchanges between ranks: each rank pushes before it waits, and no mailbox is overwritten before it has been
// read.
void check_mailboxes(const Schedule& schedule);

// Checks that device code supports the warps and the ring, and that every job leaves room for a ring.
void check_warps(const Schedule& schedule);

}  // namespace mpk
