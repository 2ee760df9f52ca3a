#include <algorithm>

#include "proof.h"
#include "staging.h"
#include "torch_mpk/abi/partition.h"
#include "torch_mpk/abi/sizes.h"

namespace mpk {
namespace {

// Bytes of the workspace, and the phases in which somebody needs what stands there.
struct Use {
  std::string what;
  int64_t begin, end;
  Lifetime lifetime;
};

std::vector<Use> uses_of_buffers(const Schedule& s, const std::vector<Lifetime>& lifetimes) {
  std::vector<Use> uses;
  for (size_t b = 0; b < lifetimes.size(); b++) {
    if (!lifetimes[b].used() || s.polled[b]) continue;
    const int64_t begin = s.workspace_offsets[b];
    uses.push_back({name_buffer(s, static_cast<int>(b)), begin, begin + s.graph.buffers()[b].bytes, lifetimes[b]});
  }
  return uses;
}

// Every row of the job's results has its pieces, and every piece a worker and a place.
void check_counts(const Schedule& s, const Job& job, const Pieces& pieces) {
  const Node& node = s.graph.nodes()[job.body.front()];
  const Tensor& y = output(node).tensor;
  const auto require = [&](bool holds, const std::string& what) {
    if (!holds) unsound(name_node(s, node.id) + ": " + what);
  };
  if (job.shape && job.shape->x_rows > 0) {
    const int64_t others = job.num_tiles * (job.shape->split - 1);
    // A thread has sums of all rows that warpgroups multiply, also where x has fewer.
    const int64_t bytes = kTileXRows * job.shape->tile_rows * job.shape->parts * kTaggedFloatBytes;
    require(pieces.count == others && pieces.results == 1 && pieces.result_bytes == bytes,
            std::to_string(pieces.count) + " pieces of " + std::to_string(pieces.result_bytes) + " bytes are not the " +
                std::to_string(others) + " parts of its tiles, of " + std::to_string(bytes));
    return;
  }
  const bool is_positive =
      std::min({pieces.count, pieces.results, pieces.few_results, pieces.few_of_row, pieces.result_bytes}) > 0;
  require(is_positive && pieces.of_row >= 0, "a size of its pieces is not positive");
  require(pieces.offset % kAccessBytes == 0 && pieces.result_bytes % kAccessBytes == 0,
          "results of pieces are not aligned to 16 bytes");
  const int64_t workers = s.target.num_workers;
  const std::string count = std::to_string(pieces.count) + " pieces";
  if (job.shape && job.shape->split > 1) {  // sums of the workers that share tiles
    const int64_t split = job.shape->split, rows = output(node).tensor.shape[0];
    require(pieces.of_row == split && pieces.count == workers / split * split,
            count + ", " + std::to_string(pieces.of_row) + " of the same tiles, are not those of " +
                std::to_string(workers) + " workers");
    require(pieces.result_bytes >= job.shape->pass_tiles * job.shape->tile_rows * rows * kTaggedFloatBytes,
            "a worker's sums of " + std::to_string(rows) + " rows do not fit " + std::to_string(pieces.result_bytes) +
                " bytes");
    return;
  }
  if (pieces.of_row > 0) {  // a worker has one
    const int64_t rows = node.program ? node.program->num_points() / node.program->domain.back() : y.numel();
    require(pieces.count == rows * pieces.of_row, count + ", " + std::to_string(pieces.of_row) + " of a row, are not " +
                                                      "those of " + std::to_string(rows) + " rows");
    require(pieces.count <= workers, count + " are more than " + std::to_string(workers) + " workers");
    return;
  }
  const int64_t bytes = pieces.positions * y.shape.back() * size_bytes(y.dtype);
  const bool are_taken = pieces.positions >= 1 && pieces.positions <= 32 && 32 % pieces.positions == 0;
  require(are_taken && bytes <= kMinSlotBytes && (pieces.positions <= kWarpRows || 2 * bytes <= kMinSlotBytes),
          "tiles of " + std::to_string(pieces.positions) + " positions are none that a warp takes from a slot");
  const int64_t rows = y.numel() / std::max<int64_t>(y.shape.back(), 1), units = rows / pieces.results;
  require(rows % pieces.results == 0 && pieces.results % pieces.few_results == 0,
          "pieces of " + std::to_string(pieces.results) + " results do not make " + std::to_string(rows));
  require(pieces.results + 2 <= s.warps.consumers, "a piece of " + std::to_string(pieces.results) +
                                                       " results, a key and a value need a warp each, but there are " +
                                                       std::to_string(s.warps.consumers));
  require(!pieces.overlap || s.warps.consumers > kBringingWarps,
          "pieces overlap, but of " + std::to_string(s.warps.consumers) + " consumers " +
              std::to_string(kBringingWarps) + " are at others' rows and none is left for tiles");
  require(pieces.tiles > 0
              ? pieces.count % units == 0 && pieces.count > 0
              : pieces.count >= kv_max_pieces(static_cast<uint32_t>(units), static_cast<uint32_t>(workers)),
          count + " are fewer than lengths at run time may give");
}

// Every worker that makes some of a row has a place for the sums of it.
void check_row_sums(const Schedule& s, const Job& job) {
  const std::string name = "the sums of rows of " + name_node(s, job.body.front());
  const int norm = norm_of(job);
  if (norm < 0 || !s.graph.nodes()[norm].def->scales_rows || !job.shape || job.shape->pass_tiles < 1)
    unsound(name + " are of no norm");
  const TileShape& shape = *job.shape;
  const int64_t groups = s.target.num_workers / shape.split,
                passes = divide_up(job.num_tiles, groups * shape.pass_tiles);
  const int64_t count = groups * passes * divide_up(shape.pass_tiles * shape.tile_rows, 32);
  if (job.row_sums->count < count || job.row_sums->offset % kAccessBytes != 0)
    unsound(name + " are " + std::to_string(job.row_sums->count) + ", where workers leave " + std::to_string(count));
}

}  // namespace

void check_pieces(const Schedule& s) {
  const Order order(s);
  const std::vector<Lifetime> lifetimes = buffer_lifetimes(s);
  std::vector<Use> uses = uses_of_buffers(s, lifetimes);
  const auto add = [&](const std::string& what, int64_t offset, int64_t bytes, Lifetime lifetime) {
    const Use use{what, offset, offset + bytes, lifetime};
    if (use.begin < 0 || use.end > s.workspace_bytes) unsound(what + " lie outside the workspace");
    for (const Use& other : uses)
      if (use.begin < other.end && other.begin < use.end && !order.follow_each_other(use.lifetime, other.lifetime))
        unsound(what + " and " + other.what + " share workspace while both are needed");
    uses.push_back(use);
  };
  for (int p = 0; p < static_cast<int>(s.phases.size()); p++)
    for (const Job& job : s.phases[p].jobs) {
      const std::string name = name_node(s, job.body.front());
      if (job.pieces) {
        check_counts(s, job, *job.pieces);
        add("the pieces of " + name, job.pieces->offset, job.pieces->bytes(), {p, last_concurrent(s, p)});
      }
      if (job.row_sums) {
        check_row_sums(s, job);
        add("the sums of rows of " + name, job.row_sums->offset, row_sums_bytes(s.graph, job),
            lifetimes[norm_result(s.graph, job).buffer]);
      }
    }
}

}  // namespace mpk
