#include "warpgroups.h"

#include <algorithm>
#include <utility>

#include "../../codegen/text.h"
#include "blocks.h"
#include "torch_mpk/abi/sizes.h"

namespace mpk {
namespace {

constexpr int64_t kMostRows = 64;                           // of x
constexpr int64_t kLeastColumns = 256, kMostColumns = 512;  // of a stage of x
constexpr int64_t kWideStageBytes = 16 * 1024;              // the most of a stage that is wider than it must be
constexpr int64_t kMostStageBytes = 96 * 1024;              // of all stages of x
constexpr int64_t kMostSplit = 4;
constexpr int64_t kFewRows = 32;  // of x: more leave no registers for sums of other boxes
constexpr int64_t kMostHeld = 3;  // boxes whose sums a warpgroup has, where they have all parts of a tile

struct WarpgroupsCut : TileShape, WarpgroupsFields {};

int64_t x_rows(int64_t batch) { return round_up(batch, 8); }

class Cutter {
 public:
  Cutter(const Linears& job, const WeightFormat& format, double line_ns, int64_t sum_columns)
      : job_(job), format_(format), line_ns_(line_ns), sum_columns_(sum_columns) {}

  // The fastest over split_k, the height of boxes, and whether parts share them.
  WarpgroupsCut best() const {
    WarpgroupsCut best = cut(kWarpgroupRows, 1);
    const auto consider = [&](const WarpgroupsCut& c) {
      if (can_split(c) && nanoseconds(c) < nanoseconds(best)) best = c;
    };
    for (int64_t split = 1; split <= std::min(kMostSplit, job_.workers); split *= 2)
      for (int64_t rows = kWarpgroupRows; rows > 0; rows -= 8) consider(cut(rows, split));
    if (job_.parts > 1 && job_.batch <= kFewRows)
      for (int64_t rows = kWarpgroupRows / job_.parts / kWarpRows * kWarpRows; rows > 0; rows -= kWarpRows)
        consider(cut(rows, 1, job_.parts));
    return best;
  }

  // See RowsShape in linear_rows_shape.cuh.
  int64_t staged_bytes(const WarpgroupsCut& c) const {
    const int64_t boxes = c.mainloop_tiles * c.parts / c.chunk_parts;
    const int64_t turns = boxes == 1 || c.joins_boxes() ? kWarpgroups : 1;
    const int64_t blocks = turns * boxes * divide_up(c.rows_in_entry(), kWarpRows);
    const int64_t sums = blocks * x_rows(job_.batch) * kSumPitch * 4;
    const int64_t of_x = sum_columns_ > 0 ? c.stage_columns / sum_columns_ * x_rows(job_.batch) * 4 : 0;
    return std::max(c.stages * stage_bytes(c.stage_columns), sums) + c.stages * of_x + kBoxAlignment;
  }

  // Split-K needs stages in equal parts, tiles in one pass, and sums of all rows of x that workers share.
  bool can_split(const WarpgroupsCut& c) const {
    if (c.split == 1) return true;
    return c.parts == 1 && shared_rows(c.split, job_.batch) <= x_rows(job_.batch) &&
           job_.size % (c.split * c.stage_columns) == 0 &&
           job_.tiles(c.tile_rows) <= job_.workers / c.split * c.mainloop_tiles;
  }

  // A worker's time for the memory, for the multiprocessor's share of L2, or for the products, and to add up parts.
  double nanoseconds(const WarpgroupsCut& c) const {
    const Costs& costs = job_.arch.costs;
    const FewRowsCosts& few = costs.by_warpgroups;
    const double share = double(divide_up(job_.tiles(c.tile_rows), job_.workers / c.split)), split = double(c.split);
    const double rows = share * double(c.tile_rows * job_.parts), weights = rows * double(c.row_bytes) / split;
    const double passes = double(divide_up(int64_t(share), c.mainloop_tiles));
    const double x = passes * double(job_.batch * job_.size * job_.element) / split;
    const double lines = share * double(c.entries()) / split / kWarpgroups;
    const double products = std::max({weights / costs.memory_bytes_per_ns, x / few.stages_bytes_per_ns,
                                      (weights + x) / few.bytes_per_ns, lines * line_ns_});
    const double sums = 8 * rows / split * double(job_.batch) * (split - 1);  // sent, and as many received
    return products + (c.split == 1 ? 0 : few.hop_ns + sums / few.sums_bytes_per_ns);
  }

