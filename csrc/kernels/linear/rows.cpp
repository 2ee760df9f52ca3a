// Linears of 2 to 64 rows of x on tensor cores: weights come as boxes, and a worker computes all its weight rows at
// once, K outermost, as far as its registers hold the sums (linear_rows.cuh).
#include <array>
#include <limits>
#include <numeric>

#include "../../codegen/text.h"
#include "../../schedule/choices.h"
#include "../../schedule/kernel.h"
#include "../fields.h"
#include "linears.h"
#include "torch_mpk/abi/table.h"
#include "writer.h"

namespace mpk {
namespace {

constexpr int64_t kMostRows = 64;   // of x
constexpr int64_t kBlockRows = 16;  // of weights, multiplied by a warp at a time
constexpr int64_t kMostSplit = 4;
constexpr int64_t kFewRows = 32;  // of x, which warps multiply as fast as warpgroups
constexpr int64_t kMostHeld = 2;  // boxes whose sums a warpgroup holds, 32 in each thread
// The most bytes of x that are staged as a whole by choice: beyond, the ring needs the room more.
constexpr int64_t kMostWhole = 100 * 1024;

struct RowsFields {
  int64_t mainloop_tiles = 1;  // tiles of one mainloop: chunk after chunk, the boxes of all of them
  int64_t epilogue_tiles = 1;  // tiles whose sums the epilogue has in shared memory at a time
  // split_k: workers that share the same tiles. Each takes an equal part of the chunks, and needs that part of x alone.
  // They exchange their sums in the workspace.
  int64_t split = 1;
  int64_t by_warpgroups = 0;
  int64_t stage_columns = 0;  // of a stage of x, where it comes in stages: one box or several

  static constexpr std::array<FieldOf<RowsFields>, 5> kAll = {{
      {"mainloop_tiles", "kMainloopTiles", &RowsFields::mainloop_tiles},
      {"epilogue_tiles", "kEpilogueTiles", &RowsFields::epilogue_tiles},
      {"split", "kSplit", &RowsFields::split},
      {"by_warpgroups", "kByWarpgroups", &RowsFields::by_warpgroups, true},
      {"stage_columns", "kStageColumns", &RowsFields::stage_columns},
  }};
};

// The stream's shape, and the kernel's fields.
struct RowsCut : TileShape, RowsFields {
  int64_t stage_bytes(int64_t element) const { return stage_columns * element; }
};

// The sums of squares that workers leave of each row where a norm follows: one for every 32 results of a pass.
int64_t count_row_sums(const TileShape& shape, const RowsFields& own, int64_t tiles, int64_t workers) {
  const int64_t groups = workers / own.split, passes = divide_up(divide_up(tiles, groups), own.mainloop_tiles);
  return groups * passes * divide_up(own.mainloop_tiles * shape.tile_rows, 32);
}

class Cutter {
 public:
  Cutter(const Linears& job, Input x, bool ends_with_norm)
      : job_(job),
        x_(x),
        ends_with_norm_(ends_with_norm),
        by_warpgroups_(x == Input::kBoxStages && job.arch.has_warpgroup_products && job.batch > kFewRows) {}

  bool is_staged() const { return x_ == Input::kWhole || x_ == Input::kColumns; }

  // The fastest cut over split_k.
  RowsCut best() const {
    RowsCut best = cut(1);
    if (is_staged()) return best_of_columns().value_or(best);
    for (int64_t split = 2; split <= std::min(kMostSplit, job_.workers); split *= 2) {
      const RowsCut c = cut(split);
      if (can_split(c) && nanoseconds(c) < nanoseconds(best)) best = c;
    }
    return best;
  }

  // The elements of x that a worker polls.
  int64_t polled_elements() const {
    const std::optional<RowsCut> c = best_of_columns();
    return job_.batch * job_.size / (c ? c->split : 1);
  }

