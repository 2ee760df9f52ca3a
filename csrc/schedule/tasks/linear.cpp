// How a job of linears is cut into tiles, and those into entries of the ring.
#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>

#include "../../arch/arch.h"
#include "../access.h"
#include "../planner.h"
#include "../staging.h"
#include "torch_mpk/abi/table.h"

namespace mpk {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();  // a cost

// A job: linears whose results an epilogue combines are computed side by side, others one after the other.
struct Linears {
  int64_t batch, size, element;  // rows of x, its columns, bytes of an element
  int64_t parts;
  std::vector<int64_t> rows;  // of the weights that follow each other
  int64_t workers, warps, slot_bytes;
  const Arch& arch;

  Linears(const Schedule& schedule, const Job& job, int64_t slot_bytes)
      : workers(schedule.target.num_workers),
        warps(schedule.warps.consumers),
        slot_bytes(slot_bytes),
        arch(arch_of(schedule.target.arch)) {
    const Tensor& x = input(schedule, job);
    batch = x.shape[0], size = x.shape[1], element = size_bytes(x.dtype);
    const bool paired = is_side_by_side(schedule.graph, job);
    parts = paired ? static_cast<int64_t>(job.body.size()) : 1;
    for (int n : job.body)
      if (rows.empty() || !paired) rows.push_back(weight(schedule, n).shape[0]);
  }

  static const Tensor& input(const Schedule& schedule, const Job& job) {
    return schedule.graph.nodes()[job.body.front()].operand("x").tensor;
  }
  static const Tensor& weight(const Schedule& schedule, int n) {
    return schedule.graph.nodes()[n].operand("weight").tensor;
  }

  int64_t slot() const { return slot_bytes / element; }              // elements
  bool exceeds_slot() const { return size * element > slot_bytes; }  // a row

  int64_t tiles(int64_t tile_rows) const {
    int64_t count = 0;
    for (int64_t n : rows) count += (n + tile_rows - 1) / tile_rows;
    return count;
  }
};

// Tiles of so many rows, in chunks that fit a slot.
TileShape chunked(const Linears& job, int64_t tile_rows, int64_t chunk_parts) {
  const int64_t rows = chunk_parts * tile_rows;
  int64_t chunk = job.size;
  if (rows * job.size > job.slot()) {
    chunk = std::max<int64_t>(job.slot() / rows / 256, 1) * 256;
    for (int64_t equal = chunk; equal >= chunk / 2 && equal > 0; equal -= 256)  // equal ones are quicker
      if (job.size % equal == 0) {
        chunk = equal;
        break;
      }
  }
  TileShape shape{tile_rows, job.parts, chunk_parts, job.size * job.element, chunk * job.element};
  shape.run = job.exceeds_slot() ? 1 : shape.chunks();
  return shape;
}

// What a worker's slowest warp takes decides: it takes `rounds` tiles one after the other, each of which costs its
// elements and, for waiting, summing over the warp and storing, as much as some more. With one row of x it takes runs
// of a tile's chunks: of rows that fit a slot all, and otherwise one.
int64_t cost(const Linears& job, const TileShape& shape) {
  constexpr int64_t kTileCost = 1024, kBytesAtOnce = 20 * 8192;
  const int64_t mine = (job.tiles(shape.tile_rows) + job.workers - 1) / job.workers;
  const int64_t chunk = shape.chunk_bytes / job.element, rows = shape.rows_in_entry();
  const auto rounds = [&](int64_t n) { return (n + job.warps - 1) / job.warps; };
  if (job.batch > 1) return rounds(mine) * (kTileCost + shape.tile_rows * job.parts * job.size);
  const bool streams_well = chunk == job.size && rows * job.size * 8 >= job.slot() * 7;
  const bool fits = mine * shape.entries() * job.slot_bytes <= kBytesAtOnce;
  if (job.exceeds_slot() ? shape.tile_rows > 1 : !streams_well && !fits) return kNever;
  return rounds(mine * shape.entries() / shape.run) * (kTileCost + rows * std::min(job.size, shape.run * chunk));
}

// Chunks of a tile fit one slot. With several rows of x, a chunk holds several weight rows, so that a value of x read
// from shared memory is used more than once. With one, tiles that leave slots unfilled, or cut rows that would fit,
// are taken only where the ring holds all of a worker's rows at once; and rows longer than a slot stand alone, so that
// the bits of their sums, which several warps add up, depend on their length alone.
TileShape choose_shape(const Linears& job) {
  const int64_t batch = job.batch;
  const int64_t most = batch == 1 ? 4 : batch <= 4 ? 2 : batch <= 8 ? 4 : 2;  // weight rows in a chunk
  const auto shape_of = [&](int64_t tile_rows) {
    const int64_t rows = job.parts * tile_rows;
    return chunked(job, tile_rows, rows <= most && (batch > 1 || rows * job.size <= job.slot()) ? job.parts : 1);
  };
  TileShape best = shape_of(1);
  for (int64_t tile_rows = 2; tile_rows <= most; tile_rows += batch == 1 ? 1 : tile_rows) {
    const TileShape shape = shape_of(tile_rows);
    if (const int64_t c = cost(job, shape); c != kNever && c <= cost(job, best)) best = shape;
  }
  return best;
}

// What a job may stage where it must.
int64_t most_staged(const Target& target) { return target.smem_bytes * 3 / 5; }

// Where each warp that has tiles of its own puts a tile's results together.
int64_t scratch_bytes(const Linears& job, const TileShape& shape) {
  if (shape.shares_entries) return 0;
  return job.warps * round_up(shape.parts * shape.tile_rows * job.batch * 4, 16);
}

// With several rows of x, weights come in boxes where they can, and the tensor cores compute (linear_rows.cuh). A
// worker takes all its rows at once, K outermost, as far as the sums fit its registers.
class Boxes {
 public:
  // How x comes to shared memory: whole; whole, or where workers share tiles a worker's columns; or in windows, element
  // by element or as boxes.
  enum class Comes { kWhole, kByColumns, kInWindows, kInBoxes };

