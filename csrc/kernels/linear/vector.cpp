// Linears on vector units. With few rows of x, weights are streamed through the ring, row by row. Jobs that no other
// kernel takes, such as more rows of 32-bit elements, read weights in place.
#include "../../codegen/text.h"
#include "../../schedule/kernel.h"
#include "../../schedule/proof.h"
#include "linears.h"
#include "tile_loop.h"
#include "torch_mpk/abi/table.h"
#include "writer.h"

namespace mpk {
namespace {

constexpr int64_t kMostRows = 16;  // rows of x for which weights are streamed
// Reading in place: rows of x; weights side by side, for whose sums a warp has a lane each.
constexpr int64_t kDirectRows = 8, kMostParts = 4;
// Libraries are faster with more rows of x, of 16-bit elements and of others, but for weights as small as a router's.
constexpr int64_t kMostWideRows = 64, kMostScores = 512;

int64_t slot(const Linears& job) { return job.slot_bytes / job.element; }                  // elements
bool exceeds_slot(const Linears& job) { return job.size * job.element > job.slot_bytes; }  // a row

// Tiles of so many rows, in chunks that fit a slot.
TileShape chunked(const Linears& job, int64_t tile_rows, int64_t chunk_parts) {
  const int64_t rows = chunk_parts * tile_rows;
  int64_t chunk = job.size;
  if (rows * job.size > slot(job)) {
    chunk = std::max<int64_t>(slot(job) / rows / 256, 1) * 256;
    for (int64_t equal = chunk; equal >= chunk / 2 && equal > 0; equal -= 256)  // equal chunks are faster
      if (job.size % equal == 0) {
        chunk = equal;
        break;
      }
  }
  TileShape shape{tile_rows, job.parts, chunk_parts, job.size * job.element, chunk * job.element};
  shape.run = exceeds_slot(job) ? 1 : shape.chunks();
  return shape;
}

// Whether to consider a shape with one row of x: it fills slots, or the ring holds all rows of a worker. Rows longer
// than a slot have tiles of their own, so that the bits of their sums, which several warps add up, depend on the row's
// length alone.
bool is_considered(const Linears& job, const TileShape& shape) {
  constexpr int64_t kBytesAtOnce = 20 * 8192;
  if (job.batch > 1) return true;
  if (exceeds_slot(job)) return shape.tile_rows == 1;
  const int64_t mine = divide_up(job.tiles(shape.tile_rows), job.workers);
  const bool streams_well =
      shape.chunk_bytes == shape.row_bytes && shape.rows_in_entry() * job.size * 8 >= slot(job) * 7;
  return streams_well || mine * shape.entries() * job.slot_bytes <= kBytesAtOnce;
}

// The elements of a worker's slowest warp, by which shapes are compared. It takes tiles one after the other; each costs
// its elements, and some more for waiting, the sum over lanes, and the store. With one row of x it takes runs of a
// tile's chunks: all of them if rows fit a slot, otherwise one.
int64_t elements(const Linears& job, const TileShape& shape) {
  constexpr int64_t kOfTile = 1024;
  const int64_t mine = divide_up(job.tiles(shape.tile_rows), job.workers);
  if (job.batch > 1) return divide_up(mine, job.warps) * (kOfTile + shape.tile_rows * job.parts * job.size);
  const int64_t of_run = std::min(job.size, shape.run * (shape.chunk_bytes / job.element));
  return divide_up(mine * shape.entries() / shape.run, job.warps) * (kOfTile + shape.rows_in_entry() * of_run);
}

// A tile's chunks fit a slot. With several rows of x, a chunk holds several weight rows, to use each value of x from
// shared memory more than once.
TileShape choose_shape(const Linears& job) {
  const int64_t batch = job.batch;
  const int64_t most = batch == 1 ? 4 : batch <= 4 ? 2 : batch <= 8 ? 4 : 2;  // weight rows in a chunk
  const auto shape_of = [&](int64_t tile_rows) {
    const int64_t rows = job.parts * tile_rows;
    return chunked(job, tile_rows, rows <= most && (batch > 1 || rows * job.size <= slot(job)) ? job.parts : 1);
  };
  TileShape best = shape_of(1);
  for (int64_t tile_rows = 2; tile_rows <= most; tile_rows += batch == 1 ? 1 : tile_rows) {
    const TileShape shape = shape_of(tile_rows);
    if (is_considered(job, shape) && (!is_considered(job, best) || elements(job, shape) <= elements(job, best)))
      best = shape;
  }
  return best;
}

// The time of the worker with most tiles: of its bytes at its share of the bandwidth, or of its slowest warp. Each row
// of x but the first adds an eighth of the bytes' time for its products, which is an estimate.
double nanoseconds(const Linears& job, const TileShape& shape) {
  constexpr double kOfRow = 1.0 / 8;
  const int64_t mine = divide_up(job.tiles(shape.tile_rows), job.workers);
  const int64_t runs = job.batch > 1 ? mine : mine * shape.entries() / shape.run;
  const double bytes = double(mine * shape.tile_rows * job.parts * shape.row_bytes);
  const double load = bytes / job.arch.costs.memory_bytes_per_ns * (1 + kOfRow * double(job.batch - 1));
  return std::max(load, double(divide_up(runs, job.warps)) * job.arch.costs.warp_tile_ns);
}

bool can_stream(const Schedule& schedule, const Job& job, const Linears& linears) {
  return linears.size * linears.element % kAccessBytes == 0 && all_weights(schedule, job, can_be_streamed);
}

// Scratch in which each warp with tiles of its own combines a tile's results.
int64_t scratch_bytes(const Linears& job, const TileShape& shape) {
  if (shape.shares_entries) return 0;
  return job.warps * round_up(shape.parts * shape.tile_rows * job.batch * 4, 16);
}

bool fits(const Schedule& schedule, const Linears& linears) {
  return linears.x_bytes() <= most_staged(schedule.target);
}

std::string too_large(const Job& job, const Linears& linears) {
  return "x of " + std::to_string(linears.batch) + " x " + std::to_string(linears.size) +
         " elements does not fit shared memory" +
         (job.prologue.empty() ? "" : "; schedule the row tasks in front of it as jobs of their own");
}

std::optional<std::string> refuses_any(const Schedule& schedule, const Job& job, const Linears& linears) {
  if (linears.are_empty()) return "x is empty";
  if (norm_of(job) >= 0) return "it ends with a norm";
  if (find_norm(schedule, Linears::input(schedule, job).buffer) != nullptr) return "rows of x lack factors";
  return std::nullopt;
}

// ---- weights that come through the ring ----

class VectorWriter : public codegen::LinearWriter {
 public:
  explicit VectorWriter(const codegen::JobPlace& place)
      : LinearWriter(place, {"Linear", "linear::compute", "", "linear::Shape<V>::kStagedBytes"}) {}

