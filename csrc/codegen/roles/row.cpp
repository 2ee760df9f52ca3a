// A row task, with those in front of it, and the pointwise tasks behind it.
#include <algorithm>

#include "../chain.h"
#include "../checks.h"
#include "../emitter.h"
#include "../row_epilogues.h"
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
    const Tensor& y = node.operands.back().tensor;
    const std::vector<int>& unstored = place.job.unstored;
    const bool is_stored = std::find(unstored.begin(), unstored.end(), y.buffer) == unstored.end();
    const ChainCode rows =
        emit_chain(place.context, refs, node, chain, {.phase = place.phase, .target = is_stored ? &y : nullptr});
    const int64_t size = x.shape.back(), row_bytes = size * size_bytes(x.dtype);
    require(place.job.staged_bytes >= row_bytes, node,
            "a row of " + str(row_bytes) + " bytes does not fit shared memory beside the ring");
    code.headers = rows.headers;
    const Schedule& schedule = place.context.schedule;
    const int64_t num_rows = x.numel() / std::max<int64_t>(size, 1);
    const int64_t warps = int64_t(schedule.warps.consumers) * schedule.target.num_workers;
    const int at_once = rows_at_once(row_bytes, num_rows, warps);
    code.body = "  using T = " + std::string(cuda_type(x.dtype)) + ";\n" + constant("kRows", num_rows) +
                constant("kAtOnce", at_once) + constant("kSize", size) + rows.text;
    if (!place.job.epilogue.empty())
      code.body += emit_row_epilogues(place.context, refs, place.job, place.job.epilogue, y, 32 / at_once);
    return code;
  }
};

const RowJob kEmitter{};
[[maybe_unused]] const bool kRegistered = emitters().add(Role::kRow, kEmitter);

}  // namespace
}  // namespace mpk::codegen
