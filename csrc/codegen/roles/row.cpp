// A row task, with those in front of it, and the pointwise tasks behind it.
#include <algorithm>

#include "../../schedule/access.h"
#include "../chain.h"
#include "../checks.h"
#include "../emitter.h"
#include "../program.h"
#include "../text.h"

namespace mpk::codegen {
namespace {

// Neighbouring elements that a lane takes at a time for the epilogues, of the `lanes` that share a row: as many as one
// access may have, while each has some, and they are neighbours in all programs.
int64_t epilogue_width(const KernelContext& context, const Job& job, const Tensor& y, int64_t lanes) {
  const int64_t size = y.shape.back();
  const auto are_neighbours = [&](int64_t width) {
    return size % width == 0 && std::all_of(job.epilogue.begin(), job.epilogue.end(), [&](int n) {
             const Program& program = *context.node(n).program;
             const std::vector<int64_t> strides = *strides_behind(context.graph(), makers_of(job, n), context.node(n));
             const std::vector<size_t> order = by_falling_stride(program.domain, strides);
             return width == 1 || (!order.empty() && program.domain[order.back()] % width == 0);
           });
  };
  int64_t width = kAccessBytes / size_bytes(y.dtype);
  while (width > 1 && (width * lanes > size || !are_neighbours(width))) width /= 2;
  return width;
}

std::string emit_epilogues(KernelContext& context, Refs& refs, const Job& job, const Tensor& y, int64_t lanes) {
  const int64_t points = y.numel(), size = y.shape.back();
  const Node& row = context.node(job.body.front());
  require(points < (int64_t(1) << 31), row, "more than 2^31 results");
  for (int n : job.epilogue)
    require(strides_behind(context.graph(), makers_of(job, n), context.node(n)).has_value(), context.node(n),
            "it does not follow from the elements of " + row.title() + " one by one");
  const int64_t width = epilogue_width(context, job, y, lanes);
  std::vector<LocalValue> locals{{y.buffer, pattern(y), "elements", y.dtype}};
  std::string fields, common, body = "    const uint32_t point = row * " + str(size) + " + column;\n";
  for (size_t i = 0; i < job.epilogue.size(); i++) {
    const Node& node = context.node(job.epilogue[i]);
    const ProgramCode program =
        emit_program(context, refs, node,
                     {.prefix = "e" + str(static_cast<int64_t>(i)) + "_",
                      .point = "point",
                      .strides = *strides_behind(context.graph(), makers_of(job, node.id), node),
                      .width = width,
                      .common_loads = true,
                      .locals = &locals,
                      .unstored = &job.unstored});
    fields += program.common_fields;
    common += program.common;
    body += program.body;
  }
  return constant("kWidth", width) + common_loads(fields, common) +
         function("void",
                  "finish(const Job& job, uint32_t row, uint32_t column, const Vec<T, kWidth>& elements, "
                  "const Common& common)",
                  body);
}

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
    if (!place.job.epilogue.empty()) code.body += emit_epilogues(place.context, refs, place.job, y, 32 / at_once);
    return code;
  }
};

const RowJob kEmitter{};
[[maybe_unused]] const bool kRegistered = emitters().add(Role::kRow, kEmitter);

}  // namespace
}  // namespace mpk::codegen