 private:
  // Tiles whose sums warpgroups have in registers: all of those that they multiply in turns, else each has its own.
  int64_t tiles_held(const WarpgroupsCut& c) const {
    if (c.joins_boxes()) return kMostHeld;
    return std::max<int64_t>(kWarpgroups * (job_.batch <= kFewRows ? 2 : 1) / job_.parts, 1);
  }
  int64_t stage_bytes(int64_t columns) const { return x_rows(job_.batch) * columns * job_.element; }
  // As wide a stage as has few bytes: warpgroups wait for each.
  int64_t stage_columns(int64_t split) const {
    int64_t columns = kLeastColumns;
    while (columns < kMostColumns && stage_bytes(2 * columns) <= kWideStageBytes &&
           job_.size % (2 * columns * split) == 0)
      columns *= 2;
    return columns;
  }

  WarpgroupsCut cut(int64_t tile_rows, int64_t split, int64_t parts_of_box = 1) const {
    WarpgroupsCut c{{tile_rows, job_.parts, parts_of_box, format_.row_bytes(), kWarpgroupLineBytes}, {}};
    c.is_boxed = true;
    c.readers = kWarpgroupWarps;
    c.in_flight = std::min<int64_t>(entries_in_flight(kMinSlotBytes) * kMinSlotBytes / c.entry_bytes(), kMaxSlots);
    c.split = split;
    c.stage_columns = stage_columns(split);
    c.stages = std::clamp<int64_t>(kMostStageBytes / stage_bytes(c.stage_columns), 1, kStages);
    const int64_t share = divide_up(job_.tiles(tile_rows), job_.workers / split);
    c.mainloop_tiles = std::max<int64_t>(divide_up(share, divide_up(share, tiles_held(c))), 1);
    return c;
  }