  // See RowsShape in linear_rows_shape.cuh.
  int64_t staged_bytes(const RowsCut& c) const {
    if (by_warpgroups_) {
      const int64_t boxes = c.mainloop_tiles * c.parts,
                    at_a_time = c.epilogue_tiles < c.mainloop_tiles ? kWarpgroups : boxes;
      const int64_t sums = sums_bytes(c, boxes == 1 ? kWarpgroups : at_a_time);
      return std::max(stages_bytes(c), sums) + kBoxAlignment;
    }
    const int64_t blocks = divide_up(c.mainloop_tiles * c.parts, kBlockRows / c.tile_rows);
    const int64_t sums = std::max(blocks, warps()) * round_up(job_.batch, 8) * kSumPitch * 4;
    const int64_t x = job_.batch * ((is_staged() ? c.row_bytes / c.split : c.chunk_bytes) + kAccessBytes);
    if (is_staged()) return round_up(x, kSharedAlignment) + sums;
    const int64_t box = round_up(round_up(job_.batch, 8) * c.chunk_bytes, kBoxAlignment);
    return x_ == Input::kBoxStages ? std::max(kStages * box, sums) + kBoxAlignment : std::max(kStages * x, sums);
  }

  // A worker's time, from its chip's bandwidths and from measurements on an H200 (docs/experiments.md): a warpgroup's
  // least time for a chunk, and that of both warpgroups for the products of a weight row with 64 columns.
  double nanoseconds(const RowsCut& c) const {
    constexpr double kOfChunk = 250, kOfRow = 73.0 / 64;
    const Costs& costs = job_.arch.costs;
    const FewRowsCosts& few = by_warpgroups_ ? costs.by_warpgroups : costs.by_warps;
    const int64_t tiles = job_.tiles(c.tile_rows), share = divide_up(tiles, job_.workers / c.split);
    const double split = double(c.split),
                 of_worker = by_warpgroups_ ? double(share) / split : double(tiles) / double(job_.workers);
    const double rows = double(c.tile_rows * job_.parts) * of_worker, weights = rows * double(c.row_bytes);
    const double passes = double(divide_up(share, c.mainloop_tiles));
    const double x = passes * double(job_.batch) * double(c.row_bytes) / split;
    const double sums = 8 * rows * double(job_.batch) * (split - 1);  // sent, and as many received
    const double chunks = double(job_.parts) * of_worker * double(c.chunks()) / kWarpgroups;
    const double multiplied = by_warpgroups_ ? std::max(chunks * kOfChunk, weights / kBoxRowBytes * kOfRow) : 0;
    const double products = std::max({weights / costs.memory_bytes_per_ns, x / few.stages_bytes_per_ns,
                                      (weights + x) / few.bytes_per_ns, multiplied});
    return products + (c.split == 1 ? 0 : few.hop_ns + sums / few.sums_bytes_per_ns);
  }

 private:
  RowsCut cut(int64_t split) const { return by_warpgroups_ ? of_warpgroups(split) : of_warps(split); }

  RowsCut boxed(int64_t box_rows, int64_t chunk_bytes, int64_t split) const {
    RowsCut c{{box_rows, job_.parts, 1, job_.size * job_.element, chunk_bytes}, {}};
    c.is_boxed = true;
    c.in_flight = entries_in_flight(kMinSlotBytes) * kMinSlotBytes / c.entry_bytes();
    c.split = split;
    c.by_warpgroups = by_warpgroups_ ? 1 : 0;
    return c;
  }

  // If shared memory is small, stages are narrower, and a pass has fewer sums.
  RowsCut of_warps(int64_t split) const {
    int64_t columns = job_.batch <= 16 ? 512 : 256, held = blocks_held();
    while (true) {
      const RowsCut c = of_warps(split, columns, held);
      const bool can_narrow = !is_staged() && columns > kBoxColumns;
      if (staged_bytes(c) <= job_.room_beside_boxes || (!can_narrow && held == 1)) return c;
      can_narrow ? columns /= 2 : held--;
    }
  }

