// Linears with quantised weights and 17 to 64 rows of x, by warpgroups (quantized_warpgroups.cuh).
#include <algorithm>
#include <array>
#include <limits>

#include "../../codegen/text.h"
#include "../../schedule/kernel.h"
#include "../fields.h"
#include "blocks.h"
#include "linears.h"
#include "quantized_writer.h"
#include "torch_mpk/abi/sizes.h"

namespace mpk {
namespace {

constexpr int64_t kFewestRows = 17, kMostRows = 64;  // of x
constexpr int64_t kLineBytes = 128;                  // of a row of weights, that an entry of the ring has
constexpr int64_t kGroupColumns = 64;                // that share a scale; fewer would take too many registers
constexpr int64_t kStageColumns = kWidestStage;      // of x
constexpr int64_t kMostStageBytes = 96 * 1024;       // of all stages of x
constexpr int64_t kMostSplit = 4;

// A warpgroup's time for 64 columns of a box, while the other one works as well: by count, 120 instructions of each
// warp. Not measured.
constexpr int64_t kSliceColumns = 64;
constexpr double kSliceNs = 140;

struct WarpgroupsFields {
  int64_t mainloop_tiles = 1;  // tiles of one mainloop
  int64_t split = 1;           // split_k: workers that share the same tiles
  int64_t stages = 2;          // of x, that are in shared memory together

  static constexpr std::array<FieldOf<WarpgroupsFields>, 3> kAll = {{
      {"mainloop_tiles", "kMainloopTiles", &WarpgroupsFields::mainloop_tiles},
      {"split", "kSplit", &WarpgroupsFields::split},
      {"stages", "kHeldStages", &WarpgroupsFields::stages},
  }};
};

struct WarpgroupsCut : TileShape, WarpgroupsFields {};

int64_t x_rows(int64_t batch) { return round_up(batch, 8); }

class Cutter {
 public:
  Cutter(const Linears& job, const WeightFormat& format) : job_(job), format_(format) {}

  // The fastest over split_k and the height of boxes.
  WarpgroupsCut best() const {
    WarpgroupsCut best = cut(kWarpgroupWarps * kWarpRows, 1);
    for (int64_t split = 1; split <= std::min(kMostSplit, job_.workers); split *= 2)
      for (int64_t rows = kWarpgroupWarps * kWarpRows; rows > 0; rows -= 8)
        if (const WarpgroupsCut c = cut(rows, split); can_split(c) && nanoseconds(c) < nanoseconds(best)) best = c;
    return best;
  }

  // See RowsShape in linear_rows_shape.cuh.
  int64_t staged_bytes(const WarpgroupsCut& c) const {
    const int64_t boxes = c.mainloop_tiles * c.parts, turns = boxes == 1 ? kWarpgroups : 1;
    const int64_t sums = turns * boxes * divide_up(c.tile_rows, kWarpRows) * x_rows(job_.batch) * kSumPitch * 4;
    return std::max(c.stages * stage_bytes(), sums) + kBoxAlignment;
  }

  // Split-K needs stages in equal parts, tiles in one pass, and whole groups of the rows of x that a warp finishes
  // together.
  bool can_split(const WarpgroupsCut& c) const {
    if (c.split == 1) return true;
    return c.parts == 1 && job_.batch % (4 * c.split) == 0 && job_.size % (c.split * kStageColumns) == 0 &&
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
    const double lines = share * double(job_.parts * c.chunks()) / split / kWarpgroups;
    const double slices = lines * double(format_.columns_of(kLineBytes) / kSliceColumns);
    const double products = std::max({weights / costs.memory_bytes_per_ns, x / few.stages_bytes_per_ns,
                                      (weights + x) / few.bytes_per_ns, slices * kSliceNs});
    const double sums = 8 * rows / split * double(job_.batch) * (split - 1);  // sent, and as many received
    return products + (c.split == 1 ? 0 : few.hop_ns + sums / few.sums_bytes_per_ns);
  }

 private:
  // Boxes whose sums a warpgroup has in registers.
  int64_t boxes_held() const { return job_.batch <= 32 ? 2 : 1; }
  int64_t stage_bytes() const { return x_rows(job_.batch) * kStageColumns * job_.element; }

