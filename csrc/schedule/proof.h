// What the parts of the validator share: how they name things, how they say that a schedule is unsound, and which
// phases are over when others begin.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "access.h"

namespace mpk {

[[noreturn]] inline void unsound(const std::string& what) { throw std::runtime_error("unsound schedule: " + what); }

inline std::string name_node(const Schedule& schedule, int n) {
  const Node& node = schedule.graph.nodes()[n];
  return node.def->name + " (node " + std::to_string(n) + (node.label.empty() ? "" : ", " + node.label) + ")";
}

inline std::string name_buffer(const Schedule& schedule, int b) {
  return "buffer '" + schedule.graph.buffers()[b].name + "'";
}

// The validator's own reckoning of what passes and code generation ask `happens_before` of access.h.
class Order {
 public:
  // Throws what `validate` does where a phase waits for one that does not precede it.
  explicit Order(const Schedule& schedule);

  // Whether everything of phase a is visible to phase b.
  bool happens_before(int a, int b) const { return before_[a][b]; }
  // Whether all use of one happens before all use of the other: then they may share bytes.
  bool follow_each_other(const Lifetime& a, const Lifetime& b) const;

 private:
  std::vector<std::vector<bool>> before_;
};

// Every node runs once, after what it needs, and its result stays until it is read.
void check_order(const Schedule& schedule);

// Jobs are cut into tiles that cover them and fit the ring, and every tile is taken once.
void check_cuts(const Schedule& schedule);

// The results of pieces have places of their own in the workspace, as long as they are needed.
void check_pieces(const Schedule& schedule);

// Warps and the ring are what device code is written for, and every job's share of shared memory leaves a ring.
void check_warps(const Schedule& schedule);

}  // namespace mpk
