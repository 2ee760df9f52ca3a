// How attention of many positions is cut into tiles of queries and of keys.
#include "../key_rows.h"
#include "../planner.h"
#include "../query_tiles.h"

namespace mpk {
namespace {

class PrefillAttentionPlanner : public Planner {
  bool needs_warpgroups(const Node& node) const override { return can_be_cut(node); }

  void cut(const Schedule& schedule, Job& job) const override {
    const Node& node = schedule.graph.nodes()[job.body.front()];
    const WarpLayout& warps = schedule.warps;
    if (warps.warpgroups == 0 || !can_be_cut(node)) return;
    const Tensor &q = node.operand("q").tensor, &k = node.operand("k").tensor;
    const int64_t groups = k.shape[1];
    QueryTiles tiles = query_tiles(warps, q.shape[2] / groups, k.shape[3] * size_bytes(k.dtype));
    const auto count = [&](int64_t rows) {
      return q.shape[0] * groups * ((q.shape[1] * tiles.heads + rows - 1) / rows);
    };
    // Smaller tiles, whose warps share the keys, as long as all workers have one at most, and every warp has keys.
    const int64_t most_parts = std::min(kMostParts, (q.shape[1] + tiles.positions - 1) / tiles.positions);
    while (kWarpRows * warps.consumers / tiles.rows * 2 <= most_parts &&
           count(tiles.rows / 2) <= schedule.target.num_workers)
      tiles.rows /= 2;
    if (tiles.rows < kWarpRows * warps.consumers) job.staged_bytes = united_bytes(warps);
    job.queries = tiles;
    job.num_tiles = count(tiles.rows);
  }

 private:
  static constexpr int64_t kMostParts = 4;

  static bool can_be_cut(const Node& node) {
    const Tensor &q = node.operand("q").tensor, &k = node.operand("k").tensor, &v = node.operand("v").tensor;
    return are_equal_groups(q.shape[2], k.shape[1]) && q.shape[3] <= kLargestHead && q.numel() > 0 && key_rows(k) &&
           key_rows(v);
  }
};

const PrefillAttentionPlanner kPlanner{};
[[maybe_unused]] const bool kRegistered = planners().add("prefill_attention", kPlanner);

}  // namespace
}  // namespace mpk