  const Linears& job_;
  const WeightFormat format_;
  const double line_ns_;
  const int64_t sum_columns_;
};

}  // namespace

// ---- code

WarpgroupsWriter::WarpgroupsWriter(const codegen::JobPlace& place, std::string name, std::string compute,
                                   std::string header)
    : BoxedWriter(
          place,
          {std::move(name), std::move(compute), "", "linear::RowsShape<V>::kStagedBytes", "", {std::move(header)}},
          fields_of<WarpgroupsFields>(place.job.cut).mainloop_tiles, "", false),
      own_(fields_of<WarpgroupsFields>(place.job.cut)) {}

void WarpgroupsWriter::add_input() {
  const int64_t words = own_.stage_columns * element_ / 2;
  map_of_x_ = refs_.add_map(first_, element_ == 2 ? x_ : in_words(x_), x_rows(batch_), words);
}

StreamRow WarpgroupsWriter::stream_row() const {
  StreamRow row = BoxedWriter::stream_row();
  row.stream.entries = static_cast<uint32_t>(own_.split);
  row.stream.by_entries = inverse(row.stream.entries);
  row.stream.rotates = 0;
  return row;
}

std::string WarpgroupsWriter::shape_constants() const {
  using namespace codegen;
  return constant("kBoxRows", shape_.tile_rows) + constants(own_) + constant("kEpilogueTiles", own_.mainloop_tiles) +
         flag("kJoinsParts", shape_.joins_boxes()) + flag("kByWarpgroups", true) + flag("kBoxesOfX", true) +
         constant("kXRows", x_rows(batch_)) +
         returning("const void*", "map_of_x(const Job& job)", "job.pointer<const void>(" + str(map_of_x_) + ")");
}

std::string WarpgroupsWriter::write_places() {
  std::string text = BoxedWriter::write_places();
  if (own_.split == 1) return text;
  return text +
         codegen::constant("kPartialBytes", partial_bytes(own_.split, own_.mainloop_tiles * shape_.tile_rows, batch_)) +
         codegen::returning("uint8_t*", "partials(const Job& job)", refs_.workspace(job_.cut.scratch->offset));
}

// ---- the kernel

std::optional<std::string> WarpgroupsKernel::refuses_size(const Tensor& x) const {
  if (x.shape[0] < fewest_rows_ || x.shape[0] > kMostRows)
    return "x has " + std::to_string(x.shape[0]) + " rows, expected " + std::to_string(fewest_rows_) + " to " +
           std::to_string(kMostRows);
  if (x.shape[1] % kLeastColumns != 0)
    return "x has " + std::to_string(x.shape[1]) + " columns, expected whole stages of " +
           std::to_string(kLeastColumns);
  return std::nullopt;
}

std::optional<std::string> WarpgroupsKernel::refuses(const Schedule& schedule, const Job& job) const {
  if (auto refusal = refuses_boxes(schedule, job, kMostRows)) return refusal;
  const Linears linears(schedule, job);
  const Tensor& x = Linears::input(schedule, job);
  if (!linears.arch.has_warpgroup_products) return "the chip has no products of warpgroups";
  if (auto refusal = refuses_size(x)) return refusal;
  if (!job.prologue.empty() || schedule.polled[x.buffer] || !can_be_box_stages(schedule.graph, x))
    return "x does not come in boxes";
  for (int n : job.body)
    if (auto refusal = refuses_format(schedule.graph.nodes()[n])) return refusal;
  return std::nullopt;
}

std::vector<Cut> WarpgroupsKernel::candidates(const Schedule& schedule, const Job& job) const {
  const Linears linears(schedule, job);
  const WeightFormat format = format_of(schedule, job);
  const Cutter cutter(linears, format, line_ns(format), sum_columns(format));
  const WarpgroupsCut best = cutter.best();
  Cut cut = job.cut;
  cut.input = Input::kBoxStages;
  cut.staged_bytes = cutter.staged_bytes(best);
  if (cut.staged_bytes > linears.room_beside_boxes) return {};
  cut.num_tiles = linears.tiles(best.tile_rows);
  cut.shape = static_cast<const TileShape&>(best);
  cut.fields = list_fields<WarpgroupsFields>(best);
  if (best.split > 1)
    cut.scratch =
        Scratch{split_bytes(best.split, linears.workers, best.mainloop_tiles * best.tile_rows, linears.batch)};
  cut.cost_ns = cutter.nanoseconds(best);
  return {cut};
}

void WarpgroupsKernel::prove(const CutProof& proof) const {
  const Cut& cut = proof.cut();
  proof.require(cut.shape && cut.shape->is_boxed && cut.shape->x_rows == 0 && cut.input == Input::kBoxStages,
                "weights and x do not come in boxes");
  const TileShape& s = *cut.shape;
  const auto own = fields_of<WarpgroupsFields>(cut);
  proof.require(s.readers == kWarpgroupWarps && !proof.schedule().warps.all_read_entries,
                proof.str(s.readers) + " warps do not multiply a box together");
  const bool is_line = s.chunk_bytes == kWarpgroupLineBytes && s.tile_rows % 8 == 0;
  proof.require(is_line && s.rows_in_entry() <= kWarpgroupRows, "a box is not a line of rows of a warpgroup");
  const bool are_whole = s.chunk_parts == s.parts && s.tile_rows % kWarpRows == 0 && own.mainloop_tiles <= kMostHeld;
  proof.require(s.chunk_parts == 1 || are_whole,
                "boxes do not have all parts, a warp has rows of two, or a warpgroup more sums than registers");
  proof.require(own.mainloop_tiles > 0 && own.split > 0 && own.stages > 0 && own.stages <= kStages,
                "a pass has no tiles, or stages have no barriers");
  const Linears linears(proof.schedule(), proof.job());
  const WeightFormat format = WeightFormat::of(proof.first());
  const auto refusal = refuses_format(proof.first());
  proof.require(!refusal, refusal.value_or(""));
  proof.require(own.stage_columns > 0 && own.stage_columns % kLeastColumns == 0 && own.stage_columns <= kMostColumns &&
                    linears.size % own.stage_columns == 0,
                "x does not come in whole stages");
  const Cutter cutter(linears, format, line_ns(format), sum_columns(format));
  const WarpgroupsCut c{s, own};
  proof.require(linears.workers / own.split > 0 && cutter.can_split(c),
                proof.str(own.split) + " workers share tiles, but their parts are not equal, or take more than a pass");
  proof.require_scratch(split_bytes(own.split, linears.workers, own.mainloop_tiles * s.tile_rows, linears.batch));
  proof.require_plain_end();
  const int64_t bytes = cutter.staged_bytes(c);
  proof.require(cut.staged_bytes >= bytes, "it keeps " + proof.str(bytes) + " bytes in " + proof.str(cut.staged_bytes));
}

}  // namespace mpk
