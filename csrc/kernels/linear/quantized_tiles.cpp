// Linears with quantised weights beside an x that is not, in launches with many rows of x (quantized_tiles.cuh).
#include "quantized_tiles.h"

#include <algorithm>
#include <array>

#include "../../codegen/checks.h"
#include "../../codegen/text.h"
#include "../../schedule/proof.h"
#include "blocks.h"
#include "quantized_writer.h"
#include "tiles.h"

namespace mpk {
namespace {

// A tile's rows of weights, of all parts together, and its rows of x to choose from.
constexpr int64_t kWeightRows = kWarpgroups * kWarpgroupWarps * kWarpRows, kMostParts = 4;
constexpr std::array<int64_t, 7> kXRows = {16, 32, 64, 96, 128, 192, 256};

int64_t tile_rows(int64_t parts) { return kWeightRows / (parts == 3 ? kMostParts : parts); }

// Bytes of 64 columns of a row of weights; of all that an entry has of 64 columns; of an entry.
int64_t block_row_bytes(const WeightFormat& format) { return kBoxColumns * format.bits() / 8; }
int64_t block_bytes(const TileShape& s, const WeightFormat& format) {
  return s.x_rows * kBoxRowBytes + s.tile_rows * s.parts * block_row_bytes(format);
}
int64_t bytes_of_entry(const TileShape& s, const WeightFormat& format) {
  return s.chunk_bytes / block_row_bytes(format) * block_bytes(s, format);
}

// The bytes that workers of a tile exchange, as those of linear.tiles do.
int64_t partial_bytes(const TileShape& s) { return kWeightRows * s.x_rows * kTaggedFloatBytes; }
int64_t scratch_bytes(const TilesCut& c, int64_t tiles) { return tiles * (c.split - 1) * partial_bytes(c); }

class Cutter {
 public:
  Cutter(const Linears& job, const WeightFormat& format) : job_(job), format_(format) {}

  TilesCut best() const {
    TilesCut best = of_rows(kXRows.front());
    for (int64_t rows : kXRows)
      for (TilesCut c = of_rows(rows); c.split <= kMostSplit; c.split++)
        if (can_be_split(c) && cycles(c) < cycles(best)) best = c;
    return best;
  }

  int64_t count(const TileShape& s) const { return divide_up(job_.batch, s.x_rows) * job_.tiles(s.tile_rows); }
  // Each worker has as many entries, and finishes as many rows of x. More of them leave no registers for others' sums.
  bool can_be_split(const TilesCut& c) const {
    return c.split == 1 || (c.chunks() % c.split == 0 && c.x_rows % (8 * c.split) == 0 && c.x_rows <= kMostSplitRows &&
                            count(c) * c.split <= job_.workers);
  }

  // The slowest worker's cycles. A block of 64 columns takes the time of the tensor cores, of a warp that converts its
  // weights meanwhile, or of what comes from L2 or memory; then come the exchanged sums, the results, and the way to
  // the next tile. Conversion is that of quantized_linear.warpgroups, the rest that of linear.tiles, each as an H200
  // has it. The two together have not been measured.
  double cycles(const TilesCut& s) const {
    const Costs& costs = job_.arch.costs;
    constexpr double kSlots = 4, kOfXRow = 40, kOfTile = 1500, kOfSentXRow = 150;
    constexpr double kSliceCycles = 280, kSlices = 2;  // of 32 columns
    const int64_t units = count(s) * s.split;
    const double active = double(std::min(units, job_.workers));
    const double weights = double(s.tile_rows * s.parts * block_row_bytes(format_));
    const double bytes = double(block_bytes(s, format_));
    const double blocks = double(s.chunk_bytes) / double(block_row_bytes(format_));
    const bool from_memory = job_.batch <= s.x_rows;  // else other tiles have loaded them to L2
    const double block = std::max({costs.column_cycles * double(s.x_rows), kSlices * kSliceCycles,
                                   bytes / costs.own_bytes_per_cycle, bytes * active / costs.all_bytes_per_cycle,
                                   from_memory ? weights * active / costs.all_memory_bytes_per_cycle : 0,
                                   (from_memory ? costs.memory_trip_cycles : costs.trip_cycles) / (kSlots * blocks)});
    const double all = double(job_.size) / kBoxColumns / double(s.split) * block;
    const double rows = double(s.x_rows), share = rows / double(s.split);
    const double others = s.split == 1 ? 0 : costs.hop_cycles + kOfSentXRow * (rows - share);
    return double(divide_up(units, job_.workers)) * (all + others + kOfXRow * share + kOfTile);
  }