  Boxes(const Linears& job, Comes x, bool ends_with_norm)
      : job_(job),
        x_(x),
        ends_with_norm_(ends_with_norm),
        by_warpgroups_(x == Comes::kInBoxes && job.arch.has_warpgroup_products && job.batch > kFewRows) {}

  bool is_staged() const { return x_ == Comes::kWhole || x_ == Comes::kByColumns; }

  // Of the shapes that workers may share tiles in the quickest.
  TileShape shape() const {
    TileShape best = shape_of(1);
    if (is_staged()) return best_of_columns().value_or(best);
    for (int64_t split = 2; split <= std::min(kMostSplit, job_.workers); split *= 2) {
      const TileShape shape = shape_of(split);
      if (can_split(shape) && nanoseconds(shape) < nanoseconds(best)) best = shape;
    }
    return best;
  }

  // Elements of x that a worker polls.
  int64_t polled_elements() const {
    const std::optional<TileShape> shape = best_of_columns();
    return job_.batch * job_.size / (shape ? shape->split : 1);
  }

  TileShape shape_of(int64_t split) const { return by_warpgroups_ ? of_warpgroups(split) : of_warps(split); }

  // Boxes of 8 rows are shared out among workers more evenly; those of 16 need less of x at a time.
  TileShape of_warps(int64_t split) const {
    const int64_t workers = job_.workers / split;  // that have tiles of their own
    const int64_t box_rows = job_.batch <= 16 || job_.tiles(kBlockRows) < workers ? 8 : kBlockRows;
    const int64_t columns = job_.batch <= 16 ? 512 : 256;
    const int64_t row_bytes = job_.size * job_.element;
    TileShape shape{box_rows, job_.parts, 1, row_bytes, std::min(columns * job_.element, row_bytes)};
    shape.in_flight = entries_in_flight(kMinSlotBytes) * kMinSlotBytes / shape.entry_bytes();
    const int64_t mine = divide_up(job_.tiles(box_rows), workers);
    const int64_t most = std::max<int64_t>(blocks_held() * warps() * (kBlockRows / box_rows) / job_.parts, 1);
    shape.pass_tiles = std::max<int64_t>(divide_up(mine, divide_up(mine, most)), 1);
    shape.split = split;
    return shape;
  }

  // Each warpgroup multiplies up to 64 rows of weights with all of x. Boxes are as high as is quickest: lower ones
  // share the rows out more evenly, but are as many products each, and fewer fit a pass, each of which reads x.
  TileShape of_warpgroups(int64_t split) const {
    TileShape best = of_warpgroups(split, kWarpgroupWarps * kWarpRows);
    for (int64_t rows = best.tile_rows - 8; rows > 0; rows -= 8) {
      const TileShape shape = of_warpgroups(split, rows);
      if (nanoseconds(shape) < nanoseconds(best)) best = shape;
    }
    return best;
  }