  WarpgroupsCut cut(int64_t box_rows, int64_t split) const {
    WarpgroupsCut c{{box_rows, job_.parts, 1, format_.row_bytes(), kLineBytes}, {}};
    c.is_boxed = true;
    c.readers = kWarpgroupWarps;
    c.in_flight = std::min<int64_t>(entries_in_flight(kMinSlotBytes) * kMinSlotBytes / c.entry_bytes(), kMaxSlots);
    c.split = split;
    c.stages = std::clamp<int64_t>(kMostStageBytes / stage_bytes(), 1, kStages);
    const int64_t share = divide_up(job_.tiles(box_rows), job_.workers / split);
    const int64_t most = std::max<int64_t>(kWarpgroups * boxes_held() / job_.parts, 1);
    c.mainloop_tiles = std::max<int64_t>(divide_up(share, divide_up(share, most)), 1);
    return c;
  }

  const Linears& job_;
  const WeightFormat format_;
};

class WarpgroupsWriter : public BoxedWriter {
 public:
  explicit WarpgroupsWriter(const codegen::JobPlace& place)
      : BoxedWriter(place,
                    {"QuantizedWarpgroups",
                     "linear::compute_quantized_warpgroups",
                     "",
                     "linear::RowsShape<V>::kStagedBytes",
                     "",
                     {"torch_mpk/device/tasks/quantized_warpgroups.cuh"}},
                    fields_of<WarpgroupsFields>(place.job.cut).mainloop_tiles, "", false),
        own_(fields_of<WarpgroupsFields>(place.job.cut)) {}

 private:
  void add_input() override { map_of_x_ = refs_.add_map(first_, x_, x_rows(batch_), kStageColumns); }

  StreamRow stream_row() const override {
    StreamRow row = BoxedWriter::stream_row();
    row.stream.entries = static_cast<uint32_t>(own_.split);
    row.stream.by_entries = inverse(row.stream.entries);
    row.stream.rotates = 0;
    return row;
  }

  std::string shape_constants() const override {
    using namespace codegen;
    return constant("kBoxRows", shape_.tile_rows) + constants(own_) + constant("kEpilogueTiles", own_.mainloop_tiles) +
           flag("kByWarpgroups", true) + flag("kBoxesOfX", true) + constant("kXRows", x_rows(batch_)) +
           constant("kStageColumns", kStageColumns) +
           returning("const void*", "map_of_x(const Job& job)", "job.pointer<const void>(" + str(map_of_x_) + ")");
  }

  std::string write_places() override {
    std::string text = BoxedWriter::write_places();
    if (own_.split == 1) return text;
    return text + codegen::constant("kPartialBytes", partial_bytes(own_.mainloop_tiles * shape_.tile_rows, batch_)) +
           codegen::returning("uint8_t*", "partials(const Job& job)", refs_.workspace(job_.cut.scratch->offset));
  }

  bool reads_x() const override { return false; }

  const WarpgroupsFields own_;
  int64_t map_of_x_ = 0;
};

// Whether numbers of x's type have room for what weights are converted to, slice by slice, and scales are of its type.
std::optional<std::string> refuses_format(const WeightFormat& f, DType dtype) {
  if (f.quantizes_x()) return "x is quantised";
  if (!has_blocks_of_rows(f) || (f.block_columns % kGroupColumns != 0 && f.block_columns < f.columns))
    return "blocks of scales are not whole blocks of " + std::to_string(kWarpRows) + " x " +
           std::to_string(kGroupColumns);
  if (f.scales_rows()) return std::nullopt;
  if (f.block_rows != 1 && f.block_rows < f.rows) return "rows share scales";
  if (f.scale_dtype != dtype || (f.zero == ZeroKind::kAdded && f.zero_bytes != size_bytes(dtype)))
    return "scales are " + std::string(info(f.scale_dtype).name) + ", and x is " + info(dtype).name;
  return std::nullopt;
}

class Warpgroups : public Kernel {
 public:
  Warpgroups() : Kernel("quantized_linear.warpgroups") {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    return refuses_quantized(node);
  }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    if (auto refusal = refuses_boxes(schedule, job, kMostRows)) return refusal;
    const Linears linears(schedule, job);
    const Tensor& x = Linears::input(schedule, job);
    if (linears.batch < kFewestRows)
      return "x has " + std::to_string(linears.batch) + " rows, expected at least " + std::to_string(kFewestRows);
    if (!linears.arch.has_warpgroup_products) return "the chip has no products of warpgroups";
    if (linears.size % kStageColumns != 0)
      return "x has " + std::to_string(linears.size) + " columns, expected whole stages of " +
             std::to_string(kStageColumns);
    if (!job.prologue.empty() || schedule.polled[x.buffer] || !can_be_box_stages(schedule.graph, x))
      return "x does not come in boxes";
    for (int n : job.body)
      if (auto refusal = refuses_format(WeightFormat::of(schedule.graph.nodes()[n]), x.dtype)) return refusal;
    return std::nullopt;
  }