  // Boxes of 8 rows balance workers better; boxes of 16 rows need less of x at a time.
  RowsCut of_warps(int64_t split, int64_t columns, int64_t held) const {
    const int64_t workers = job_.workers / split;  // groups with tiles of their own
    const int64_t box_rows = job_.batch <= 16 || job_.tiles(kBlockRows) < workers ? 8 : kBlockRows;
    RowsCut c = boxed(box_rows, std::min(columns, job_.size) * job_.element, split);
    const int64_t mine = divide_up(job_.tiles(box_rows), workers);
    const int64_t most = std::max<int64_t>(held * warps() * (kBlockRows / box_rows) / job_.parts, 1);
    c.mainloop_tiles = c.epilogue_tiles = std::max<int64_t>(divide_up(mine, divide_up(mine, most)), 1);
    c.stage_columns = c.chunk_bytes / job_.element;
    return c;
  }

  // Each warpgroup multiplies up to 64 weight rows with all of x. Takes the fastest height of boxes: lower boxes
  // balance workers better, but take as many products each, and fewer fit a pass, which reads all of x.
  RowsCut of_warpgroups(int64_t split) const {
    RowsCut best = of_warpgroups(split, kWarpgroupWarps * kWarpRows);
    for (int64_t rows = best.tile_rows - 8; rows > 0; rows -= 8) {
      const RowsCut c = of_warpgroups(split, rows);
      if (nanoseconds(c) < nanoseconds(best)) best = c;
    }
    return best;
  }

  RowsCut of_warpgroups(int64_t split, int64_t box_rows) const {
    // In blocks of 64 columns: a worker has whole stages, and a stage has whole boxes, which fit a slot.
    const int64_t of_stage = std::gcd(job_.size / kBoxColumns / split, int64_t{kWidestStage / kBoxColumns});
    const int64_t of_box = std::gcd(of_stage, kMinSlotBytes / (box_rows * kBoxRowBytes));
    RowsCut c = boxed(box_rows, of_box * kBoxRowBytes, split);
    c.readers = kWarpgroupWarps;
    const int64_t share = divide_up(job_.tiles(box_rows), job_.workers / split);
    const int64_t most = std::max<int64_t>(kWarpgroups * kMostHeld / job_.parts, 1);
    c.mainloop_tiles = c.epilogue_tiles = std::max<int64_t>(divide_up(share, divide_up(share, most)), 1);
    c.stage_columns = of_stage * kBoxColumns;
    // The sums of a pass take the stages' place, and may need more room.
    const int64_t boxes = c.mainloop_tiles * c.parts;
    const bool can_have_subtiles = boxes > kWarpgroups && kWarpgroups % c.parts == 0 && split == 1 && !ends_with_norm_;
    if (can_have_subtiles && sums_bytes(c, boxes) > stages_bytes(c)) c.epilogue_tiles = kWarpgroups / c.parts;
    return c;
  }

  // The cut for an x that is too large for a worker to poll, but whose columns are not: the fewest columns whose room
  // is worth it. With fewer rows, stages are as fast.
  std::optional<RowsCut> best_of_columns() const {
    constexpr int64_t kMostOfColumns = 48 * 1024, kFewestRows = 17;
    const bool is_too_much = job_.batch * job_.size > kMaxPolledElements;
    if (x_ != Input::kColumns || !is_too_much || job_.batch < kFewestRows || job_.batch > kFewRows) return std::nullopt;
    for (int64_t split = kMostSplit; split > 1; split /= 2) {
      if (split > job_.workers) continue;
      const RowsCut c = cut(split);
      if (can_split(c) && job_.batch * c.row_bytes / split <= kMostOfColumns) return c;
    }
    return std::nullopt;
  }

  // Split-K needs chunks in equal parts, tiles in one pass, and whole groups of the rows of x that a warp finishes
  // together. Row tasks in front rule it out.
  bool can_split(const RowsCut& c) const {
    const int64_t workers = job_.workers / c.split;
    return x_ != Input::kWhole && job_.parts == 1 && job_.batch % (4 * c.split) == 0 && c.chunks() % c.split == 0 &&
           job_.tiles(c.tile_rows) <= workers * c.mainloop_tiles;
  }