  TileShape of_warpgroups(int64_t split, int64_t box_rows) const {
    // In blocks of 64 columns: a worker has whole windows, and a window whole boxes, which fit a slot.
    const int64_t of_window = std::gcd(job_.size / kBoxColumns / split, int64_t{kWidestWindow / kBoxColumns});
    const int64_t of_box = std::gcd(of_window, kMinSlotBytes / (box_rows * kBoxRowBytes));
    TileShape shape{box_rows, job_.parts, 1, job_.size * job_.element, of_box * kBoxRowBytes};
    shape.in_flight = entries_in_flight(kMinSlotBytes) * kMinSlotBytes / shape.entry_bytes();
    const int64_t share = divide_up(job_.tiles(box_rows), job_.workers / split);
    const int64_t most = std::max<int64_t>(kWarpgroups * kMostHeld / job_.parts, 1);
    shape.pass_tiles = std::max<int64_t>(divide_up(share, divide_up(share, most)), 1);
    shape.split = split;
    shape.window_bytes = of_window * kBoxRowBytes;
    // Where the sums of a pass take more room than the windows, in whose place they stand.
    const int64_t boxes = shape.pass_tiles * shape.parts;
    const bool can_take_turns = boxes > kWarpgroups && kWarpgroups % shape.parts == 0 && split == 1 && !ends_with_norm_;
    if (can_take_turns && sums_bytes(shape, boxes) > windows_bytes(shape)) shape.turn_tiles = kWarpgroups / shape.parts;
    return shape;
  }

  // Where the sums of workers that share tiles meet: words of two floats and their tags, see finish_shared.
  std::optional<Pieces> pieces(const TileShape& shape) const {
    if (shape.split == 1) return std::nullopt;
    const int64_t bytes = divide_up(shape.pass_tiles * shape.tile_rows, 32) * 32 * job_.batch * kTaggedFloatBytes;
    return Pieces{job_.workers / shape.split * shape.split, shape.split, 1, 1, bytes};
  }

  // What a worker leaves of each row where a norm follows: a sum of squares for every 32 of the results that it makes
  // of the row in a pass.
  RowSums row_sums(const TileShape& shape) const {
    const int64_t groups = job_.workers / shape.split, tiles = divide_up(job_.tiles(shape.tile_rows), groups);
    return {groups * divide_up(tiles, shape.pass_tiles) * divide_up(shape.pass_tiles * shape.tile_rows, 32)};
  }

  // See RowsShape in linear_rows_shape.cuh.
  int64_t staged_bytes(const TileShape& shape) const {
    if (shape.window_bytes > 0) {
      const int64_t boxes = shape.pass_tiles * shape.parts, at_a_time = shape.turn_tiles > 0 ? kWarpgroups : boxes;
      const int64_t sums = sums_bytes(shape, boxes == 1 ? kWarpgroups : at_a_time);
      return std::max(windows_bytes(shape), sums) + kBoxAlignment;
    }
    const int64_t blocks = divide_up(shape.pass_tiles * shape.parts, kBlockRows / shape.tile_rows);
    const int64_t sums = std::max(blocks, warps()) * round_up(job_.batch, 8) * kSumPitch * 4;
    const int64_t x = job_.batch * ((is_staged() ? shape.row_bytes / shape.split : shape.chunk_bytes) + kAccessBytes);
    if (is_staged()) return round_up(x, kSharedAlignment) + sums;
    const int64_t box = round_up(round_up(job_.batch, 8) * shape.chunk_bytes, kBoxAlignment);
    return x_ == Comes::kInBoxes ? std::max(kWindows * box, sums) + kBoxAlignment : std::max(kWindows * x, sums);
  }

  // Of x that is staged whole although it could come in windows: beyond that the ring's room is worth more.
  static constexpr int64_t kMostWhole = 100 * 1024;

 private:
  static constexpr int64_t kBlockRows = 16;  // of weights, that a warp multiplies at a time
  static constexpr int64_t kMostSplit = 4;
  static constexpr int64_t kFewRows = 32;  // of x, that warps multiply as quickly as warpgroups
  static constexpr int64_t kMostHeld = 2;  // boxes that a warpgroup holds the sums of, 32 in each thread

