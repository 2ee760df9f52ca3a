// A program at every point of its domain.
#include <algorithm>

#include "../emitter.h"
#include "../program.h"
#include "../text.h"

namespace mpk::codegen {
namespace {

class PointsJob : public Emitter {
  JobCode emit(const JobPlace& place) const override {
    const Node& node = place.node();
    JobCode code{"Points", "run_points"};
    Refs refs(place.context, code.refs);
    const int64_t points = node.program->num_points();
    const Schedule& schedule = place.context.schedule;
    const int64_t threads = 32 * schedule.warps.consumers;  // of a worker
    const bool wide = points > (int64_t(1) << 31) - threads * schedule.target.num_workers - 1;
    const std::string index = wide ? "int64_t" : "int32_t";
    const ProgramCode program =
        emit_program(place.context, refs, node, {.prefix = "", .index_type = index, .point = "point"});
    code.body = "  using Index = " + index + ";\n  static constexpr Index kPoints = " + str(points) + ";\n" +
                function("void", "point(const Job& job, Index point)", program.body);
    code.num_small_workers = static_cast<uint32_t>(std::min<int64_t>((points + threads - 1) / threads, 1 << 20));
    return code;
  }
};

const PointsJob kEmitter{};
[[maybe_unused]] const bool kRegistered = emitters().add(Role::kPointwise, kEmitter);

}  // namespace
}  // namespace mpk::codegen
