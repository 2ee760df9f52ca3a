// Linears with quantised weights and few rows of x, each warp with columns of its own (quantized_columns.cuh).
#include <algorithm>
#include <array>

#include "../../codegen/checks.h"
#include "../../codegen/text.h"
#include "../../schedule/choices.h"
#include "../../schedule/kernel.h"
#include "../fields.h"
#include "blocks.h"
#include "linears.h"
#include "quantized_writer.h"
#include "torch_mpk/abi/sizes.h"

namespace mpk {
namespace {

constexpr int64_t kMostRows = 16;             // of x
constexpr int64_t kLineBytes = 128;           // of a row of weights, that a warp takes at a time
constexpr int64_t kStepColumns = 128;         // whose sums are scaled together
constexpr int64_t kMostBoxRows = 48;          // a lane holds its part of a box's line in registers, beside products
constexpr int64_t kMostSumBytes = 32 * 1024;  // of a pass, unless one tile has more
constexpr double kRingBytes = 150 * 1024;     // as most launches have them
// Bytes of x that is staged whole although it could be otherwise, and of the lines that warps have of another.
constexpr int64_t kMostWhole = 48 * 1024, kMostCopied = 128 * 1024;

struct ColumnsFields {
  int64_t mainloop_tiles = 1;  // tiles of a pass
  int64_t lanes = 1;           // warps that take lines

  static constexpr std::array<FieldOf<ColumnsFields>, 2> kAll = {{
      {"mainloop_tiles", "kMainloopTiles", &ColumnsFields::mainloop_tiles},
      {"lanes", "kLanes", &ColumnsFields::lanes},
  }};
};

struct ColumnsCut : TileShape, ColumnsFields {};

// The use of shared memory, see ColumnsShape.
class Cutter {
 public:
  Cutter(const Linears& job, const WeightFormat& format, Input x) : job_(job), format_(format), x_(x) {}

  // A block of sums has one scale for all rows, or one for each.
  ColumnsCut best() const {
    const int64_t most_rows = kMostBoxRows - (format_.bits() == 4 ? 16 : 0) - (fragments() - 1) * 16;
    ColumnsCut best = cut(8);
    for (int64_t rows = kWarpRows; rows <= most_rows; rows += format_.block_rows == 1 ? 8 : kWarpRows)
      if (const ColumnsCut c = cut(rows); nanoseconds(c) + late_ns(c) <= nanoseconds(best) + late_ns(best)) best = c;
    const int64_t mine = tiles_of_worker(best), most = std::max<int64_t>(kMostSumBytes / sum_bytes(best), 1);
    best.mainloop_tiles = divide_up(mine, divide_up(mine, most));
    return best;
  }

  // Where x is not staged, each box would convert it.
  bool can_be(const ColumnsCut& c) const {
    return is_staged() || format_.bits() == 4 || (c.parts == 1 && tiles_of_worker(c) == 1);
  }

  int64_t staged_bytes(const ColumnsCut& c) const {
    const int64_t columns = is_staged() ? job_.size : line_columns(), lines = is_staged() ? 1 : 2 * c.lanes;
    const int64_t x = round_up(lines * job_.batch * x_pitch(), kSharedAlignment);
    const int64_t rows = round_up(job_.batch, 8), step = rows * (format_.bits() == 8 && format_.has_zero() ? 2 : 1);
    const int64_t own = format_.has_static_x || format_.x_columns > kStepColumns ? rows : 0;
    const int64_t factors = (lines * columns / kStepColumns * step + own) * 4;
    return x + round_up(factors, kSharedAlignment) + c.mainloop_tiles * sum_bytes(c);
  }

  // The time of the memory, or of the quarter of a multiprocessor whose warps have most lines.
  double nanoseconds(const ColumnsCut& c) const {
    const double tiles = double(tiles_of_worker(c) * c.parts);
    const double memory = bytes_of_worker(c) / job_.arch.costs.memory_bytes_per_ns;
    const double steps = double(most_lines(c.lanes, lines_of_box(c)) * line_columns() / kStepColumns);
    const double x = format_.bits() == 4 ? 0 : steps * double(job_.batch) * kRowNs;
    const double step = fragments() == 1 ? kStepNs : kWideStepNs;
    const double products = steps * tiles * (double(blocks(c) * fragments()) * step + kBoxNs) + x;
    return std::max(memory, products) + std::min(memory, products) / 8;
  }

 private:
  // Boxes that fill slots have more bytes at hand as a phase begins. But warps that convert many rows of x wait for
  // that, and not for bytes on their way. Quantising takes longest, and beside 4 bits x is kept. Figures are under
  // "Slots filled" in docs/experiments/rows.md.
  bool fills_slots() const { return format_.bits() == 4 || job_.batch <= (format_.quantizes_x() ? 2 : 4); }
  // The memory's time for bytes that are not at hand as the phase begins, since slots of the ring are not full.
  double late_ns(const ColumnsCut& c) const {
    if (!fills_slots()) return 0;
    const double at_hand = std::min(kRingBytes, bytes_of_worker(c));
    const double empty = 1 - double(c.entry_bytes()) / double(kMinSlotBytes);
    return at_hand * empty / job_.arch.costs.memory_bytes_per_ns;
  }

