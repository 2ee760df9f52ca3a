// How attention over pages is cut into pieces.
#include "../planner.h"
#include "attention.h"

namespace mpk {
namespace {

class PagedAttentionPlanner : public Planner {
  void cut(const Schedule& schedule, Job& job) const override {
    const Node& node = schedule.graph.nodes()[job.body.front()];
    const Tensor &q = node.operand("q").tensor, &pages = node.operand("k_pages").tensor;
    const int64_t in_page = pages.shape[1], positions = node.operand("block_table").tensor.shape[1] * in_page;
    const AttentionSizes sizes{q.shape[0], q.shape[1], pages.shape[2], q.shape[2], q.dtype, positions, in_page};
    if (!sizes.are_possible()) return;
    const bool several = 2 * sizes.batch * sizes.units() > schedule.target.num_workers && sizes.batch > 1;
    cut_attention(schedule, job, sizes, several);
  }
};

const PagedAttentionPlanner kPlanner{};
[[maybe_unused]] const bool kRegistered = planners().add("paged_attention", kPlanner);

}  // namespace
}  // namespace mpk
