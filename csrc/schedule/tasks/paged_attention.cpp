// How attention over pages is cut into pieces.
#include "../planner.h"
#include "attention.h"

namespace mpk {
namespace {

class PagedAttentionPlanner : public Planner {
  void cut(const Schedule& schedule, Job& job) const override {
    const Node& node = schedule.graph.nodes()[job.body.front()];
    const Tensor &q = node.operand("q").tensor, &pages = node.operand("k_pages").tensor;
    AttentionSizes sizes{q.shape[0], q.shape[1], pages.shape[2], q.shape[2], q.dtype};
    if (!sizes.are_possible()) return;
    const int64_t workers = schedule.target.num_workers;
    sizes.overlap = 2 * sizes.batch * sizes.units() > workers && sizes.batch > 1;
    sizes.row_tiles = sizes.tiles(node.operand("block_table").tensor.shape[1] * pages.shape[1]);
    cut_attention(schedule, job, sizes);
  }
};

const PagedAttentionPlanner kPlanner{};
[[maybe_unused]] const bool kRegistered = planners().add("paged_attention", kPlanner);

}  // namespace
}  // namespace mpk