  // A warp alone takes so long for a block of 16 rows and 128 columns, for each 8 of more than 8 rows of x, for a box
  // beside that, and to convert as many columns of a row of x. An H200's step of Qwen3-8B in int4 takes 2.9 ms with 8
  // rows, and 6.7 with 16.
  static constexpr double kStepNs = 90, kWideStepNs = 230, kBoxNs = 60, kRowNs = 45;

  bool is_staged() const { return x_ == Input::kWhole; }
  int64_t x_pitch() const { return (is_staged() ? job_.size : line_columns()) * job_.element + kAccessBytes; }
  int64_t line_columns() const { return format_.columns_of(kLineBytes); }
  int64_t lines() const { return format_.row_bytes() / kLineBytes; }
  int64_t fragments() const { return divide_up(job_.batch, 8); }
  // Bytes of all warps' sums of a tile.
  int64_t sum_bytes(const ColumnsCut& c) const {
    return c.lanes * c.parts * blocks(c) * job_.batch * kSumPitch * int64_t(sizeof(float));
  }
  double bytes_of_worker(const TileShape& c) const {
    return double(tiles_of_worker(c) * c.parts * c.tile_rows * format_.row_bytes());
  }
  static int64_t lines_of_box(const TileShape& c) { return c.chunk_bytes / kLineBytes; }
  static int64_t blocks(const TileShape& c) { return divide_up(c.tile_rows, kWarpRows); }
  int64_t tiles_of_worker(const TileShape& c) const { return divide_up(job_.tiles(c.tile_rows), job_.workers); }

  // The lines of the warps that share a quarter of a multiprocessor with most others.
  int64_t most_lines(int64_t lanes, int64_t of_box) const {
    const int64_t boxes = lines() / of_box;
    std::array<int64_t, 4> of_quarter{};
    for (int64_t warp = 0; warp < lanes; warp++) of_quarter[warp % 4] += (boxes - warp + lanes - 1) / lanes * of_box;
    return std::ranges::max(of_quarter);
  }
  // Fewer warps than there are, if the most that a quarter has is less then.
  int64_t best_lanes(int64_t of_box) const {
    int64_t most = std::min(lines() / of_box, job_.warps);
    if (!is_staged()) most = std::clamp<int64_t>(kMostCopied / (2 * job_.batch * x_pitch()), 1, most);
    if (!is_staged() && !fills_slots()) return most;
    int64_t best = most;
    for (int64_t lanes = best - 1; 2 * lanes > job_.warps; lanes--)
      if (most_lines(lanes, of_box) < most_lines(best, of_box)) best = lanes;
    return best;
  }
  // As many lines as fit a slot, since slots have most bytes on their way when they are full; unless a warp has more to
  // do then, or most warps have nothing.
  int64_t best_lines_of_box(int64_t rows) const {
    if (!fills_slots()) return 1;
    int64_t best = 1;
    for (int64_t of_box = 2; of_box * rows * kLineBytes <= kMinSlotBytes && lines() % of_box == 0; of_box *= 2) {
      const int64_t lanes = best_lanes(of_box);
      if (2 * lanes > job_.warps && most_lines(lanes, of_box) <= most_lines(best_lanes(1), 1)) best = of_box;
    }
    return best;
  }

  ColumnsCut cut(int64_t rows) const {
    const int64_t of_box = best_lines_of_box(rows);
    ColumnsCut c{{rows, job_.parts, 1, format_.row_bytes(), of_box * kLineBytes}, {}};
    c.is_boxed = true;
    c.lanes = best_lanes(of_box);
    c.in_flight = std::min<int64_t>(entries_in_flight(kMinSlotBytes) * kMinSlotBytes / c.entry_bytes(), kMaxSlots);
    return c;
  }

  const Linears& job_;
  const WeightFormat format_;
  const Input x_;
};

class ColumnsWriter : public BoxedWriter {
 public:
  explicit ColumnsWriter(const codegen::JobPlace& place)
      : BoxedWriter(place,
                    {"QuantizedColumns",
                     "linear::compute_quantized_columns",
                     "",
                     "linear::ColumnsShape<V>::kStagedBytes",
                     "",
                     {"torch_mpk/device/tasks/quantized_columns.cuh"}},
                    fields_of<ColumnsFields>(place.job.cut).mainloop_tiles, own_constants(place), true) {}