  // x in shared memory that is more than a worker may poll, but whose columns are not: as few as may be, if they take
  // no more room than is worth it. Of fewer rows windows are as quick.
  std::optional<TileShape> best_of_columns() const {
    constexpr int64_t kMostOfColumns = 48 * 1024, kFewestRows = 17;
    const bool is_too_much = job_.batch * job_.size > kMaxPolledElements;
    if (x_ != Comes::kByColumns || !is_too_much || job_.batch < kFewestRows || job_.batch > kFewRows)
      return std::nullopt;
    for (int64_t split = kMostSplit; split > 1; split /= 2) {
      if (split > job_.workers) continue;
      const TileShape shape = shape_of(split);
      if (can_split(shape) && job_.batch * shape.row_bytes / split <= kMostOfColumns) return shape;
    }
    return std::nullopt;
  }

  // Chunks in equal parts, tiles in one pass, and of x the rows that a warp finishes together. What comes through row
  // tasks does not come by columns.
  bool can_split(const TileShape& shape) const {
    const int64_t workers = job_.workers / shape.split;
    return x_ != Comes::kWhole && job_.parts == 1 && job_.batch % (4 * shape.split) == 0 &&
           shape.chunks() % shape.split == 0 && job_.tiles(shape.tile_rows) <= workers * shape.pass_tiles;
  }

  // What a worker takes, by the bandwidths of its chip; and by what was measured on an H200 (docs/experiments.md): what
  // a warpgroup takes for a chunk at least, and both for the products of a row of weights with 64 columns.
  double nanoseconds(const TileShape& shape) const {
    constexpr double kOfChunk = 250, kOfRow = 73.0 / 64;
    const Costs& costs = job_.arch.costs;
    const FewRowsCosts& few = by_warpgroups_ ? costs.by_warpgroups : costs.by_warps;
    const int64_t tiles = job_.tiles(shape.tile_rows), share = divide_up(tiles, job_.workers / shape.split);
    const double split = double(shape.split),
                 of_worker = by_warpgroups_ ? double(share) / split : double(tiles) / double(job_.workers);
    const double rows = double(shape.tile_rows * job_.parts) * of_worker, weights = rows * double(shape.row_bytes);
    const double passes = double(divide_up(share, shape.pass_tiles));
    const double x = passes * double(job_.batch) * double(shape.row_bytes) / split;
    const double sums = 8 * rows * double(job_.batch) * (split - 1);  // sent, and as many received
    const double chunks = double(job_.parts) * of_worker * double(shape.chunks()) / kWarpgroups;
    const double multiplied = by_warpgroups_ ? std::max(chunks * kOfChunk, weights / kBoxRowBytes * kOfRow) : 0;
    const double products = std::max({weights / costs.memory_bytes_per_ns, x / few.windows_bytes_per_ns,
                                      (weights + x) / few.bytes_per_ns, multiplied});
    return products + (shape.split == 1 ? 0 : few.hop_ns + sums / few.sums_bytes_per_ns);
  }

  // By warpgroups.
  int64_t windows_bytes(const TileShape& shape) const {
    return windows_held(static_cast<int>(shape.window_bytes / job_.element)) * shape.window_bytes * kMultipliedRows;
  }
  static int64_t sums_bytes(const TileShape& shape, int64_t boxes) {
    return boxes * divide_up(shape.tile_rows, kWarpRows) * kSumPitch * 4 * kMultipliedRows;
  }
  int64_t warps() const { return job_.warps - (is_staged() ? 0 : kBringingWarps); }  // those that multiply
  int64_t blocks_held() const {
    const bool is_large = is_staged() && job_.batch * job_.size * job_.element > kMostWhole / 2;
    return is_large ? 1 : job_.batch <= 16 ? 3 : 2;
  }

  const Linears& job_;
  const Comes x_;
  const bool ends_with_norm_;
  const bool by_warpgroups_;
};

// With more rows of x still, warpgroups multiply tiles of rows of x by rows of weights (linear_tiles.cuh).
class Tiles {
 public:
  // Row tasks that end the job take rows of `row` elements, or fewer, whole from each worker.
  explicit Tiles(const Linears& job, int64_t row = 1) : job_(job), row_(row) {}

