// A row task alone.
#include <algorithm>

#include "../chain.h"
#include "../checks.h"
#include "../emitter.h"
#include "../text.h"

namespace mpk::codegen {
namespace {

class RowJob : public Emitter {
  JobCode emit(const JobPlace& place) const override {
    const Node& node = place.node();
    JobCode code{"Row", "run_rows", "", "kRowStagedBytes<V>"};
    Refs refs(place.context, code.refs);
    const Tensor& x = node.operands.front().tensor;
    const ChainCode rows = emit_chain(place.context, refs, node, {{&node}, &x},
                                      {.phase = place.phase, .target = &node.operands.back().tensor});
    const int64_t size = x.shape.back(), row_bytes = size * size_bytes(x.dtype);
    require(place.job.staged_bytes >= row_bytes, node,
            "a row of " + str(row_bytes) + " bytes does not fit shared memory beside the ring");
    code.headers = rows.headers;
    code.body = "  using T = " + std::string(cuda_type(x.dtype)) + ";\n" +
                constant("kRows", x.numel() / std::max<int64_t>(size, 1)) + constant("kSize", size) + rows.text;
    return code;
  }
};

const RowJob kEmitter{};
[[maybe_unused]] const bool kRegistered = emitters().add(Role::kRow, kEmitter);

}  // namespace
}  // namespace mpk::codegen