 private:
  static std::string own_constants(const codegen::JobPlace& place) {
    const int64_t columns = WeightFormat::of(place.node()).columns_of(place.job.cut.shape->chunk_bytes);
    return constants(fields_of<ColumnsFields>(place.job.cut)) + codegen::constant("kStageColumns", columns);
  }
};

// Whether a line has whole steps, of which each has its scales, of rows of a block or of one.
bool has_whole_steps(const WeightFormat& f) {
  const bool are_columns = f.block_columns % kStepColumns == 0 || f.block_columns >= f.columns;
  return has_blocks_of_rows(f) && (f.scales_rows() || are_columns) &&
         (!f.quantizes_x() || (f.bits() == 8 && (f.x_columns == kStepColumns || f.x_columns >= f.columns)));
}

class Columns : public Kernel {
 public:
  Columns() : Kernel("quantized_linear.columns") {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    return refuses_reduced(node);
  }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    if (auto refusal = refuses_boxes(schedule, job, kMostRows)) return refusal;
    for (int n : job.body) {
      const WeightFormat format = WeightFormat::of(schedule.graph.nodes()[n]);
      if (!has_whole_steps(format))
        return "blocks of scales are not whole blocks of " + std::to_string(kWarpRows) + " x " +
               std::to_string(kStepColumns);
      if (auto refusal = refuses_lines(format)) return refusal;
    }
    return std::nullopt;
  }

  // Warps copy lines of an x that the launch has made, unless x is small, or goes through row tasks, or is polled.
  static Input input_of_x(const Schedule& schedule, const Job& job) {
    const Tensor& x = Linears::input(schedule, job);
    const bool is_made = schedule.graph.buffers()[x.buffer].kind == BufferKind::kWorkspace && has_aligned_rows(x);
    const bool must_be_whole = !job.prologue.empty() || schedule.polled[x.buffer] || !is_made;
    return must_be_whole || x.numel() * size_bytes(x.dtype) <= kMostWhole ? Input::kWhole : Input::kInPlace;
  }

  int64_t polled_elements(const Schedule& schedule, const Job& job, const Tensor& made) const override {
    const Linears linears(schedule, job);
    const Cutter cutter(linears, format_of(schedule, job), Input::kWhole);
    const bool fits = cutter.staged_bytes(cutter.best()) <= linears.room_beside_boxes;
    return fits ? polled_whole(schedule, job, made) : std::numeric_limits<int64_t>::max();
  }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    const Linears linears(schedule, job);
    const Cutter cutter(linears, format_of(schedule, job), input_of_x(schedule, job));
    const ColumnsCut best = cutter.best();
    Cut cut = job.cut;
    cut.input = input_of_x(schedule, job);
    cut.staged_bytes = cutter.staged_bytes(best);
    if (!cutter.can_be(best) || cut.staged_bytes > linears.room_beside_boxes) return {};
    cut.num_tiles = linears.tiles(best.tile_rows);
    cut.shape = static_cast<const TileShape&>(best);
    cut.fields = list_fields<ColumnsFields>(best);
    cut.cost_ns = cutter.nanoseconds(best);
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    const Cut& cut = proof.cut();
    proof.require(cut.shape && cut.shape->is_boxed && cut.shape->x_rows == 0, "its weights do not come in boxes");
    const TileShape& s = *cut.shape;
    const auto own = fields_of<ColumnsFields>(cut);
    const WeightFormat format = WeightFormat::of(proof.first());
    proof.require(s.chunk_parts == 1 && s.readers == 1 && !proof.schedule().warps.all_read_entries,
                  "a box of " + proof.str(s.tile_rows) + " rows is taken by one warp");
    const bool has_lines = s.chunk_bytes % kLineBytes == 0 && format.row_bytes() % s.chunk_bytes == 0;
    const bool has_blocks = format.block_rows == 1 || s.tile_rows == 8 || s.tile_rows % kWarpRows == 0;
    proof.require(has_lines && has_blocks && s.tile_rows % 8 == 0 && s.tile_rows <= kMostBoxRows,
                  "a box has no whole lines of blocks of products");
    const Linears linears(proof.schedule(), proof.job());
    proof.require(own.mainloop_tiles > 0, "a pass has no tiles");
    proof.require(own.lanes > 0 && own.lanes <= linears.warps && own.lanes <= format.row_bytes() / s.chunk_bytes,
                  "boxes are dealt out to warps that there are not");
    proof.require_plain_end();
    proof.require_scratch(0);
    proof.require(has_whole_steps(format) && !refuses_lines(format), "its scales are not those of whole steps");
    const Cutter cutter(linears, format, cut.input);
    proof.require(cutter.can_be(ColumnsCut{s, own}), "it converts x for each of several boxes");
    const int64_t bytes = cutter.staged_bytes(ColumnsCut{s, own});
    proof.require(cut.staged_bytes >= bytes,
                  "it keeps " + proof.str(bytes) + " bytes in " + proof.str(cut.staged_bytes));
  }

  bool takes_companions() const override { return true; }
  codegen::JobCode emit(const codegen::JobPlace& place) const override { return ColumnsWriter(place).run(); }
};

const Columns kColumns{};
[[maybe_unused]] const bool kRegistered = add_kernel("quantized_linear", kColumns);

}  // namespace
}  // namespace mpk