  // It leaves that to others: it takes no x that is polled.
  int64_t polled_elements(const Schedule&, const Job&, const Tensor&) const override { return 0; }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    const Linears linears(schedule, job);
    const Cutter cutter(linears, format_of(schedule, job));
    const WarpgroupsCut best = cutter.best();
    Cut cut = job.cut;
    cut.input = Input::kBoxStages;
    cut.staged_bytes = cutter.staged_bytes(best);
    if (cut.staged_bytes > linears.room_beside_boxes) return {};
    cut.num_tiles = linears.tiles(best.tile_rows);
    cut.shape = static_cast<const TileShape&>(best);
    cut.fields = list_fields<WarpgroupsFields>(best);
    if (best.split > 1)
      cut.scratch = Scratch{num_partials(best.split, linears.workers) *
                            partial_bytes(best.mainloop_tiles * best.tile_rows, linears.batch)};
    cut.cost_ns = cutter.nanoseconds(best);
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    const Cut& cut = proof.cut();
    proof.require(cut.shape && cut.shape->is_boxed && cut.shape->x_rows == 0 && cut.input == Input::kBoxStages,
                  "weights and x do not come in boxes");
    const TileShape& s = *cut.shape;
    const auto own = fields_of<WarpgroupsFields>(cut);
    proof.require(s.chunk_parts == 1 && s.readers == kWarpgroupWarps && !proof.schedule().warps.all_read_entries,
                  proof.str(s.readers) + " warps do not multiply a box together");
    const bool is_line = s.chunk_bytes == kLineBytes && s.tile_rows % 8 == 0;
    proof.require(is_line && s.tile_rows <= kWarpgroupWarps * kWarpRows, "a box is not a line of rows of a warpgroup");
    proof.require(own.mainloop_tiles > 0 && own.split > 0 && own.stages > 0 && own.stages <= kStages,
                  "a pass has no tiles, or stages have no barriers");
    const Linears linears(proof.schedule(), proof.job());
    const WeightFormat format = WeightFormat::of(proof.first());
    const auto refusal = refuses_format(format, Linears::input(proof.schedule(), proof.job()).dtype);
    proof.require(!refusal, refusal.value_or(""));
    proof.require(linears.size % kStageColumns == 0, "x does not come in whole stages");
    const Cutter cutter(linears, format);
    const WarpgroupsCut c{s, own};
    proof.require(
        linears.workers / own.split > 0 && cutter.can_split(c),
        proof.str(own.split) + " workers share tiles, but their parts are not equal, or take more than a pass");
    const int64_t scratch =
        num_partials(own.split, linears.workers) * partial_bytes(own.mainloop_tiles * s.tile_rows, linears.batch);
    proof.require_scratch(own.split == 1 ? 0 : scratch);
    proof.require_plain_end();
    const int64_t bytes = cutter.staged_bytes(c);
    proof.require(cut.staged_bytes >= bytes,
                  "it keeps " + proof.str(bytes) + " bytes in " + proof.str(cut.staged_bytes));
  }

  bool takes_companions() const override { return true; }
  codegen::JobCode emit(const codegen::JobPlace& place) const override { return WarpgroupsWriter(place).run(); }
};

const Warpgroups kWarpgroupsKernel{};
[[maybe_unused]] const bool kRegistered = add_kernel("quantized_linear", kWarpgroupsKernel);

}  // namespace
}  // namespace mpk