 private:
  static constexpr int64_t kMostSplit = 16, kMostSplitRows = 128;

  // As many blocks to an entry as fit, and as divide a row.
  TilesCut of_rows(int64_t rows) const {
    TilesCut s{{tile_rows(job_.parts), job_.parts, job_.parts, format_.row_bytes()}, {}};
    s.is_boxed = true;
    s.readers = job_.warps;
    s.x_rows = rows;
    int64_t blocks = std::max<int64_t>(job_.slot_bytes / block_bytes(s, format_), 1);
    while (job_.size / kBoxColumns % blocks != 0) blocks--;
    s.chunk_bytes = blocks * block_row_bytes(format_);
    return s;
  }

  const Linears& job_;
  const WeightFormat format_;
};

class Writer : public QuantizedWriter {
 public:
  explicit Writer(const codegen::JobPlace& place)
      : QuantizedWriter(place, {"QuantizedTiles",
                                "linear::compute_quantized_tiles",
                                "linear::load_quantized_tiles",
                                "linear::TilesShape<V>::kStagedBytes",
                                "",
                                {"torch_mpk/device/tasks/quantized_tiles.cuh"}}),
        own_(fields_of<TilesFields>(job_.cut)) {
    code_.loads_early = true;
  }

 private:
  void add_weight(const Node& node, const Tensor& weight) override {
    refs_.add_map(node, in_words(weight), shape_.tile_rows, block_row_bytes(format_) / 2, kMapOfRows);
  }
  void add_input() override {
    codegen::require(context_.aligned_rows(x_, false), first_, "x is not aligned to 16 bytes");
    refs_.add_map(first_, x_, shape_.x_rows, kBoxColumns);
  }
  std::string shape_constants() const override {
    return codegen::constant("kXRows", shape_.x_rows) + codegen::constant("kTileRows", shape_.tile_rows) +
           constants(own_);
  }
  bool reads_x() const override { return false; }
  // Lanes have few rows of weights and many results, so sums take rows' scales before they are results.
  std::string row_factor(const Node&) override { return ""; }
  std::string write_places() override {
    std::string places = QuantizedWriter::write_places();
    if (format_.scales_rows())
      places +=
          write_block_rows(context_, job_) + write_blocks(context_, refs_, job_, "weight_scale", "Scale", "scale");
    if (own_.split == 1) return places;
    return places + codegen::constant("kPartialBytes", partial_bytes(shape_)) +
           codegen::returning("uint8_t*", "partials(const Job& job)", refs_.workspace(job_.cut.scratch->offset));
  }

  const TilesFields own_;
};

class QuantizedTiles : public Kernel {
 public:
  QuantizedTiles() : Kernel("quantized_linear.tiles") {}

  // Whether the copy engine loads both factors.
  static bool can_load(const TBGraph& graph, const Tensor& x, const Tensor& weight) {
    return can_be_boxed(x) && can_load_boxes(graph, weight);
  }

  std::optional<std::string> refuses_node(const Node& node, const Target& target) const override {
    if (!arch_of(target.arch).has_warpgroup_products) return "the chip's warps do not multiply together";
    if (auto why = refuses_reduced(node)) return why;
    return refuses_conversion(node);
  }

