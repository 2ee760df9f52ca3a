// Cuts attention into splits of the cache.
#include "split_kv.h"

#include <algorithm>
#include <bit>

#include "../../schedule/refusals.h"
#include "../../schedule/staging.h"
#include "../tiles_of_row.h"
#include "scores.h"
#include "torch_mpk/abi/partition.h"
#include "torch_mpk/abi/sizes.h"

namespace mpk {
namespace {

// Heads that share a key head are computed together, as far as registers hold them, but at most `most`.
int64_t heads_at_a_time(int64_t shared, int64_t size, int64_t most) {
  most = std::min<int64_t>(most, size <= 128 ? 8 : 2);
  int64_t passes = 1;
  while (shared % passes != 0 || shared / passes > most) passes++;
  return shared / passes;
}

// An upper bound: rows of q and of the new position, a tile's weights of each warp, sums, and `combined` bytes of
// results that are merged at a time.
int64_t staged_bytes(const AttentionSizes& sizes, int64_t warps, int64_t combined) {
  constexpr int64_t kFewestRows = 8;  // positions of a tile
  const int64_t together = sizes.together(), size = sizes.size, element = size_bytes(sizes.dtype);
  const int64_t rows = (round_up(together, 4) + 2) * (sizes.widest() + 32) * element;
  const auto padded = std::bit_ceil(static_cast<uint64_t>(std::max(together, 32 / kFewestRows)));
  const int64_t weights = (std::max<int64_t>(sizes.tile(), kWarpRows) + 1) * static_cast<int64_t>(padded) * 4;
  return rows + warps * weights + together * size * 4 + combined;
}

// Where splits do not overlap, a warp stages each head, and two the key and the value of a new position.
constexpr int64_t kWarpsOfNew = 2;
constexpr int64_t kCombined = 24 * 1024;  // bytes of results that are merged at a time, or of one

}  // namespace

int64_t AttentionSizes::together() const { return heads_at_a_time(heads / groups, widest(), most_together); }

// As many positions as are computed together. For overlapping splits twice as many, if keys and values of 16-bit
// elements still fit an entry: then bytes in flight decide, and half-filled slots hold half.
int64_t AttentionSizes::tile() const {
  const int64_t row_bytes = widest() * size_bytes(dtype), tile = kv_tile(static_cast<int>(row_bytes));
  const bool fits =
      size_bytes(dtype) == 2 && size == value_size && 2 * 2 * tile * row_bytes <= kMinSlotBytes && tile == kWarpRows;
  return overlap && fits && of_page % (2 * tile) == 0 ? 2 * tile : tile;
}

// A row's bits do not depend on the other rows of the same kernel. Where workers have several splits, these are long
// enough to be worth staging, and short enough to share out rows of any lengths evenly: with 16, 32 and 64 rows of 128
// to 1,280 positions, the busiest worker has about 28, 11 and 7 % more to do than the mean. Otherwise each worker has
// one split if rows are long enough, and none has a second one before rows have some kUsual positions, since staging
// another split takes as long as about 20 tiles.
int64_t AttentionSizes::few_splits(int64_t workers) const {
  return overlap ? 1 : std::max<int64_t>(workers / (batch * units()), 1);
}

int64_t AttentionSizes::max_split_tiles(int64_t workers) const {
  constexpr int64_t kUsual = 2048, kFewest = kKvSplitTiles, kMost = 64, kOfSeveral = 640;
  constexpr int64_t kMostBytes = 64 << 20;  // of all splits' results in the workspace
  const int64_t units_of_rows = batch * units();
  const auto usual =
      static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(kUsual / tile() * units_of_rows / workers)));
  int64_t tiles = overlap ? kOfSeveral / tile() : std::clamp(usual, kFewest, kMost);
  const auto of_row = [&] { return kv_count(static_cast<uint32_t>(row_tiles()), static_cast<uint32_t>(tiles)); };
  while (of_row() > 1 && units_of_rows * of_row() * together() * result_bytes() > kMostBytes) tiles *= 2;
  return tiles;
}

std::optional<std::string> SplitKvKernel::refuses_node(const Node& node, const Target&) const {
  const Operand& q = node.operand("q");
  const AttentionSizes sizes = sizes_of(node);
  if (auto why = refuses_row_dtype(q)) return why;
  if (!sizes.are_possible())
    return std::to_string(sizes.heads) + " heads are no multiple of " + std::to_string(sizes.groups) + " groups";
  for (const int64_t size : {sizes.size, sizes.value_size})
    if (size % 8 != 0 || size < 8 || size > 256)
      return "the head size must be a multiple of 8 up to 256, got " + std::to_string(size);
  if (sizes.row_positions < 1 || sizes.row_positions >= int64_t{1} << 31)
    return "a cache of " + std::to_string(sizes.row_positions) + " positions is not supported";
  if ((node.find("k_new") == nullptr) != (node.find("v_new") == nullptr)) return "k_new and v_new go together";
  const auto [keys, values] = caches_of(node);
  for (const Operand* operand : {keys, values})
    if (!can_be_streamed(operand->tensor))
      return "operand " + operand->name +
             " needs offsets and strides that are multiples of 16 bytes, and less than 4 GiB between positions";
  for (const Operand* operand : {&q, node.find("k_new"), node.find("v_new"), keys, values, &node.operands.back()}) {
    if (operand == nullptr) continue;
    if (auto why = refuses_dtype(*operand, q.tensor.dtype)) return why;
    if (auto why = refuses_inner_stride(*operand)) return why;
  }
  if (auto why = codegen::refuses_scores(node)) return why;
  return refuses_own(node);
}

