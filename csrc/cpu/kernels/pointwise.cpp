#include <algorithm>

#include "program.h"

namespace mpk::cpu {
namespace {

// One unit is one block of points.
class Pointwise : public Kernel {
 public:
  Pointwise(const Node& node, const Microkernels& microkernels)
      : runner_(node, microkernels, false), num_points_(node.program->num_points()) {
    num_units_ = (num_points_ + kBlock - 1) / kBlock;
    unit_cost_ = runner_.point_cost() * static_cast<double>(std::min<int64_t>(kBlock, num_points_));
    scratch_bytes_ = runner_.scratch_bytes();
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    runner_.start(frame, scratch);
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t first = unit * kBlock;
      runner_.run_block(frame, first, static_cast<int>(std::min<int64_t>(kBlock, num_points_ - first)), scratch);
    }
  }

 private:
  ProgramRunner runner_;
  int64_t num_points_;
};

[[maybe_unused]] const bool kRegistered = KernelRegistry::global().add(
    "pointwise", [](const Node& n, const Microkernels& k) { return std::make_unique<Pointwise>(n, k); });

}  // namespace
}  // namespace mpk::cpu
