#include "tiles.h"

#include <algorithm>

#include "../../codegen/checks.h"
#include "../../codegen/text.h"
#include "torch_mpk/abi/table.h"

namespace mpk {
namespace {

// The bytes that workers of a tile exchange: each sends its sums, except those of its own share. A thread has sums of
// all rows that warpgroups multiply, even if x has fewer.
int64_t partial_bytes(const TileShape& shape) { return kTileXRows * shape.tile_rows * shape.parts * kTaggedFloatBytes; }
int64_t scratch_bytes(const TileShape& shape, const TilesFields& own, int64_t tiles) {
  return tiles * (own.split - 1) * partial_bytes(shape);
}

}  // namespace

std::optional<TilesCut> TilesCutter::best() const {
  std::optional<TilesCut> best;
  for (int64_t columns : widths_) {
    if (job_.parts > 4 || columns % (job_.parts * strip_columns(job_.parts)) != 0) continue;
    TilesCut c = of_columns(columns);
    for (c.split = 1; c.split <= kMostSplit; c.split++)
      if (can_be_split(c) && has_whole_rows(c) && (!best || cycles(c) < cycles(*best))) best = c;
  }
  return best;
}

// The slowest worker's cycles. A step of 64 columns takes the time of the tensor cores, or of its boxes: one
// multiprocessor has a bandwidth from L2, all together have less, weights from memory have still less, and no box
// lands sooner than the ring's slots allow, which takes longer from memory. Then come the exchanged sums, the
// results, and the way to the next tile. Measured, see docs/experiments.md: a sum that is sent costs most, since it
// is written and read at twice its width.
double TilesCutter::cycles(const TilesCut& c) const {
  const Costs& costs = job_.arch.costs;
  constexpr double kSlots = 4, kOfColumn = 40, kOfTile = 1500, kOfSentColumn = 150;
  const int64_t units = count(c) * c.split, columns = c.tile_rows * c.parts;
  const double active = double(std::min(units, job_.workers)), weights = double(columns * kBoxRowBytes);
  const double bytes = double(c.x_rows * kBoxRowBytes) + weights;
  const double blocks = double(c.chunk_bytes) / kBoxRowBytes;
  const bool from_memory = x_tiles() == 1;  // else other tiles have loaded them to L2
  const double step = std::max({costs.column_cycles * double(columns), bytes / costs.own_bytes_per_cycle,
                                bytes * active / costs.all_bytes_per_cycle,
                                from_memory ? weights * active / costs.all_memory_bytes_per_cycle : 0,
                                (from_memory ? costs.memory_trip_cycles : costs.trip_cycles) / (kSlots * blocks)});
  const double steps = double(c.row_bytes) / kBoxRowBytes / double(c.split);
  const double share = double(columns) / double(c.split);
  const double others = c.split == 1 ? 0 : costs.hop_cycles + kOfSentColumn * (double(columns) - share);
  return double((units + job_.workers - 1) / job_.workers) * (steps * step + others + kOfColumn * share + kOfTile);
}

// The cycles of a phase of row tasks behind, with so many rows, if the job does not end with it: an event, a row's
// way through a warp, and all rows' way through the workers.
double TilesCutter::cycles_of_rows(int64_t rows) const {
  constexpr double kOfRow = 3000, kOfRows = 55;
  return job_.arch.costs.event_cycles + kOfRow + kOfRows * double(rows) / double(job_.workers);
}

TilesCut TilesCutter::of_columns(int64_t columns) const {
  TilesCut c{{columns / job_.parts, job_.parts, job_.parts, job_.size * job_.element}, {}};
  c.is_boxed = true;
  c.readers = job_.warps;
  c.x_rows = std::min<int64_t>(kTileXRows, round_up(job_.batch, 8));
  const int64_t fitting = job_.slot_bytes / (c.rows_in_entry() * kBoxRowBytes);
  c.chunk_bytes = std::min(std::max<int64_t>(fitting, 1) * kBoxRowBytes, c.row_bytes);
  return c;
}

// Split-K needs parts with equally many entries, and each worker finishes an equal share of the results. Wider shares
// leave no registers for others' sums.
bool TilesCutter::can_be_split(const TilesCut& c) const {
  return c.split == 1 || (c.chunks() % c.split == 0 && c.tile_rows % (8 * c.split) == 0 &&
                          count(c) * c.split <= job_.workers && c.tile_rows * c.parts <= kWidestSplit);
}

// ---- code ----

TilesWriter::TilesWriter(const codegen::JobPlace& place, std::string name, std::string compute, std::string header)
    : LinearWriter(place, {std::move(name),
                           std::move(compute),
                           "linear::load_tiles",
                           "linear::TilesShape<V>::kStagedBytes",
                           "",
                           {std::move(header)}}),
      own_(fields_of<TilesFields>(job_.cut)) {
  code_.loads_early = has_boxed_weights(context_.schedule, job_);
}

void TilesWriter::add_weight(const Node& node, const Tensor& weight) {
  refs_.add_map(node, in_words(weight), shape_.tile_rows, kBoxColumns);
}

void TilesWriter::add_input() {
  codegen::require(context_.aligned_rows(x_, false), first_, "x is not aligned to 16 bytes");
  refs_.add_map(first_, in_words(x_), shape_.x_rows, kBoxColumns);
}

std::string TilesWriter::shape_constants() const {
  return codegen::constant("kXRows", shape_.x_rows) + codegen::constant("kTileRows", shape_.tile_rows) +
         constants(own_);
}

std::string TilesWriter::write_places() {
  if (own_.split == 1) return "";
  return codegen::constant("kPartialBytes", partial_bytes(shape_)) +
         codegen::returning("uint8_t*", "partials(const Job& job)", refs_.workspace(job_.cut.scratch->offset));
}

// ---- the kernel ----

std::optional<std::string> TilesKernel::refuses(const Schedule& schedule, const Job& job) const {
  if (Linears(schedule, job).are_empty()) return "x is empty";
  if (!schedule.warps.all_read_entries) return "the launch's warps do not multiply together, for few rows of x";
  if (norm_of(job) >= 0) return "it ends with a norm";
  return refuses_matrices(schedule, job);
}

bool TilesKernel::ends_with_rows(const Schedule& schedule, const Job& job) const {
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
  const TilesCutter any(linears, widths(schedule, job)),
      whole(linears, widths(schedule, job), whole_rows(schedule.graph, job));
  const std::optional<TilesCut> apart = any.best(), with_rows = whole.best();
  return apart && with_rows && !refuses_matrices(schedule, job) &&
         whole.cycles(*with_rows) <= any.cycles(*apart) + any.cycles_of_rows(rows);
}

std::vector<Cut> TilesKernel::candidates(const Schedule& schedule, const Job& job) const {
  const Linears linears(schedule, job);
  const TilesCutter cutter(linears, widths(schedule, job), whole_rows(schedule.graph, job));
  const std::optional<TilesCut> best = cutter.best();
  if (!best) return {};
  Cut cut = job.cut;
  cut.input = Input::kEntries;
  cut.staged_bytes = linears.warps * kStripBytes;  // see TilesShape in linear_tiles.cuh
  cut.num_tiles = cutter.count(*best);
  cut.shape = static_cast<const TileShape&>(*best);
  cut.fields = list_fields<TilesFields>(*best);
  if (best->split > 1) cut.scratch = Scratch{scratch_bytes(*best, *best, cut.num_tiles)};
  cut.cost_ns = cutter.cycles(*best) / linears.arch.costs.cycles_per_ns;
  return {cut};
}

void TilesKernel::prove(const CutProof& proof) const {
  const Cut& cut = proof.cut();
  proof.require(cut.shape && cut.shape->x_rows > 0, "its tiles have no rows of x");
  const TileShape& s = *cut.shape;
  const auto own = fields_of<TilesFields>(cut);
  const WarpLayout& warps = proof.schedule().warps;
  proof.require(
      warps.all_read_entries && warps.consumers == kWarpgroups * kWarpgroupWarps && s.x_rows <= kTileXRows &&
          s.x_rows % 8 == 0 && s.readers == warps.consumers,
      "tiles of " + proof.str(s.x_rows) + " rows of x are not what " + proof.str(kWarpgroups) + " warpgroups multiply");
  const std::vector<int64_t> widest = widths(proof.schedule(), proof.job());
  proof.require(s.chunk_bytes % kBoxRowBytes == 0,
                "chunks of " + proof.str(s.chunk_bytes) + " bytes are not whole blocks of 64 columns");
  proof.require(s.chunk_parts == s.parts && !widest.empty() && s.tile_rows * s.parts <= std::ranges::max(widest),
                "an entry does not hold all parts of a tile");
  const int64_t units = own.split < 1 ? 0 : proof.schedule().target.num_workers / own.split;
  proof.require(own.split == 1 || (units > 0 && s.chunks() % own.split == 0 && cut.num_tiles <= units),
                proof.str(own.split) + " workers share tiles, but their parts are not equal, or take more than a pass");
  proof.require(own.split == 1 || s.tile_rows % (8 * own.split) == 0,
                proof.str(own.split) + " workers share tiles, but not the " + proof.str(s.tile_rows) +
                    " rows of each, eight at a time");
  proof.require_scratch(scratch_bytes(s, own, cut.num_tiles));
  proof.require(!cut.row_sums, "no norm ends tiles");
  prove_rows_behind(proof, s, own);
}

// A worker has whole rows of the row tasks at its tiles' end, and stores the last one's result.
void TilesKernel::prove_rows_behind(const CutProof& proof, const TileShape& s, const TilesFields& own) {
  for (const Node* row : proof.rows_behind()) {
    const Tensor& x = row->operands.front().tensor;
    const int64_t size = x.shape.back();
    proof.require(s.parts == 1 && s.tile_rows / own.split % size == 0 && fits_tile_rows(size, x.dtype),
                  "row tasks end it, but its tiles of " + proof.str(s.tile_rows) + " rows, shared by " +
                      proof.str(own.split) + ", have no whole rows of " + proof.str(size) + ", or no room for them");
  }
}

namespace {

// Linears of 16 bits.
class Tiles : public TilesKernel {
 public:
  Tiles() : TilesKernel("linear.tiles") {}

 private:
  std::optional<Demands> demands(const TBGraph&, const Node& node) const override {
    if (node.operand("x").tensor.shape[0] < kFewestTileRows) return std::nullopt;
    return of_warpgroups();
  }

  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    return refuses_linear(node);
  }

  std::vector<int64_t> widths(const Schedule&, const Job&) const override { return {32, 64, 96, 128, 192, 256}; }

  std::optional<std::string> refuses_matrices(const Schedule& schedule, const Job& job) const override {
    if (can_load_tiles(schedule, job)) return std::nullopt;
    return "in a kernel with more than 64 rows, x and the weights need 16-bit elements, rows of a multiple of 64 and "
           "of 16 bytes apart, and the call must not write the weights";
  }

  codegen::JobCode emit(const codegen::JobPlace& place) const override { return TilesWriter(place).run(); }
};

const Tiles kTiles{};
[[maybe_unused]] const bool kRegistered = add_kernel("linear", kTiles);

}  // namespace
}  // namespace mpk