  // With warpgroups:
  int64_t stages_bytes(const RowsCut& c) const {
    return stages_held(static_cast<int>(c.stage_columns)) * c.stage_bytes(job_.element) * kMultipliedRows;
  }
  static int64_t sums_bytes(const RowsCut& c, int64_t boxes) {
    return boxes * divide_up(c.tile_rows, kWarpRows) * kSumPitch * 4 * kMultipliedRows;
  }
  int64_t warps() const { return job_.warps - (is_staged() ? 0 : kProducerWarps); }  // without producer warps
  int64_t blocks_held() const {
    const bool is_large = is_staged() && job_.batch * job_.size * job_.element > kMostWhole / 2;
    const bool is_tall = job_.batch > kFewRows && !job_.arch.has_warpgroup_products;  // more than a thread's registers
    return is_large || is_tall ? 1 : job_.batch <= 16 ? 3 : 2;
  }

  const Linears& job_;
  const Input x_;
  const bool ends_with_norm_;
  const bool by_warpgroups_;
};

// Whether a worker may poll its columns of x alone. Rows that lack their norm's factors come in stages.
bool can_poll_columns(const Schedule& schedule, const Job& job) {
  const Tensor& x = Linears::input(schedule, job);
  return job.prologue.empty() && has_aligned_rows(x) && find_norm(schedule, x.buffer) == nullptr;
}

Input input_of_x(const Schedule& schedule, const Job& job) {
  const Tensor& x = Linears::input(schedule, job);
  if (schedule.polled[x.buffer] && can_poll_columns(schedule, job)) return Input::kColumns;
  const bool is_short = x.numel() * size_bytes(x.dtype) <= kMostWhole && leaves_room(x, schedule.target);
  const bool lacks_factors = find_norm(schedule, x.buffer) != nullptr;
  if (!job.prologue.empty() || schedule.polled[x.buffer] || !has_aligned_rows(x) || (is_short && !lacks_factors))
    return Input::kWhole;
  return can_be_box_stages(schedule.graph, x) ? Input::kBoxStages : Input::kStages;
}

// ---- code ----

class RowsWriter : public codegen::LinearWriter {
 public:
  explicit RowsWriter(const codegen::JobPlace& place)
      : LinearWriter(place, {"LinearRows",
                             "linear::compute_rows",
                             "",
                             "linear::RowsShape<V>::kStagedBytes",
                             "",
                             {"torch_mpk/device/tasks/linear_rows.cuh"}}),
        own_(fields_of<RowsFields>(job_.cut)) {}

 private:
  void add_weight(const Node& node, const Tensor& weight) override {
    refs_.add_map(node, weight, shape_.tile_rows, shape_.chunk_bytes / element_);
  }

  void add_input() override {
    if (job_.cut.input != Input::kBoxStages) return;
    const int64_t map = refs_.add_map(first_, x_, x_rows(), own_.stage_columns);
    map_of_x_ = "job.pointer<const void>(" + codegen::str(map) + ")";
  }

  StreamRow stream_row() const override {
    StreamRow row = LinearWriter::stream_row();
    row.stream.chunk_parts = 0;
    row.stream.entries = static_cast<uint32_t>(own_.split);
    row.stream.by_entries = inverse(row.stream.entries);
    row.stream.rotates = map_of_x_.empty() ? 1 : 0;
    row.run = static_cast<uint32_t>(own_.mainloop_tiles);
    return row;
  }

  std::string shape_constants() const override {
    return codegen::constant("kBoxRows", shape_.tile_rows) + constants(own_) +
           codegen::flag("kBoxesOfX", !map_of_x_.empty()) + codegen::constant("kXRows", x_rows()) +
           codegen::returning("const void*", "map_of_x(const Job& job)", map_of_x_.empty() ? "nullptr" : map_of_x_);
  }