  // Nothing where no tile takes as many parts.
  std::optional<TileShape> shape() const {
    std::optional<TileShape> best;
    for (int64_t columns : {32, 64, 96, 128, 192, 256}) {  // of results, as many as the tensor cores take at a time
      if (job_.parts > 4 || columns % (job_.parts * strip_columns(job_.parts)) != 0) continue;
      TileShape shape = shape_of(columns);
      for (shape.split = 1; shape.split <= kMostSplit; shape.split++)
        if (can_be_split(shape) && has_whole_rows(shape) && (!best || cost(shape) < cost(*best))) best = shape;
    }
    return best;
  }

  int64_t x_tiles() const { return (job_.batch + kTileXRows - 1) / kTileXRows; }
  int64_t count(const TileShape& shape) const { return x_tiles() * job_.tiles(shape.tile_rows); }
  // See TilesShape in linear_tiles.cuh.
  int64_t staged_bytes() const { return job_.warps * kStripBytes; }
  // What the workers of each tile send each other, every one its sums but for those of its own share.
  std::optional<Pieces> pieces(const TileShape& shape) const {
    if (shape.split == 1) return std::nullopt;
    Pieces pieces{count(shape) * (shape.split - 1)};
    pieces.result_bytes = kTileXRows * shape.tile_rows * shape.parts * kTaggedFloatBytes;
    return pieces;
  }

  // Cycles of the slowest worker. A step of 64 columns takes what tensor cores do; or its boxes, of which one
  // multiprocessor gets so many bytes a cycle from L2, all together fewer, of weights that come from memory fewer
  // still, and none sooner than the ring's slots take to come, which is longer from memory. Behind the
  // steps come the sums that are sent and received, the results, and the way to the next tile. Measured, see
  // docs/experiments.md: a sum that is sent costs most of all, since it is written and read twice as wide.
  double cost(const TileShape& shape) const {
    const Costs& costs = job_.arch.costs;
    constexpr double kSlots = 4, kOfColumn = 40, kOfTile = 1500, kOfSentColumn = 150;
    const int64_t units = count(shape) * shape.split, columns = shape.tile_rows * shape.parts;
    const double active = double(std::min(units, job_.workers)), weights = double(columns * kBoxRowBytes);
    const double bytes = double(shape.x_rows * kBoxRowBytes) + weights;
    const double blocks = double(shape.chunk_bytes) / kBoxRowBytes;
    const bool from_memory = x_tiles() == 1;  // else other tiles have brought them to L2
    const double step = std::max({costs.column_cycles * double(columns), bytes / costs.own_bytes_per_cycle,
                                  bytes * active / costs.all_bytes_per_cycle,
                                  from_memory ? weights * active / costs.all_memory_bytes_per_cycle : 0,
                                  (from_memory ? costs.memory_trip_cycles : costs.trip_cycles) / (kSlots * blocks)});
    const double steps = double(shape.row_bytes) / kBoxRowBytes / double(shape.split);
    const double share = double(columns) / double(shape.split);
    const double others = shape.split == 1 ? 0 : costs.hop_cycles + kOfSentColumn * (double(columns) - share);
    return double((units + job_.workers - 1) / job_.workers) * (steps * step + others + kOfColumn * share + kOfTile);
  }

  // And of a phase of row tasks, so many rows, that the job does not end with: an event, the way of a row through a
  // warp, and that of all through the workers.
  double cost_of_rows(int64_t rows) const {
    constexpr double kOfRow = 3000, kOfRows = 55;
    return job_.arch.costs.event_cycles + kOfRow + kOfRows * double(rows) / double(job_.workers);
  }

 private:
  static constexpr int64_t kMostSplit = 16, kWidestSplit = 128;

  TileShape shape_of(int64_t columns) const {
    TileShape shape{columns / job_.parts, job_.parts, job_.parts, job_.size * job_.element};
    shape.x_rows = std::min<int64_t>(kTileXRows, round_up(job_.batch, 8));
    const int64_t fitting = job_.slot_bytes / (shape.rows_in_entry() * kBoxRowBytes);
    shape.chunk_bytes = std::min(std::max<int64_t>(fitting, 1) * kBoxRowBytes, shape.row_bytes);
    return shape;
  }

  // In parts of equally many entries, each with a worker of its own that finishes an equal share of the results; and
  // beside wider ones a thread has no registers for those of others.
  bool can_be_split(const TileShape& shape) const {
    return shape.split == 1 ||
           (shape.chunks() % shape.split == 0 && shape.tile_rows % (8 * shape.split) == 0 &&
            count(shape) * shape.split <= job_.workers && shape.tile_rows * shape.parts <= kWidestSplit);
  }

