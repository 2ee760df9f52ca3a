// A row task, with those in front of it.
#include <algorithm>

#include "../chain.h"
#include "../checks.h"
#include "../emitter.h"
#include "../text.h"

namespace mpk::codegen {
namespace {

class RowJob : public Emitter {
  bool takes_companions() const override { return true; }

  JobCode emit(const JobPlace& place) const override {
    const Node& node = place.node();
    JobCode code{"Row", "run_rows", "", "kRowStagedBytes<V>"};
    Refs refs(place.context, code.refs);
    const Tensor& x = node.operands.front().tensor;
    Chain chain = find_chain(place.context, place.job.prologue, node, x);
    chain.tasks.push_back(&node);
    const ChainCode rows =
        emit_chain(place.context, refs, node, chain, {.phase = place.phase, .target = &node.operands.back().tensor});
    const int64_t size = x.shape.back(), row_bytes = size * size_bytes(x.dtype);
    require(place.job.staged_bytes >= row_bytes, node,
            "a row of " + str(row_bytes) + " bytes does not fit shared memory beside the ring");
    code.headers = rows.headers;
    const Schedule& schedule = place.context.schedule;
    const int64_t num_rows = x.numel() / std::max<int64_t>(size, 1);
    const int64_t warps = int64_t(schedule.warps.consumers) * schedule.target.num_workers;
    code.body = "  using T = " + std::string(cuda_type(x.dtype)) + ";\n" + constant("kRows", num_rows) +
                constant("kAtOnce", rows_at_once(row_bytes, num_rows, warps)) + constant("kSize", size) + rows.text;
    return code;
  }
};

const RowJob kEmitter{};
[[maybe_unused]] const bool kRegistered = emitters().add(Role::kRow, kEmitter);

}  // namespace
}  // namespace mpk::codegen