 private:
  void add_weight(const Node& node, const Tensor& weight) override { refs_.add(node, weight); }
};

class Vector : public Kernel {
 public:
  Vector() : Kernel("linear.vector") {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    return refuses_linear(node);
  }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    const Linears linears(schedule, job);
    if (const auto refusal = refuses_any(schedule, job, linears)) return refusal;
    if (schedule.warps.all_read_entries) return kNotTogether;
    if (linears.batch > kMostRows)
      return "x has " + std::to_string(linears.batch) + " rows, expected at most " + std::to_string(kMostRows);
    if (job.cut.is_staged() && !fits(schedule, linears)) return too_large(job, linears);
    if (!job.cut.is_staged() && !has_aligned_x(schedule, job)) return "x is not staged, and may begin anywhere";
    if (!can_stream(schedule, job, linears)) return "rows of a weight are not aligned to 16 bytes";
    return std::nullopt;
  }

  static bool has_aligned_x(const Schedule& schedule, const Job& job) {
    const Tensor& x = Linears::input(schedule, job);
    return has_aligned_rows(x) && schedule.graph.buffers()[x.buffer].kind != BufferKind::kInput;
  }

  int64_t polled_elements(const Schedule& schedule, const Job& job, const Tensor& made) const override {
    return polled_whole(schedule, job, made);
  }

  // Linears with several rows of x have no say in the size of slots, since x takes the ring's room.
  double filled_bytes(const Schedule& schedule, const Job& job, int64_t slot_bytes) const override {
    const Linears linears(schedule, job, slot_bytes);
    if (linears.batch != 1 || linears.size < 1) return 0;
    const TileShape shape = choose_shape(linears);
    int64_t rows = 0;
    for (int n : job.body) rows += Linears::weight(schedule, n).shape[0];
    return double(rows) * double(shape.chunks() * slot_bytes) / double(shape.rows_in_entry());
  }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    const Linears linears(schedule, job);
    Cut cut = job.cut;
    TileShape shape = choose_shape(linears);
    shape.in_flight = entries_in_flight(static_cast<uint32_t>(shape.entry_bytes()));
    shape.shares_entries = linears.batch == 1 && cut.is_staged() && linears.parts * shape.tile_rows <= 4 &&
                           (shape.run == shape.entries() || meets_in_shared_memory(shape, schedule.warps));
    cut.staged_bytes = (cut.is_staged() ? linears.x_bytes() : 0) + scratch_bytes(linears, shape);
    if (cut.staged_bytes > room(schedule)) return {};
    cut.num_tiles = linears.tiles(shape.tile_rows);
    cut.shape = shape;
    cut.cost_ns = nanoseconds(linears, shape);
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    proof.require(proof.cut().shape && !proof.cut().shape->is_boxed, "its weights do not come row by row");
    proof.require_plain_end();
  }