  std::string write_places() override {
    if (own_.split == 1) return "";
    return codegen::constant("kPartialBytes",
                             partial_bytes(own_.split, own_.mainloop_tiles * shape_.tile_rows, batch_)) +
           codegen::returning("uint8_t*", "partials(const Job& job)", refs_.workspace(job_.cut.scratch->offset));
  }

  const char* type_of_x() const override { return job_.cut.is_staged() ? "const uint16_t*" : "const T*"; }
  bool reads_x() const override {
    const bool polls_columns = own_.split > 1;
    return (!job_.cut.is_staged() || polls_columns) && map_of_x_.empty();
  }

  void write_behind() override { write_row_sums(); }

  // The rows of a box of x: a multiple of eight, after which the copy engine's swizzle repeats, so all boxes are
  // swizzled alike. Rows behind x's last are zero.
  int64_t x_rows() const {
    return own_.by_warpgroups ? kMultipliedRows : job_.cut.is_staged() ? batch_ : round_up(batch_, 8);
  }

  const RowsFields own_;
  std::string map_of_x_;  // an expression, where x comes as boxes
};

class Rows : public Kernel {
 public:
  Rows() : Kernel("linear.rows") {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    return refuses_linear(node);
  }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    const Linears linears(schedule, job);
    if (linears.are_empty()) return "x is empty";
    if (schedule.warps.all_read_entries) return kNotTogether;
    if (linears.batch < 2 || linears.batch > kMostRows)
      return "x has " + std::to_string(linears.batch) + " rows, expected 2 to " + std::to_string(kMostRows);
    if (!linears.arch.has_bulk_copies) return "the chip has no copy engine";
    if (schedule.warps.slot_bytes % kBoxAlignment != 0) return "slots of the ring are no multiple of a box";
    if (!all_weights(schedule, job, [&](const Tensor& t) { return can_load_made_boxes(schedule.graph, t); }))
      return "a weight cannot come in boxes: it is an input that is written, not of 16-bit elements, or its rows are "
             "not "
             "multiples of 64 elements";
    return std::nullopt;
  }

  // Rows without their factors may be as large as others' squares, which exceeds float16.
  bool splits_norms(const Schedule& schedule, const Job& job) const override {
    constexpr int64_t kMostOfStages = 96 * 1024;  // bytes of the stages of x, or of the sums in their place
    return schedule.target.smem_bytes / 2 >= kMostOfStages && Linears::input(schedule, job).dtype == DType::kBF16 &&
           !refusal(schedule, job);
  }

  int64_t polled_elements(const Schedule& schedule, const Job& job, const Tensor& made) const override {
    if (!can_poll_columns(schedule, job)) return polled_whole(schedule, job, made);
    const Linears linears(schedule, job);
    const Cutter cutter(linears, Input::kColumns, norm_of(job) >= 0);
    const bool fits = cutter.staged_bytes(cutter.best()) <= linears.room_beside_boxes;
    return fits ? cutter.polled_elements() : std::numeric_limits<int64_t>::max();
  }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    const Linears linears(schedule, job);
    const Input x = input_of_x(schedule, job);
    const bool lacks_factors = find_norm(schedule, Linears::input(schedule, job).buffer) != nullptr;
    const Cutter cutter(linears, x, norm_of(job) >= 0);
    const RowsCut best = cutter.best();
    Cut cut = job.cut;
    cut.input = x == Input::kColumns && best.split == 1 ? Input::kWhole : x;
    cut.staged_bytes = cutter.staged_bytes(best) + (lacks_factors ? kMultipliedRows * 4 : 0);
    if (cut.staged_bytes > linears.room_beside_boxes) return {};
    cut.num_tiles = linears.tiles(best.tile_rows);
    cut.shape = static_cast<const TileShape&>(best);
    cut.fields = list_fields<RowsFields>(best);
    if (best.split > 1)
      cut.scratch =
          Scratch{split_bytes(best.split, linears.workers, best.mainloop_tiles * best.tile_rows, linears.batch)};
    if (cut.row_sums) cut.row_sums->count = count_row_sums(best, best, cut.num_tiles, linears.workers);
    cut.cost_ns = cutter.nanoseconds(best);
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    const Cut& cut = proof.cut();
    proof.require(cut.shape && cut.shape->is_boxed && cut.shape->x_rows == 0, "its weights do not come in boxes");
    const TileShape& s = *cut.shape;
    const auto own = fields_of<RowsFields>(cut);
    proof.require(s.chunk_parts == 1 && !proof.schedule().warps.all_read_entries,
                  "a box of " + proof.str(s.tile_rows) + " rows is taken by one warp");
    proof.require(own.mainloop_tiles > 0 && own.split > 0, "a size of its tiles is not positive");
    proof.require_no_rows_behind();
    if (own.split != 1) prove_split(proof, s, own);
    prove_stages(proof, s, own);
    const int64_t workers = proof.schedule().target.num_workers;
    proof.require_scratch(split_bytes(own.split, workers, own.mainloop_tiles * s.tile_rows, proof.rows()));
    if (!cut.row_sums) return;
    const int64_t sums = count_row_sums(s, own, cut.num_tiles, workers);
    proof.require(cut.row_sums->count >= sums, "workers leave " + proof.str(sums) + " sums of a row, but " +
                                                   proof.str(cut.row_sums->count) + " have a place");
  }

