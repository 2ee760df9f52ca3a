// A row task, with the row tasks in front of it, and the pointwise tasks behind it.
#include <algorithm>

#include "../codegen/chain.h"
#include "../codegen/checks.h"
#include "../codegen/job_code.h"
#include "../codegen/row_epilogues.h"
#include "../codegen/text.h"
#include "../schedule/access.h"
#include "../schedule/kernel.h"
#include "../schedule/proof.h"
#include "../schedule/staging.h"
#include "tiles_of_row.h"
#include "torch_mpk/abi/partition.h"

namespace mpk {
namespace {

using namespace codegen;

// Shared memory: rows for each warp, or one row.
int64_t bytes_of_rows(const Schedule& schedule, const Job& job) {
  const Tensor& x = schedule.graph.nodes()[job.body.front()].operands.front().tensor;
  if (x.numel() == 0 || x.shape.empty()) return 0;
  const int64_t row = round_up(x.shape.back() * size_bytes(x.dtype), 16), warps = schedule.warps.consumers;
  const int64_t at_once = rows_at_once(row, x.numel() / x.shape.back(), warps * schedule.target.num_workers);
  return row <= kLongestWarpRow ? warps * at_once * (row + (at_once > 1 ? kLaneRowPad : 0)) : row;
}

class Rows : public Kernel {
 public:
  Rows() : Kernel("row") {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    return refuses_row_task(node);
  }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    const int64_t bytes = bytes_of_rows(schedule, job);
    if (bytes <= room(schedule)) return std::nullopt;
    return "a row of " + str(bytes) + " bytes does not fit shared memory beside the ring";
  }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    Cut cut = job.cut;
    cut.staged_bytes = bytes_of_rows(schedule, job);
    cut.cost_ns = memory_ns(schedule, job);
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    proof.require(proof.cut().staged_bytes >= bytes_of_rows(proof.schedule(), proof.job()),
                  "its rows do not fit what it stages");
  }

  bool takes_companions() const override { return true; }
  bool ends_with_tiles(const Schedule& schedule, const Job& job) const override {
    return ends_with_tiles_of_rows(schedule, job);
  }

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
    code.headers = rows.headers;
    const Schedule& schedule = place.context.schedule;
    const int64_t num_rows = x.numel() / std::max<int64_t>(size, 1);
    const int64_t warps = int64_t(schedule.warps.consumers) * schedule.target.num_workers;
    const int at_once = rows_at_once(row_bytes, num_rows, warps);
    code.body = "  using T = " + std::string(cuda_type(x.dtype)) + ";\n" + constant("kRows", num_rows) +
                constant("kAtOnce", at_once) + constant("kSize", size) + rows.text;
    const std::vector<int> tiles = tiles_behind(schedule.graph, place.job);
    std::vector<int> points;
    std::ranges::copy_if(place.job.epilogue, std::back_inserter(points), [&](int n) { return !contains(tiles, n); });
    if (!points.empty()) code.body += emit_row_epilogues(place.context, refs, place.job, points, y, 32 / at_once);
    code.body += emit_tiles_of_rows(place, refs, code);
    if (!tiles.empty()) code.compute = "run_rows_of_tiles";
    return code;
  }
};

const Rows kRows{};
[[maybe_unused]] const bool kRegistered = add_kernel(Role::kRow, kRows);

}  // namespace
}  // namespace mpk