  bool takes_companions() const override { return true; }
  codegen::JobCode emit(const codegen::JobPlace& place) const override { return VectorWriter(place).run(); }
  std::optional<codegen::SharedCode> share(const std::vector<codegen::Variant>& variants) const override {
    return codegen::share_tile_loop(variants);
  }
};

// ---- weights that are read where they are ----

class DirectWriter : public codegen::LinearWriter {
 public:
  explicit DirectWriter(const codegen::JobPlace& place)
      : LinearWriter(place, {"Linear", "linear::compute_direct", "", "linear::kDirectStagedBytes<V>"}) {}

 private:
  void add_weight(const Node& node, const Tensor& weight) override {
    weights_.add(refs_, node, weight);
    are_aligned_ &= context_.aligned_rows(weight, false);
  }
  bool takes_any_x() const override { return true; }
  // The rows of each weight that a warp multiplies at a time, unless that leaves workers idle.
  std::string shape_constants() const override {
    const int64_t workers = context_.schedule.target.num_workers, x_rows = std::min(batch_, kDirectRows);
    const int64_t at_once =
        divide_up(job_.cut.num_tiles * divide_up(batch_, x_rows), workers * context_.schedule.warps.consumers);
    const int64_t most = kMostParts / shape_.parts, rows = at_once < 2   ? 1
                                                           : at_once < 4 ? std::min<int64_t>(2, most)
                                                                         : most;
    return LinearWriter::shape_constants() + codegen::constant("kXRows", x_rows) +
           codegen::constant("kWeightRows", rows);
  }
  std::string write_places() override {
    const bool are_aligned =
        are_aligned_ && (job_.cut.is_staged() ? has_aligned_rows(x_) : context_.aligned_rows(x_, true));
    return codegen::flag("kAligned", are_aligned) + weights_.members();
  }

  bool are_aligned_ = true;
  codegen::WeightsInPlace weights_;
};

class Direct : public Kernel {
 public:
  Direct() : Kernel("linear.direct") {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    return refuses_linear(node);
  }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    const Linears linears(schedule, job);
    if (const auto refusal = refuses_any(schedule, job, linears)) return refusal;
    const int64_t weight_rows = *std::max_element(linears.rows.begin(), linears.rows.end());
    const int64_t most = weight_rows <= kMostScores ? linears.batch : linears.element > 2 ? kMostWideRows : kMostRows;
    if (linears.batch > most)
      return "x has " + std::to_string(linears.batch) + " rows, expected at most " + std::to_string(most) +
             ", or weights of at most " + std::to_string(kMostScores) + " rows";
    if (linears.parts > kMostParts) return std::to_string(linears.parts) + " linears side by side";
    if ((!job.prologue.empty() || polls_x(schedule, job)) && !fits(schedule, linears)) return too_large(job, linears);
    const bool are_few = linears.batch <= kMostRows && !schedule.warps.all_read_entries;
    // The other kernel decides how it takes x, polled or not.
    if (!are_few && has_other(schedule, job)) return "another kernel takes it";
    return std::nullopt;
  }

  bool has_other(const Schedule& schedule, const Job& job) const {
    const std::vector<const Kernel*> all = kernels_of(schedule, job);
    return std::any_of(all.begin(), all.end(),
                       [&](const Kernel* other) { return other != this && !other->refusal(schedule, job); });
  }

  static bool polls_x(const Schedule& schedule, const Job& job) {
    return schedule.polled[Linears::input(schedule, job).buffer];
  }

  int64_t polled_elements(const Schedule& schedule, const Job& job, const Tensor& made) const override {
    return polled_whole(schedule, job, made);
  }

  // Few rows of x are staged, and more rows if row tasks make them, or they are polled. The cost is an estimate: each
  // lane waits for its own loads.
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    constexpr double kSlower = 4;
    const Linears linears(schedule, job);
    Cut cut = job.cut;
    const bool is_staged =
        !job.prologue.empty() || polls_x(schedule, job) ||
        (linears.batch <= kMostRows && linears.x_bytes() <= room(schedule) && fits(schedule, linears));
    cut.input = is_staged ? Input::kWhole : Input::kInPlace;
    cut.staged_bytes = is_staged ? linears.x_bytes() : 0;
    if (cut.staged_bytes > room(schedule)) return {};
    cut.num_tiles = linears.tiles(1);
    cut.cost_ns = kSlower * nanoseconds(linears, chunked(linears, 1, 1));
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    proof.require(!proof.cut().shape, "it reads weights where they are");
    proof.require_plain_end();
  }

  bool takes_companions() const override { return true; }
  codegen::JobCode emit(const codegen::JobPlace& place) const override { return DirectWriter(place).run(); }
};

const Vector kVector{};
const Direct kDirect{};
[[maybe_unused]] const bool kRegistered = add_kernel("linear", kVector) && add_kernel("linear", kDirect);

}  // namespace
}  // namespace mpk