std::vector<Cut> SplitKvKernel::candidates(const Schedule& schedule, const Job& job) const {
  AttentionSizes sizes = sizes_of(schedule.graph.nodes()[job.body.front()]);
  const int64_t workers = schedule.target.num_workers, warps = schedule.warps.consumers;
  const int64_t tile_warps = warps - kProducerWarps, sums = (sizes.value_size + 4) * 4;
  const auto overlapped = [&] {
    const int64_t combined = tile_warps * sizes.together() * sums;
    return 2 * round_up(staged_bytes(sizes, tile_warps, combined), kSharedAlignment);
  };
  const auto choose_overlap = [&] {
    sizes.overlap = has_several(sizes, workers);
    sizes.overlap &= overlapped() <= schedule.target.smem_bytes / 2;
  };
  choose_overlap();
  if (!sizes.overlap) {
    sizes.most_together = warps - kWarpsOfNew;
    choose_overlap();
  }
  const int64_t batch = sizes.batch, together = sizes.together(), units = sizes.units();
  SplitKvFields own;
  own.overlaps = sizes.overlap;
  own.positions = sizes.tile();
  if (batch == 1) {
    own.splits = kv_max_splits(static_cast<uint32_t>(units), static_cast<uint32_t>(workers));
  } else {
    own.few_splits = sizes.few_splits(workers);
    own.split_tiles = sizes.max_split_tiles(workers);
    own.splits = batch * units *
                 kv_own_count(static_cast<uint32_t>(sizes.row_tiles()), static_cast<uint32_t>(own.few_splits),
                              static_cast<uint32_t>(own.split_tiles));
  }
  own.heads = together;
  own.few_heads = together % 2 == 0 ? 2 : 1;
  own.result_bytes = sizes.result_bytes();
  Cut cut = job.cut;
  cut.staged_bytes = sizes.overlap ? overlapped() : staged_bytes(sizes, warps, std::max(kCombined, warps * sums));
  if (cut.staged_bytes > room(schedule)) return {};
  cut.scratch = Scratch{own.scratch_bytes()};
  cut.fields = list_fields(own);
  cut.cost_ns = memory_ns(schedule, job);
  return {cut};
}

bool SplitKvKernel::ends_with_tiles(const Schedule& schedule, const Job& job) const {
  return ends_with_tiles_of_rows(schedule, job);
}

void SplitKvKernel::prove(const CutProof& proof) const {
  const auto own = fields_of<SplitKvFields>(proof.cut());
  const auto str = [](int64_t v) { return std::to_string(v); };
  const Tensor& y = output(proof.first()).tensor;
  const int64_t consumers = proof.schedule().warps.consumers;
  proof.require(std::min({own.heads, own.few_heads, own.few_splits, own.result_bytes, own.splits}) > 0,
                "a size of its splits is not positive");
  proof.require(own.result_bytes % kAccessBytes == 0, "results of splits are not aligned to 16 bytes");
  proof.require_scratch(own.scratch_bytes());
  const int64_t widest = std::max(y.shape.back(), proof.first().operand("q").tensor.shape.back());
  const int64_t bytes = own.positions * widest * size_bytes(y.dtype);
  const bool are_taken = own.positions >= 1 && own.positions <= 32 && 32 % own.positions == 0;
  proof.require(are_taken && bytes <= kMinSlotBytes && (own.positions <= kWarpRows || 2 * bytes <= kMinSlotBytes),
                "tiles of " + str(own.positions) + " positions are none that a warp takes from a slot");
  const int64_t rows = y.numel() / std::max<int64_t>(y.shape.back(), 1), units = rows / own.heads;
  proof.require(rows % own.heads == 0 && own.heads % own.few_heads == 0,
                "splits of " + str(own.heads) + " heads do not make " + str(rows));
  const int64_t staged = own.overlaps ? own.few_heads : own.heads;
  proof.require(
      staged + kWarpsOfNew <= consumers,
      "a split of " + str(staged) + " heads, a key and a value need a warp each, but there are " + str(consumers));
  proof.require(!own.overlaps || consumers > kProducerWarps, "splits overlap, but of " + str(consumers) +
                                                                 " consumers " + str(kProducerWarps) +
                                                                 " are at others' rows and none is left for tiles");
  const auto workers = static_cast<uint32_t>(proof.schedule().target.num_workers);
  proof.require(own.split_tiles > 0 ? own.splits % units == 0
                                    : own.splits >= kv_max_splits(static_cast<uint32_t>(units), workers),
                str(own.splits) + " splits are fewer than lengths at run time may give");
  proof.require_plain_end();
}

}  // namespace mpk
