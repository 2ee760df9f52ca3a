// How attention over pages is cut into pieces.
#include <bit>

#include "../planner.h"
#include "attention.h"
#include "torch_mpk/abi/partition.h"
#include "torch_mpk/abi/sizes.h"

namespace mpk {
namespace {

// Pieces are as long as they are whatever the other rows' lengths, so that a row has the bits that it has beside any
// other rows of the same kernel. With one row a length of its own decides, as in attention. Otherwise they are so long
// that rows of kUsual positions make as many as there are workers, and where there are more rows, long enough to be
// worth bringing what they need, and short enough for rows of any lengths to be shared out evenly.
int64_t piece_tiles(const AttentionSizes& sizes, int64_t tile, int64_t workers) {
  constexpr int64_t kUsual = 1024, kMostBytes = 64 << 20;  // of all results of pieces in the workspace
  if (sizes.batch == 1) return 0;
  const int64_t pieces = sizes.batch * sizes.units();
  const auto equal = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(kUsual / tile * pieces / workers)));
  int64_t tiles = !sizes.overlap ? std::clamp<int64_t>(equal, 8, 32) : pieces > 2 * workers ? 32 : 16;
  const auto bytes = [&] {
    return pieces * ((sizes.row_tiles + tiles - 1) / tiles) * sizes.together() * sizes.result_bytes();
  };
  while (tiles < sizes.row_tiles && bytes() > kMostBytes) tiles *= 2;
  return tiles;
}

class PagedAttentionPlanner : public Planner {
  void cut(const Schedule& schedule, Job& job) const override {
    const Node& node = schedule.graph.nodes()[job.body.front()];
    const Tensor &q = node.operand("q").tensor, &pages = node.operand("k_pages").tensor;
    AttentionSizes sizes{q.shape[0], q.shape[1], pages.shape[2], q.shape[2], q.dtype};
    if (!sizes.are_possible()) return;
    const int64_t workers = schedule.target.num_workers,
                  tile = kv_tile(static_cast<int>(q.shape[2] * size_bytes(q.dtype)));
    sizes.overlap = 2 * sizes.batch * sizes.units() > workers && sizes.batch > 1;
    sizes.row_tiles =
        std::max<int64_t>((node.operand("block_table").tensor.shape[1] * pages.shape[1] + tile - 1) / tile, 1);
    sizes.piece_tiles = piece_tiles(sizes, tile, workers);
    cut_attention(schedule, job, sizes);
  }
};

const PagedAttentionPlanner kPlanner{};
[[maybe_unused]] const bool kRegistered = planners().add("paged_attention", kPlanner);

}  // namespace
}  // namespace mpk
