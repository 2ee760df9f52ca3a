// A program at every point of its domain.
#include <algorithm>

#include "../codegen/job_code.h"
#include "../codegen/program.h"
#include "../codegen/text.h"
#include "../schedule/kernel.h"
#include "../schedule/proof.h"

namespace mpk {
namespace {

using namespace codegen;

// Points of a thread whose loads are in flight together, if it has so many.
constexpr int64_t kAtOnce = 8;

class Points : public Kernel {
 public:
  Points() : Kernel("pointwise") {}

 private:
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    Cut cut = job.cut;
    cut.cost_ns = memory_ns(schedule, job);
    return {cut};
  }

  void prove(const CutProof& proof) const override { proof.require_nothing_else(); }

  JobCode emit(const JobPlace& place) const override {
    const Node& node = place.node();
    JobCode code{"Points", "run_points"};
    Refs refs(place.context, code.refs);
    const int64_t points = node.program->num_points();
    const Schedule& schedule = place.context.schedule;
    const int64_t threads = 32 * schedule.warps.consumers;  // of a worker
    const int64_t step = threads * schedule.target.num_workers;
    const bool are_many = points >= kAtOnce * step;
    const bool wide = points > (int64_t(1) << 31) - kAtOnce * step - 1;
    const std::string index = wide ? "int64_t" : "int32_t";
    const ProgramCode program = emit_program(
        place.context, refs, node, {.prefix = "", .index_type = index, .point = "point", .early_loads = are_many});
    code.body = "  using Index = " + index + ";\n  static constexpr Index kPoints = " + str(points) + ";\n";
    if (are_many) {
      code.compute = "run_many_points";
      code.body += constant("kAtOnce", kAtOnce) + "  struct Extra {\n" + program.preload_fields + "  };\n" +
                   function("Extra", "preload(const Job& job, Index point)",
                            "    Extra extra{};\n" + program.preload + "    return extra;\n") +
                   function("void", "point(const Job& job, Index point, const Extra& extra)", program.body);
    } else {
      code.body += function("void", "point(const Job& job, Index point)", program.body);
    }
    code.num_small_workers = static_cast<uint32_t>(std::min<int64_t>((points + threads - 1) / threads, 1 << 20));
    return code;
  }
};

const Points kPoints{};
[[maybe_unused]] const bool kRegistered = add_kernel(Role::kPointwise, kPoints);

}  // namespace
}  // namespace mpk
