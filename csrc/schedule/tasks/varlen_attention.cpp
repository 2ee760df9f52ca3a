// How attention of ragged sequences is cut into tiles of queries and of keys.
#include "../planner.h"
#include "../query_tiles.h"

namespace mpk {
namespace {

class VarlenAttentionPlanner : public Planner {
  bool needs_warpgroups(const Node& node) const override { return can_be_cut(node); }

  void cut(const Schedule& schedule, Job& job) const override {
    const Node& node = schedule.graph.nodes()[job.body.front()];
    const WarpLayout& warps = schedule.warps;
    if (warps.warpgroups == 0 || !can_be_cut(node)) return;
    const Tensor &q = node.operand("q").tensor, &k = node.operand("k_cache").tensor;
    QueryTiles tiles = query_tiles(warps, q.shape[1] / k.shape[1], k.shape[2] * size_bytes(k.dtype));
    tiles.ends = node.operand("cu_seq_lens_q").tensor.shape[0];
    job.queries = tiles;
    job.num_tiles = k.shape[1] * tiles.ragged_tiles(q.shape[0]);
    job.staged_bytes = united_bytes(warps);
  }

 private:
  static bool can_be_cut(const Node& node) {
    const Tensor &q = node.operand("q").tensor, &k = node.operand("k_cache").tensor;
    return are_equal_groups(q.shape[1], k.shape[1]) && q.numel() > 0 &&
           (q.shape[2] == kLargestHead || q.shape[2] == kLargestHead / 2) && size_bytes(q.dtype) == 2;
  }
};

const VarlenAttentionPlanner kPlanner{};
[[maybe_unused]] const bool kRegistered = planners().add("varlen_attention", kPlanner);

}  // namespace
}  // namespace mpk