 private:
  std::optional<Demands> demands(const TBGraph& graph, const Node& node) const override {
    const Tensor& x = node.operand("x").tensor;
    if (x.shape[0] < kFewestTileRows || refuses_reduced(node) || refuses_conversion(node) ||
        !can_load(graph, x, node.operand("weight").tensor))
      return std::nullopt;
    return of_warpgroups();
  }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    if (auto why = refuses_weights(schedule, job)) return why;
    const Linears linears(schedule, job);
    if (linears.are_empty()) return "x is empty";
    if (!schedule.warps.all_read_entries) return "the launch's warps do not multiply together, for few rows of x";
    if (norm_of(job) >= 0) return "it ends with a norm";
    if (linears.parts > kMostParts)
      return "its epilogue combines " + std::to_string(linears.parts) + " linears, expected at most " +
             std::to_string(kMostParts);
    const Tensor& x = Linears::input(schedule, job);
    if (!all_weights(schedule, job, [&](const Tensor& t) { return can_load(schedule.graph, x, t); }))
      return "x or a weight is not in aligned rows of a multiple of 128 bytes, or the call writes the weight";
    return std::nullopt;
  }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    const Linears linears(schedule, job);
    const WeightFormat format = format_of(schedule, job);
    const Cutter cutter(linears, format);
    const TilesCut best = cutter.best();
    if (bytes_of_entry(best, format) > linears.slot_bytes) return {};
    Cut cut = job.cut;
    cut.input = Input::kEntries;
    cut.staged_bytes = linears.warps * kStripBytes;
    cut.num_tiles = cutter.count(best);
    cut.shape = static_cast<const TileShape&>(best);
    cut.fields = list_fields<TilesFields>(best);
    if (best.split > 1) cut.scratch = Scratch{scratch_bytes(best, cut.num_tiles)};
    cut.cost_ns = cutter.cycles(best) / linears.arch.costs.cycles_per_ns;
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    const Cut& cut = proof.cut();
    proof.require(cut.shape && cut.shape->is_boxed && cut.input == Input::kEntries,
                  "weights and x do not come in boxes");
    const TileShape& s = *cut.shape;
    const WarpLayout& warps = proof.schedule().warps;
    proof.require(warps.all_read_entries && warps.consumers == kWarpgroups * kWarpgroupWarps &&
                      s.readers == warps.consumers && std::ranges::find(kXRows, s.x_rows) != kXRows.end(),
                  "tiles of " + proof.str(s.x_rows) + " rows of x are not what " + proof.str(kWarpgroups) +
                      " warpgroups multiply");
    proof.require(s.chunk_parts == s.parts && s.parts <= kMostParts && s.tile_rows == tile_rows(s.parts),
                  "warps do not have " + proof.str(kWarpRows) + " rows of weights, of all parts of a tile");
    for (int n : proof.job().body) {
      const Node& node = proof.schedule().graph.nodes()[n];
      const std::optional<std::string> refusal = refuses_conversion(node);
      proof.require(!refusal, refusal.value_or(""));
    }
    const WeightFormat format = WeightFormat::of(proof.first());
    proof.require(s.chunk_bytes % block_row_bytes(format) == 0 && s.row_bytes % s.chunk_bytes == 0,
                  "chunks of " + proof.str(s.chunk_bytes) + " bytes are not whole blocks of " + proof.str(kBoxColumns) +
                      " columns, equally many in each");
    const int64_t bytes = bytes_of_entry(s, format), strips = warps.consumers * kStripBytes;
    proof.require(bytes <= warps.slot_bytes, "an entry of " + proof.str(bytes) + " bytes, with x, exceeds a slot of " +
                                                 proof.str(warps.slot_bytes));
    proof.require(cut.staged_bytes >= strips,
                  "it keeps " + proof.str(strips) + " bytes in " + proof.str(cut.staged_bytes));
    const TilesCut c{s, fields_of<TilesFields>(cut)};
    const Linears linears(proof.schedule(), proof.job());
    proof.require(
        c.split > 0 && Cutter(linears, format).can_be_split(c),
        proof.str(c.split) + " workers share tiles, but their parts or shares are not equal, or take more than a pass");
    proof.require_scratch(scratch_bytes(c, cut.num_tiles));
    proof.require_plain_end();
  }

  bool takes_companions() const override { return true; }
  codegen::JobCode emit(const codegen::JobPlace& place) const override { return Writer(place).run(); }
};

const QuantizedTiles kKernel{};
[[maybe_unused]] const bool kRegistered = add_kernel("quantized_linear", kKernel);

}  // namespace

bool converts_tiles(const TBGraph& graph, const Node& node, const Target& target) {
  return node.def->name == "quantized_linear" && !kKernel.refuses_node(node, target) &&
         QuantizedTiles::can_load(graph, node.operand("x").tensor, node.operand("weight").tensor);
}

}  // namespace mpk
