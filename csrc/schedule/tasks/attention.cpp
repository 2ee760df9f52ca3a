// How attention is cut into pieces of the cache.
#include "attention.h"

#include <algorithm>
#include <bit>

#include "../planner.h"
#include "../staging.h"
#include "torch_mpk/abi/partition.h"
#include "torch_mpk/abi/sizes.h"

namespace mpk {
namespace {

// Heads that share a key head are worked on together, as far as registers hold them.
int64_t heads_at_a_time(int64_t shared, int64_t size) {
  const int64_t most = size <= 128 ? 8 : 2;
  int64_t passes = 1;
  while (shared % passes != 0 || shared / passes > most) passes++;
  return shared / passes;
}

// At most: rows of q and of the new position, a tile's weights of each warp, sums, and results to be put together, of
// which `combined` bytes are at hand.
int64_t staged_bytes(const AttentionSizes& sizes, int64_t warps, int64_t combined) {
  constexpr int64_t kFewestRows = 8;  // positions of a tile
  const int64_t together = sizes.together(), size = sizes.size, element = size_bytes(sizes.dtype);
  const int64_t rows = (round_up(together, 4) + 2) * (size + 32) * element;
  const auto padded = std::bit_ceil(static_cast<uint64_t>(std::max(together, 32 / kFewestRows)));
  const int64_t weights = (std::max<int64_t>(sizes.tile(), kWarpRows) + 1) * static_cast<int64_t>(padded) * 4;
  return rows + warps * weights + together * size * 4 + combined;
}

constexpr int64_t kCombined = 24 * 1024;  // bytes of results that are put together at a time, or of one

class AttentionPlanner : public Planner {
  void cut(const Schedule& schedule, Job& job) const override {
    const Node& node = schedule.graph.nodes()[job.body.front()];
    const Tensor &q = node.operand("q").tensor, &cache = node.operand("k_cache").tensor;
    const int64_t positions = cache.shape[2];
    const AttentionSizes sizes{q.shape[0], q.shape[1], cache.shape[1], q.shape[2], q.dtype, positions, 0};
    if (!sizes.are_possible()) return;
    cut_attention(schedule, job, sizes, sizes.batch * sizes.units() > schedule.target.num_workers);
  }
};

const AttentionPlanner kPlanner{};
[[maybe_unused]] const bool kRegistered = planners().add("attention", kPlanner);

}  // namespace

int64_t AttentionSizes::together() const { return heads_at_a_time(heads / groups, size); }

// What is computed together, or, of pieces that overlap, twice as much, if keys and values of 16-bit elements still fit
// an entry: then bytes in flight decide, of which half-filled slots hold half.
int64_t AttentionSizes::tile() const {
  const int64_t row_bytes = size * size_bytes(dtype), tile = kv_tile(static_cast<int>(row_bytes));
  const bool fits = size_bytes(dtype) == 2 && 2 * 2 * tile * row_bytes <= kMinSlotBytes && tile == kWarpRows;
  return overlap && fits && of_page % (2 * tile) == 0 ? 2 * tile : tile;
}

// So a row has the bits that it has beside any other rows of the same kernel. Where workers have several pieces, these
// are long enough to be worth bringing what they need, and short enough for rows of any lengths to be shared out
// evenly: of 16, 32 and 64 rows with 128 to 1,280 positions the busiest worker has some 28, 11 and 7 % more to do than
// the mean. Otherwise all workers have a piece as far as rows are long enough, and none has another one until rows have
// some kUsual positions: to bring what a second one needs takes as long as some 20 tiles.
int64_t AttentionSizes::few_pieces(int64_t workers) const {
  return overlap ? 1 : std::max<int64_t>(workers / (batch * units()), 1);
}

int64_t AttentionSizes::most_piece_tiles(int64_t workers) const {
  constexpr int64_t kUsual = 2048, kFewest = kKvPieceTiles, kMost = 64, kOfSeveral = 640;
  constexpr int64_t kMostBytes = 64 << 20;  // of all results of pieces in the workspace
  const int64_t pieces = batch * units();
  const auto usual = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(kUsual / tile() * pieces / workers)));
  int64_t tiles = overlap ? kOfSeveral / tile() : std::clamp(usual, kFewest, kMost);
  const auto of_row = [&] { return kv_count(static_cast<uint32_t>(row_tiles()), static_cast<uint32_t>(tiles)); };
  while (of_row() > 1 && pieces * of_row() * together() * result_bytes() > kMostBytes) tiles *= 2;
  return tiles;
}

void cut_attention(const Schedule& schedule, Job& job, AttentionSizes sizes, bool several) {
  const int64_t batch = sizes.batch, together = sizes.together(), units = sizes.units();
  const int64_t warps = schedule.warps.consumers, tile_warps = warps - kBringingWarps, sums = (sizes.size + 4) * 4;
  sizes.overlap = several;
  const int64_t overlapped =
      2 * round_up(staged_bytes(sizes, tile_warps, tile_warps * together * sums), kSharedAlignment);
  sizes.overlap &= overlapped <= schedule.target.smem_bytes / 2;
  Pieces pieces;
  pieces.overlap = sizes.overlap;
  pieces.positions = sizes.tile();
  if (batch == 1) {
    pieces.count = kv_max_pieces(static_cast<uint32_t>(units), static_cast<uint32_t>(schedule.target.num_workers));
  } else {
    pieces.few_of_row = sizes.few_pieces(schedule.target.num_workers);
    pieces.tiles = sizes.most_piece_tiles(schedule.target.num_workers);
    pieces.count = batch * units *
                   kv_own_count(static_cast<uint32_t>(sizes.row_tiles()), static_cast<uint32_t>(pieces.few_of_row),
                                static_cast<uint32_t>(pieces.tiles));
  }
  pieces.results = together;
  pieces.few_results = together % 2 == 0 ? 2 : 1;
  pieces.result_bytes = sizes.result_bytes();
  const int64_t bytes = pieces.overlap ? overlapped : staged_bytes(sizes, warps, std::max(kCombined, warps * sums));
  if (bytes > room(schedule)) return;
  job.staged_bytes = bytes;
  job.pieces = pieces;
}

}  // namespace mpk