  // Warpgroups take boxes of up to 64 weight rows, and stages of x of a fixed number of columns.
  static void prove_stages(const CutProof& proof, const TileShape& s, const RowsFields& own) {
    const Cut& cut = proof.cut();
    const int64_t stage_bytes = own.stage_columns * proof.element();
    if (own.by_warpgroups)
      proof.require(cut.input == Input::kBoxStages && s.tile_rows <= kWarpgroupWarps * kWarpRows &&
                        own.stage_columns > 0 && stage_bytes % s.chunk_bytes == 0 &&
                        own.stage_columns <= kWidestStage && s.row_bytes % (own.split * stage_bytes) == 0,
                    "stages of " + proof.str(own.stage_columns) + " columns of x are not what warpgroups multiply");
    else
      proof.require(stage_bytes == s.chunk_bytes, "stages of x are not as wide as boxes of weights");
    proof.require(s.readers == (own.by_warpgroups ? kWarpgroupWarps : 1),
                  proof.str(s.readers) + " warps do not multiply a box together");
    const bool has_subtiles = own.epilogue_tiles != own.mainloop_tiles;
    proof.require(!has_subtiles || (own.by_warpgroups && own.epilogue_tiles * s.parts == kWarpgroups &&
                                    own.epilogue_tiles < own.mainloop_tiles && own.split == 1 && !cut.row_sums),
                  "the sums of " + proof.str(own.epilogue_tiles) + " tiles at a time are not a box of each warpgroup");
  }

  // Each worker that shares tiles has one part of one pass, so none waits for itself.
  static void prove_split(const CutProof& proof, const TileShape& s, const RowsFields& own) {
    const Cut& cut = proof.cut();
    const int64_t groups = proof.schedule().target.num_workers / own.split;
    const std::string shared = proof.str(own.split) + " workers share tiles";
    proof.require(groups > 0 && s.chunks() % own.split == 0 && cut.num_tiles <= groups * own.mainloop_tiles,
                  shared + ", but their parts are not equal, or take more than a pass");
    proof.require(cut.input != Input::kWhole && cut.scratch, shared + ", but their sums have no place to meet");
    if (cut.input == Input::kColumns)
      proof.require(cut.staged_bytes >= proof.rows() * s.row_bytes / own.split,
                    "it stages its columns in " + proof.str(cut.staged_bytes) + " bytes");
  }

  bool takes_companions() const override { return true; }
  codegen::JobCode emit(const codegen::JobPlace& place) const override { return RowsWriter(place).run(); }
};

const Rows kRows{};
[[maybe_unused]] const bool kRegistered = add_kernel("linear", kRows);

}  // namespace
}  // namespace mpk