  bool has_whole_rows(const TileShape& shape) const { return shape.tile_rows / shape.split % row_ == 0; }

  const Linears& job_;
  const int64_t row_;
};

class LinearPlanner : public Planner {
  bool needs_warpgroups(const Node& node) const override { return node.operand("x").tensor.shape[0] > kMostRows; }

  // Linears of several rows of x have no say: there x takes the ring's room.
  double filled_bytes(const Schedule& schedule, const Job& job, int64_t slot_bytes) const override {
    const Linears linears(schedule, job, slot_bytes);
    if (linears.batch != 1 || linears.size < 1) return 0;
    const TileShape shape = choose_shape(linears);
    int64_t rows = 0;
    for (int n : job.body) rows += Linears::weight(schedule, n).shape[0];
    return double(rows) * double(shape.chunks() * slot_bytes) / double(shape.rows_in_entry());
  }

  // Rows without their factors may be as large as the squares of others: beyond what float16 holds.
  bool splits_norms(const Schedule& schedule, const Job& job) const override {
    const Linears linears(schedule, job, 0);
    constexpr int64_t kMostOfWindows = 96 * 1024;  // that windows of x take, or the sums in their place
    return schedule.warps.warpgroups == 0 && linears.size > 0 && schedule.target.smem_bytes / 2 >= kMostOfWindows &&
           Linears::input(schedule, job).dtype == DType::kBF16 && takes_boxes(schedule, job, linears);
  }

  bool ends_with_rows(const Schedule& schedule, const Job& job) const override {
    const Linears linears(schedule, job, kTileSlotBytes);
    if (linears.parts > 1 || linears.size < 1) return false;
    int64_t rows = 0;
    for (int n : job.body) {
      const auto tasks = rows_behind(schedule.graph, job, schedule.graph.nodes()[n]);
      if (tasks.empty()) continue;
      const Tensor& x = tasks.front()->operands.front().tensor;
      const int64_t size = x.shape.back(), columns = Linears::weight(schedule, n).shape[0];
      if (!fits_tile_rows(size, x.dtype) || columns % size != 0) return false;
      rows += linears.batch * (columns / size);
    }
    const Tiles any(linears), whole(linears, whole_rows(schedule.graph, job));
    const std::optional<TileShape> shape = any.shape(), with_rows = whole.shape();
    return shape && with_rows && comes_in_tiles(schedule, job) &&
           whole.cost(*with_rows) <= any.cost(*shape) + any.cost_of_rows(rows);
  }

  int64_t polled_elements(const Schedule& schedule, const Job& job, const Tensor& made) const override {
    const Linears linears(schedule, job, schedule.warps.slot_bytes);
    if (!comes_by_columns(schedule, job, linears)) return made.numel();
    const bool ends_with_norm = norm_of(job) >= 0;
    const Boxes boxes(linears, Boxes::Comes::kByColumns, ends_with_norm);
    return boxes.staged_bytes(boxes.shape()) > room_beside_boxes(schedule) ? made.numel() : boxes.polled_elements();
  }

  void cut(const Schedule& schedule, Job& job) const override {
    const Linears linears(schedule, job, schedule.warps.slot_bytes);
    if (linears.batch < 1 || linears.size < 1) return;
    if (schedule.warps.warpgroups > 0) return cut_tiles(schedule, job, linears);
    const bool streams = linears.size * linears.element % kAccessBytes == 0 &&
                         std::all_of(job.body.begin(), job.body.end(),
                                     [&](int n) { return can_be_streamed(Linears::weight(schedule, n)); });
    if (streams && cut_boxes(schedule, job, linears)) return;
    job.is_staged |= !streams;  // what takes a weight as it is takes x from shared memory
    const int64_t x_bytes = linears.batch * round_up(linears.size * linears.element, 16);
    if (job.is_staged && x_bytes > most_staged(schedule.target)) return;
    TileShape shape{1, linears.parts};
    if (streams) {
      shape = choose_shape(linears);
      shape.in_flight = entries_in_flight(static_cast<uint32_t>(shape.entry_bytes()));
      shape.shares_entries = linears.batch == 1 && job.is_staged && linears.parts * shape.tile_rows <= 4 &&
                             (shape.run == shape.entries() || meets_in_shared_memory(shape, schedule.warps));
    }
    const int64_t bytes = (job.is_staged ? x_bytes : 0) + scratch_bytes(linears, shape);
    if (bytes > room(schedule)) return;
    job.staged_bytes = bytes;
    job.num_tiles = linears.tiles(shape.tile_rows);
    if (streams) job.shape = shape;
  }

