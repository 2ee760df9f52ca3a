#include <algorithm>

#include "kernel.h"
#include "proof.h"
#include "staging.h"

namespace mpk {
namespace {

std::string str(int64_t v) { return std::to_string(v); }

// Properties of all kernels' cuts.
class CutCheck {
 public:
  CutCheck(const Schedule& schedule, const Job& job)
      : proof_(schedule, job), s_(schedule), job_(job), cut_(job.cut), first_(proof_.first()) {}

  void run() const {
    check_run();
    check_staging();
    if (cut_.shape) {
      check_sizes(*cut_.shape);
      if (cut_.shape->is_boxed) check_boxes(*cut_.shape);
      check_entries(*cut_.shape);
      for (int n : job_.body) check_matrix(*cut_.shape, n);
      check_coverage(*cut_.shape);
    }
    if (first_.def->role == Role::kStream && job_.run.empty()) check_rows_behind();
    check_tickets();
    check_kernel();
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { proof_.fail(what); }
  void require(bool holds, const std::string& what) const { proof_.require(holds, what); }

  const Tensor& matrix(int n) const { return s_.graph.nodes()[n].operand(first_.def->tiled_by).tensor; }

  // The kernel proves the rest of its cut. Code generation says why a job has no kernel.
  void check_kernel() const {
    if (s_.target.device != "cuda" || cut_.kernel.empty()) return;
    const std::vector<const Kernel*> all = kernels_of(s_, job_);
    const Kernel* kernel = find_kernel(cut_.kernel);
    require(std::find(all.begin(), all.end(), kernel) != all.end(), "it has no kernel '" + cut_.kernel + "'");
    require(tiles_behind(s_.graph, job_).empty() || kernel->ends_with_tiles(s_, job_),
            "tile tasks end it that are not tiles of its rows");
    kernel->prove(proof_);
  }

  void check_run() const {
    if (job_.run.empty()) return;
    require(job_.prologue.empty() && job_.epilogue.empty() && !cut_.shape && job_.assignment == Assignment::kStatic,
            "a run is a job of its nodes alone, whose kernel itself loads what they read");
    for (int n : job_.body)
      for (const Operand& operand : s_.graph.nodes()[n].operands)
        require(!s_.polled[operand.tensor.buffer],
                name_buffer(s_, operand.tensor.buffer) + " is polled, which a run of nodes does not do");
  }

  // Operands that are polled, or made by row tasks in front, must be staged, and must leave the ring room.
  void check_staging() const {
    for (const OperandSpec& spec : first_.def->operands) {
      const Operand* operand = spec.is_whole ? first_.find(spec.name) : nullptr;
      if (operand == nullptr || s_.warps.consumers == 0) continue;
      const int b = operand->tensor.buffer;
      require(cut_.is_staged() || (job_.prologue.empty() && !s_.polled[b]),
              "it reads " + name_buffer(s_, b) + " where it is, but that is polled, or made in shared memory");
      require(cut_.input != Input::kColumns || (job_.prologue.empty() && s_.polled[b]),
              "its workers stage columns of " + name_buffer(s_, b) + ", but do not find them polled");
      const int64_t bytes = operand->tensor.numel() * size_bytes(operand->tensor.dtype);
      require(cut_.input != Input::kWhole || !cut_.shape || cut_.staged_bytes >= bytes,
              "it stages " + str(bytes) + " bytes in " + str(cut_.staged_bytes));
    }
  }

  void check_sizes(const TileShape& s) const {
    const bool is_positive = std::min({s.tile_rows, s.parts, s.chunk_parts, s.row_bytes, s.chunk_bytes, s.run,
                                       s.in_flight, s.readers, cut_.num_tiles + 1}) > 0;
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
    const int64_t lines = s.x_rows > 0 ? kAccessBytes : kBoxRowBytes;  // beside x, weights may have narrower rows
    require(s.tile_rows <= 256 && s.tile_rows % 8 == 0 && s.chunk_bytes % lines == 0 &&
                s_.warps.slot_bytes % kBoxAlignment == 0,
            box + " is none that the copy engine copies to slots of " + str(s_.warps.slot_bytes));
    require(s.run == 1 && !s.shares_entries && job_.assignment == Assignment::kStatic,
            box + " is not cut up, of tiles that are dealt out beforehand");
    for (int n : job_.body)
      require(
          can_load_made_boxes(s_.graph, matrix(n)),
          name_buffer(s_, matrix(n).buffer) +
              " cannot come in boxes: it is none of the launch's matrices of 16-bit elements, or an input that is " +
              "written, or its rows are not multiples of " + str(kBoxRowBytes) + " bytes");
    if (s.x_rows > 0) check_x();
  }

  // Rows of x that the loader copies beside the weights.
  void check_x() const {
    for (const OperandSpec& spec : first_.def->operands)
      if (spec.is_boxed)
        require(can_be_boxed(first_.operand(spec.name).tensor) && cut_.input == Input::kEntries,
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

  // Every row of every matrix is in exactly one tile.
  void check_coverage(const TileShape& s) const {
    int64_t tiles = 0;
    for (int n : job_.body) {
      const int64_t rows = matrix(n).shape[0];
      require(s.parts == 1 || rows == matrix(first_.id).shape[0], "parts of a tile have different numbers of rows");
      if (s.parts == 1 || n == first_.id) tiles += (rows + s.tile_rows - 1) / s.tile_rows;
    }
    if (s.x_rows > 0) tiles *= (output(first_).tensor.shape[0] + s.x_rows - 1) / s.x_rows;
    require(cut_.num_tiles == tiles, str(cut_.num_tiles) + " tiles of " + str(s.tile_rows) +
                                         " rows do not cover its matrices, " + str(tiles) + " do");
  }

  // The row tasks at a job's end are the only readers of their operands, and each takes the result of the one before.
  void check_rows_behind() const {
    int64_t found = 0;
    for (int n : job_.body)
      for (const Node* row : rows_behind(s_.graph, job_, s_.graph.nodes()[n])) {
        const Tensor& x = row->operands.front().tensor;
        require(cut_.shape && matrix(n).shape[0] % x.shape.back() == 0,
                "row tasks end it, but its tiles have no whole rows of " + str(x.shape.back()));
        require(contains(job_.unstored, x.buffer),
                name_buffer(s_, x.buffer) + " is needed besides the rows made of it");
        found++;
      }
    const auto is_row = [&](int n) { return s_.graph.nodes()[n].def->role == Role::kRow; };
    require(cut_.row_sums || std::count_if(job_.epilogue.begin(), job_.epilogue.end(), is_row) == found,
            "row tasks end it that do not follow each other");
  }

  void check_tickets() const {
    const Tickets& t = job_.tickets;
    if (job_.assignment == Assignment::kStatic) {
      require(t.size == 0 && t.own == 0 && t.drawn == 0, "tiles are dealt out beforehand, but there are tickets");
      return;
    }
    require(cut_.shape.has_value() && t.size > 0, "its tiles are drawn, but there are no tickets");
    require(cut_.shape->run == 1 || !cut_.shape->shares_entries, "tiles are drawn whose runs are dealt out beforehand");
    const int64_t tickets = int64_t(t.own) * s_.target.num_workers + t.drawn;
    require(tickets == (cut_.num_tiles + t.size - 1) / t.size,
            str(tickets) + " tickets of " + str(t.size) + " are not those of " + str(cut_.num_tiles) + " tiles");
  }

  const CutProof proof_;
  const Schedule& s_;
  const Job& job_;
  const Cut& cut_;
  const Node& first_;
};

}  // namespace

void check_cuts(const Schedule& schedule) {
  for (size_t p = 0; p < schedule.phases.size(); p++) {
    int num_streams = 0;
    bool draws = false;
    for (const Job& job : schedule.phases[p].jobs) {
      CutCheck(schedule, job).run();
      num_streams += schedule.graph.nodes()[job.body.front()].def->streams();
      draws |= job.assignment == Assignment::kClaimed;
    }
    if (draws && num_streams > 1)
      unsound("phase " + std::to_string(p) + " streams several jobs, so none of them can draw tiles from its counter");
  }
}

}  // namespace mpk
