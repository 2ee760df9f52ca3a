// Linears of few rows of x on the vector units: weights come through the ring, row by row, or, where they cannot, are
// read where they are.
#include "../../codegen/text.h"
#include "../../schedule/kernel.h"
#include "../../schedule/proof.h"
#include "linears.h"
#include "tile_loop.h"
#include "torch_mpk/abi/table.h"
#include "writer.h"

namespace mpk {
namespace {

constexpr int64_t kMostRows = 16;  // of x

int64_t slot(const Linears& job) { return job.slot_bytes / job.element; }                  // elements
bool exceeds_slot(const Linears& job) { return job.size * job.element > job.slot_bytes; }  // a row

// Tiles of so many rows, in chunks that fit a slot.
TileShape chunked(const Linears& job, int64_t tile_rows, int64_t chunk_parts) {
  const int64_t rows = chunk_parts * tile_rows;
  int64_t chunk = job.size;
  if (rows * job.size > slot(job)) {
    chunk = std::max<int64_t>(slot(job) / rows / 256, 1) * 256;
    for (int64_t equal = chunk; equal >= chunk / 2 && equal > 0; equal -= 256)  // equal ones are quicker
      if (job.size % equal == 0) {
        chunk = equal;
        break;
      }
  }
  TileShape shape{tile_rows, job.parts, chunk_parts, job.size * job.element, chunk * job.element};
  shape.run = exceeds_slot(job) ? 1 : shape.chunks();
  return shape;
}

// Whether a shape is worth a look with one row of x: it fills slots, or the ring holds all of a worker's rows at once.
// Rows longer than a slot stand alone, so that the bits of their sums, which several warps add up, depend on their
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

// Elements that a worker's slowest warp takes, which decides: it takes tiles one after the other, each of which costs
// its elements and, for waiting, summing over the warp and storing, as much as some more. With one row of x it takes
// runs of a tile's chunks: of rows that fit a slot all, and otherwise one.
int64_t elements(const Linears& job, const TileShape& shape) {
  constexpr int64_t kOfTile = 1024;
  const int64_t mine = divide_up(job.tiles(shape.tile_rows), job.workers);
  if (job.batch > 1) return divide_up(mine, job.warps) * (kOfTile + shape.tile_rows * job.parts * job.size);
  const int64_t of_run = std::min(job.size, shape.run * (shape.chunk_bytes / job.element));
  return divide_up(mine * shape.entries() / shape.run, job.warps) * (kOfTile + shape.rows_in_entry() * of_run);
}

// Chunks of a tile fit one slot. With several rows of x, a chunk holds several weight rows, so that a value of x read
// from shared memory is used more than once.
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

// All warps' elements come at what a worker gets of memory. Each row of x but the first adds a sixteenth of that for
// its products, which is an estimate.
double nanoseconds(const Linears& job, const TileShape& shape) {
  constexpr double kOfRow = 1.0 / 16;
  const double bytes = double(elements(job, shape) * job.warps * job.element);
  return bytes / job.arch.costs.memory_bytes_per_ns * (1 + kOfRow * double(job.batch - 1));
}

bool can_stream(const Schedule& schedule, const Job& job, const Linears& linears) {
  return linears.size * linears.element % kAccessBytes == 0 && all_weights(schedule, job, can_be_streamed);
}

// Where each warp that has tiles of its own puts a tile's results together.
int64_t scratch_bytes(const Linears& job, const TileShape& shape) {
  if (shape.shares_entries) return 0;
  return job.warps * round_up(shape.parts * shape.tile_rows * job.batch * 4, 16);
}

std::optional<std::string> refuses_rows(const Schedule& schedule, const Job& job, const Linears& linears, bool stages) {
  if (linears.are_empty()) return "x is empty";
  if (schedule.warps.all_read_entries) return kNotTogether;
  if (norm_of(job) >= 0) return "it ends with a norm";
  if (linears.batch > kMostRows)
    return "x has " + std::to_string(linears.batch) + " rows, at most " + std::to_string(kMostRows) +
           " are supported, and any with weights of 16-bit elements, in rows of a multiple of 64, that the call "
           "brings to a GPU of compute capability 9.0";
  if (stages && linears.x_bytes() > most_staged(schedule.target))
    return "x of " + std::to_string(linears.batch) + " x " + std::to_string(linears.size) +
           " elements does not fit shared memory" +
           (job.prologue.empty() ? "" : "; schedule the row tasks in front of it as jobs of their own");
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
  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    const Linears linears(schedule, job);
    if (const auto refusal = refuses_rows(schedule, job, linears, job.cut.is_staged())) return refusal;
    if (!can_stream(schedule, job, linears)) return "rows of a weight are not aligned to 16 bytes";
    return std::nullopt;
  }

  int64_t polled_elements(const Schedule& schedule, const Job& job, const Tensor& made) const override {
    return polled_whole(schedule, job, made);
  }

  // Linears of several rows of x do not say how large slots are: there x takes the ring's room.
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
      : LinearWriter(place, {"Linear", "linear::compute_direct", "", "linear::Shape<V>::kStagedBytes"}) {}

 private:
  void add_weight(const Node& node, const Tensor& weight) override {
    weights_.push_back("job.pointer<const uint8_t>(" + codegen::str(refs_.add(node, weight)) + ")");
    pitches_.push_back("int64_t(" + codegen::str(weight.strides[0] * size_bytes(weight.dtype)) + ")");
  }
  std::string write_places() override {
    return codegen::returning("const uint8_t*", "weight(const Job& job, int i)", codegen::choose("i", weights_)) +
           codegen::returning("int64_t", "weight_pitch(int i)", codegen::choose("i", pitches_));
  }

  std::vector<std::string> weights_, pitches_;  // of each, expressions
};

class Direct : public Kernel {
 public:
  Direct() : Kernel("linear.direct") {}

 private:
  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    return refuses_rows(schedule, job, Linears(schedule, job), true);
  }

  int64_t polled_elements(const Schedule& schedule, const Job& job, const Tensor& made) const override {
    return polled_whole(schedule, job, made);
  }

  // It takes x from shared memory. Each lane waits for its own loads: an estimate.
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    constexpr double kSlower = 4;
    const Linears linears(schedule, job);
    const TileShape shape{1, linears.parts};
    Cut cut = job.cut;
    cut.input = Input::kWhole;
    cut.staged_bytes = linears.x_bytes() + scratch_bytes(linears, shape);
    if (cut.staged_bytes > room(schedule)) return {};
    cut.num_tiles = linears.tiles(shape.tile_rows);
    cut.cost_ns = kSlower * nanoseconds(linears, chunked(linears, 1, 1));
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    proof.require(!proof.cut().shape && proof.cut().is_staged(), "it reads weights where they are, and x staged");
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