 private:
  static bool takes_boxes(const Schedule& schedule, const Job& job, const Linears& linears) {
    return linears.arch.has_bulk_copies && linears.batch >= 2 && linears.batch <= kMostRows &&
           schedule.warps.slot_bytes % kBoxAlignment == 0 && has_boxed_weights(schedule, job);
  }

  // Whether a worker may find columns of x alone, if they are polled. Rows whose norm's factors are to be found come in
  // windows.
  static bool comes_by_columns(const Schedule& schedule, const Job& job, const Linears& linears) {
    const Tensor& x = Linears::input(schedule, job);
    return job.prologue.empty() && takes_boxes(schedule, job, linears) && has_aligned_rows(x) &&
           find_norm(schedule, x.buffer) == nullptr;
  }

  static Boxes::Comes how_x_comes(const Schedule& schedule, const Job& job, const Linears& linears) {
    const Tensor& x = Linears::input(schedule, job);
    if (schedule.polled[x.buffer] && comes_by_columns(schedule, job, linears)) return Boxes::Comes::kByColumns;
    const bool is_short = x.numel() * linears.element <= Boxes::kMostWhole;
    const bool lacks_factors = find_norm(schedule, x.buffer) != nullptr;
    if (!job.prologue.empty() || schedule.polled[x.buffer] || !has_aligned_rows(x) || (is_short && !lacks_factors))
      return Boxes::Comes::kWhole;
    return can_be_windowed(schedule.graph, x) ? Boxes::Comes::kInBoxes : Boxes::Comes::kInWindows;
  }

  // For what is staged.
  static int64_t room_beside_boxes(const Schedule& schedule) {
    constexpr int64_t kMoreSlots = 2;  // a warp holds a box while the loader fills two entries together
    return room(schedule) - kBoxAlignment - kMoreSlots * schedule.warps.slot_bytes;
  }

  static bool has_boxed_weights(const Schedule& schedule, const Job& job) {
    return std::all_of(job.body.begin(), job.body.end(),
                       [&](int n) { return comes_in_boxes(schedule.graph, Linears::weight(schedule, n)); });
  }

  static bool comes_in_tiles(const Schedule& schedule, const Job& job) {
    return can_be_boxed(Linears::input(schedule, job)) && has_boxed_weights(schedule, job);
  }

  static void cut_tiles(const Schedule& schedule, Job& job, const Linears& linears) {
    const Tiles tiles(linears, whole_rows(schedule.graph, job));
    const std::optional<TileShape> shape = tiles.shape();
    if (!shape || !comes_in_tiles(schedule, job)) return;
    job.staged_bytes = tiles.staged_bytes();
    job.num_tiles = tiles.count(*shape);
    job.pieces = tiles.pieces(*shape);
    job.shape = shape;
  }

  static bool cut_boxes(const Schedule& schedule, Job& job, const Linears& linears) {
    const Tensor& x = Linears::input(schedule, job);
    if (!takes_boxes(schedule, job, linears)) return false;
    const bool lacks_factors = find_norm(schedule, x.buffer) != nullptr;
    const bool ends_with_norm = norm_of(job) >= 0;
    const Boxes boxes(linears, how_x_comes(schedule, job, linears), ends_with_norm);
    const TileShape shape = boxes.shape();
    const int64_t bytes = boxes.staged_bytes(shape) + (lacks_factors ? kMultipliedRows * 4 : 0);
    if (bytes > room_beside_boxes(schedule)) return false;
    job.is_staged = boxes.is_staged();
    job.staged_bytes = bytes;
    job.num_tiles = linears.tiles(shape.tile_rows);
    job.shape = shape;
    job.pieces = boxes.pieces(shape);
    if (ends_with_norm) job.row_sums = boxes.row_sums(shape);
    return true;
  }

  static constexpr int64_t kMostRows = 64;
};

const LinearPlanner kPlanner{};
[[maybe_unused]] const bool kRegistered = planners().add("linear", kPlanner);

}  // namespace
}  // namespace mpk
