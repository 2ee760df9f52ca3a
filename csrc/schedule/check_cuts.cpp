#include <algorithm>

#include "key_rows.h"
#include "proof.h"
#include "query_tiles.h"
#include "staging.h"

namespace mpk {
namespace {

std::string str(int64_t v) { return std::to_string(v); }

class CutProof {
 public:
  CutProof(const Schedule& schedule, const Job& job)
      : s_(schedule), job_(job), first_(schedule.graph.nodes()[job.body.front()]) {}

  void run() const {
    check_staging();
    if (job_.shape) {
      check_sizes(*job_.shape);
      if (job_.shape->has_boxes()) check_boxes(*job_.shape);
      check_entries(*job_.shape);
      for (int n : job_.body) check_matrix(*job_.shape, n);
      check_coverage(*job_.shape);
    }
    if (first_.def->role == Role::kStream) check_rows_behind();
    if (job_.queries) check_queries(*job_.queries);
    check_tickets();
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { unsound(name_node(s_, first_.id) + ": " + what); }
  void require(bool holds, const std::string& what) const {
    if (!holds) fail(what);
  }

  const Tensor& matrix(int n) const { return s_.graph.nodes()[n].operand(first_.def->tiled_by).tensor; }

  // What is polled, or made by row tasks in front, is nowhere but in shared memory; and that leaves the ring room.
  void check_staging() const {
    for (const OperandSpec& spec : first_.def->operands) {
      const Operand* operand = spec.is_whole ? first_.find(spec.name) : nullptr;
      if (operand == nullptr || s_.warps.consumers == 0) continue;
      const int b = operand->tensor.buffer;
      require(job_.is_staged || (job_.prologue.empty() && !s_.polled[b]),
              "it reads " + name_buffer(s_, b) + " where it is, but that is polled, or made in shared memory");
      const int64_t sharers = job_.shape && job_.is_staged ? job_.shape->split : 1;
      require(sharers == 1 || (job_.prologue.empty() && s_.polled[b]),
              str(sharers) + " workers share tiles, but none of them finds its columns of " + name_buffer(s_, b) +
                  " polled");
      const int64_t bytes = operand->tensor.numel() * size_bytes(operand->tensor.dtype) / sharers;
      require(!job_.is_staged || !job_.shape || job_.staged_bytes >= bytes,
              "it stages " + str(bytes) + " bytes in " + str(job_.staged_bytes));
    }
  }

  void check_sizes(const TileShape& s) const {
    const bool is_positive = std::min({s.tile_rows, s.parts, s.chunk_parts, s.row_bytes, s.chunk_bytes, s.run,
                                       s.in_flight, job_.num_tiles + 1}) > 0;
    require(is_positive, "a size of its tiles is not positive");
    require(s.row_bytes % kAccessBytes == 0 && s.chunk_bytes % kAccessBytes == 0 && s.chunk_bytes <= s.row_bytes,
            "chunks of " + str(s.chunk_bytes) + " bytes of rows of " + str(s.row_bytes) +
                " cannot be copied 16 bytes at a time");
    const int64_t parts = is_side_by_side(s_.graph, job_) ? static_cast<int64_t>(job_.body.size()) : 1;
    require(s.parts == parts && parts % s.chunk_parts == 0, str(parts) + " parts are combined, but a tile has " +
                                                                str(s.parts) + ", " + str(s.chunk_parts) +
                                                                " to an entry");
  }

  void check_boxes(const TileShape& s) const {
    const std::string box = "a box of " + str(s.tile_rows) + " rows of " + str(s.chunk_bytes) + " bytes";
    require(s.tile_rows <= 256 && s.tile_rows % 8 == 0 && s.chunk_bytes % kBoxRowBytes == 0 &&
                s_.warps.slot_bytes % kBoxAlignment == 0,
            box + " is none that the copy engine brings to slots of " + str(s_.warps.slot_bytes));
    require(s.run == 1 && !s.shares_entries && job_.assignment == Assignment::kStatic,
            box + " is not cut up, of tiles that are dealt out beforehand");
    if (s.x_rows > 0)
      check_x(s);
    else
      require(s.chunk_parts == 1 && s_.warps.warpgroups == 0, box + " is taken by one warp");
    if (s.split != 1) check_split(s);
    if (s.window_bytes > 0) check_windows(s);
    require(s.turn_tiles == 0 || (s.window_bytes > 0 && s.turn_tiles * s.parts == kWarpgroups &&
                                  s.turn_tiles < s.pass_tiles && s.split == 1 && !job_.row_sums),
            "the sums of " + str(s.turn_tiles) + " tiles at a time are not a box of each warpgroup");
    for (int n : job_.body)
      require(comes_in_boxes(s_.graph, matrix(n)),
              name_buffer(s_, matrix(n).buffer) +
                  " cannot come in boxes: it is none of the call's matrices of 16-bit " +
                  "elements, or written, or its rows are not multiples of " + str(kBoxRowBytes) + " bytes");
  }

  // Warpgroups take boxes of up to 64 rows of weights at a time, and find x in windows of equally many columns.
  void check_windows(const TileShape& s) const {
    require(s.pass_tiles > 0 && !job_.is_staged && s.tile_rows <= kWarpgroupWarps * kWarpRows &&
                s.window_bytes % s.chunk_bytes == 0 && s.window_bytes <= kWidestWindow * kBoxRowBytes / kBoxColumns &&
                s.row_bytes % (s.split * s.window_bytes) == 0,
            "windows of " + str(s.window_bytes) + " bytes of x are not what warpgroups multiply");
  }

  // Each of the workers that share tiles has one part of one pass, so that none waits for itself.
  void check_split(const TileShape& s) const {
    const int64_t groups = s.split < 1 ? 0 : s_.target.num_workers / s.split;
    const std::string shared = str(s.split) + " workers share tiles";
    require(groups > 0 && s.chunks() % s.split == 0 && job_.num_tiles <= groups * std::max<int64_t>(s.pass_tiles, 1),
            shared + ", but their parts are not equal, or take more than a pass");
    require(job_.pieces && (s.x_rows > 0 || job_.pieces->of_row == s.split),
            shared + ", but their sums have no place to meet");
    require(s.x_rows == 0 || s.tile_rows % (8 * s.split) == 0,
            shared + ", but not the " + str(s.tile_rows) + " rows of each, eight at a time");
  }

  // What warpgroups multiply: all rows of x, which the loader brings beside the weights.
  void check_x(const TileShape& s) const {
    require(
        s_.warps.warpgroups == kWarpgroups && s.x_rows <= kTileXRows && s.x_rows % 8 == 0,
        "tiles of " + str(s.x_rows) + " rows of x are not what " + str(s_.warps.warpgroups) + " warpgroups multiply");
    require(s.chunk_parts == s.parts && s.tile_rows * s.parts <= 256, "an entry does not hold all parts of a tile");
    for (const OperandSpec& spec : first_.def->operands)
      if (spec.is_boxed)
        require(can_be_boxed(first_.operand(spec.name).tensor) && !job_.is_staged,
                name_buffer(s_, first_.operand(spec.name).tensor.buffer) + " cannot come in boxes");
  }

  void check_entries(const TileShape& s) const {
    require(s.entry_bytes() <= s_.warps.slot_bytes,
            "an entry of " + str(s.entry_bytes()) + " bytes exceeds a slot of " + str(s_.warps.slot_bytes));
    require(s.entries() % s.run == 0,
            "runs of " + str(s.run) + " do not make a tile of " + str(s.entries()) + " entries");
    require(!s.shares_entries || s.run == s.entries() || meets_in_shared_memory(s, s_.warps),
            "the sums of a tile of " + str(s.entries()) + " entries, in runs of " + str(s.run) +
                ", may be overwritten before they meet");
  }

  void check_matrix(const TileShape& s, int n) const {
    const Tensor& t = matrix(n);
    require(t.shape.back() * size_bytes(t.dtype) == s.row_bytes,
            "rows of " + str(s.row_bytes) + " bytes are not those of " + name_buffer(s_, t.buffer));
    require(can_be_streamed(t), "rows of " + name_buffer(s_, t.buffer) + " are not aligned for the loader");
  }

  // Every row of every matrix is in one tile.
  void check_coverage(const TileShape& s) const {
    int64_t tiles = 0;
    for (int n : job_.body) {
      const int64_t rows = matrix(n).shape[0];
      require(s.parts == 1 || rows == matrix(first_.id).shape[0], "parts of a tile have different numbers of rows");
      if (s.parts == 1 || n == first_.id) tiles += (rows + s.tile_rows - 1) / s.tile_rows;
    }
    if (s.x_rows > 0) tiles *= (output(first_).tensor.shape[0] + s.x_rows - 1) / s.x_rows;
    require(job_.num_tiles == tiles, str(job_.num_tiles) + " tiles of " + str(s.tile_rows) +
                                         " rows do not cover its matrices, " + str(tiles) + " do");
  }

  // A worker has whole rows of what row tasks take as its tiles end, and stores what the last of them makes.
  void check_rows_behind() const {
    const TileShape shape = job_.shape.value_or(TileShape{});
    int64_t found = 0;
    for (int n : job_.body)
      for (const Node* row : rows_behind(s_.graph, job_, s_.graph.nodes()[n])) {
        const Tensor& x = row->operands.front().tensor;
        const int64_t size = x.shape.back();
        require(shape.x_rows > 0 && shape.parts == 1 && shape.tile_rows / shape.split % size == 0 &&
                    matrix(n).shape[0] % size == 0 && fits_tile_rows(size, x.dtype),
                "row tasks end it, but its tiles of " + str(shape.tile_rows) + " rows, shared by " + str(shape.split) +
                    ", have no whole rows of " + str(size) + ", or no room for them");
        require(contains(job_.unstored, x.buffer),
                name_buffer(s_, x.buffer) + " is needed besides the rows made of it");
        found++;
      }
    const auto is_row = [&](int n) { return s_.graph.nodes()[n].def->role == Role::kRow; };
    require(job_.row_sums || std::count_if(job_.epilogue.begin(), job_.epilogue.end(), is_row) == found,
            "row tasks end it that do not follow each other");
  }

  // Every warp has as many rows as the tensor cores take at once, every row is in one tile, equally many warps have the
  // same ones, and all warps read an entry.
  void check_queries(const QueryTiles& t) const {
    constexpr int64_t kMostBoxRows = 256;
    const Tensor& y = output(first_).tensor;
    const int64_t consumers = s_.warps.consumers, slot = s_.warps.slot_bytes;
    const size_t rank = t.ends > 0 ? 3 : 4;  // behind which heads and elements stand
    require(y.shape.size() == rank && t.heads > 0 && y.shape[rank - 2] % t.heads == 0,
            str(t.heads) + " heads side by side do not make all of them");
    require(t.rows > 0 && kWarpRows * consumers % t.rows == 0 && t.rows % kWarpRows == 0,
            str(t.rows) + " rows of queries are not " + str(kWarpRows) + " for each of some of " + str(consumers) +
                " warps, and for equally many others");
    const int64_t staged = t.ends > 0 || t.rows < kWarpRows * consumers ? united_bytes(s_.warps) : 0;
    require(job_.staged_bytes >= staged,
            "its warps hand each other " + str(staged) + " bytes in " + str(job_.staged_bytes));
    require(t.positions > 0 && t.positions % kWarpRows == 0 && t.positions <= kMostBoxRows,
            "a tile of " + str(t.positions) + " positions is no box that tensor cores take 16 at a time");
    const int64_t of_group =
        t.ends > 0 ? t.ragged_tiles(y.shape[0]) : y.shape[0] * ((y.shape[1] * t.heads + t.rows - 1) / t.rows);
    const int64_t tiles = y.shape[rank - 2] / t.heads * of_group;
    require(job_.num_tiles == tiles,
            str(job_.num_tiles) + " tiles of " + str(t.rows) + " rows do not cover the queries, " + str(tiles) + " do");
    require(s_.warps.empty_arrivals == consumers, "all of " + str(consumers) +
                                                      " consumers read an entry, but its slot " + "is empty after " +
                                                      str(s_.warps.empty_arrivals) + " arrivals");
    int64_t bytes = t.ends > 0 ? 2 * t.positions * (y.shape[2] * size_bytes(y.dtype) + kKeyRowPad) : 0;
    for (const Operand& operand : first_.operands) {
      if (t.ends > 0) break;
      if (!loader_reads(s_.warps, first_, operand) || operand.tensor.dtype != y.dtype) continue;
      require(key_rows(operand.tensor).has_value(),
              name_buffer(s_, operand.tensor.buffer) + " cannot come in boxes of positions");
      bytes += t.positions * operand.tensor.shape.back() * size_bytes(y.dtype);
    }
    require(bytes <= slot && slot % kBoxAlignment == 0,
            "an entry of " + str(bytes) + " bytes does not fit a slot of " + str(slot));
  }

  void check_tickets() const {
    const Tickets& t = job_.tickets;
    if (job_.assignment == Assignment::kStatic) {
      require(t.size == 0 && t.own == 0 && t.drawn == 0, "tiles are dealt out beforehand, but there are tickets");
      return;
    }
    require(job_.shape.has_value() && t.size > 0, "its tiles are drawn, but there are no tickets");
    require(job_.shape->run == 1 || !job_.shape->shares_entries, "tiles are drawn whose runs are dealt out beforehand");
    const int64_t tickets = int64_t(t.own) * s_.target.num_workers + t.drawn;
    require(tickets == (job_.num_tiles + t.size - 1) / t.size,
            str(tickets) + " tickets of " + str(t.size) + " are not those of " + str(job_.num_tiles) + " tiles");
  }

  const Schedule& s_;
  const Job& job_;
  const Node& first_;
};

}  // namespace

void check_cuts(const Schedule& schedule) {
  for (size_t p = 0; p < schedule.phases.size(); p++) {
    int num_streams = 0;
    bool draws = false;
    for (const Job& job : schedule.phases[p].jobs) {
      CutProof(schedule, job).run();
      num_streams += schedule.graph.nodes()[job.body.front()].def->streams();
      draws |= job.assignment == Assignment::kClaimed;
    }
    if (draws && num_streams > 1)
      unsound("phase " + std::to_string(p) + " streams several jobs, so none of them can draw tiles from its counter");
  }
}

}  // namespace mpk
