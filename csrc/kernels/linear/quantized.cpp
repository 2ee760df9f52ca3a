// Linears with quantised weights and up to 64 rows of x. `rows` copies weights as boxes, converts them in registers,
// and multiplies on tensor cores (quantized_rows.cuh), even with one row of x, where vector units would take longer to
// convert than memory to load. `direct` reads other weights in place.
#include <array>

#include "../../codegen/checks.h"
#include "../../codegen/text.h"
#include "../../schedule/choices.h"
#include "../../schedule/kernel.h"
#include "../fields.h"
#include "blocks.h"
#include "linears.h"
#include "quantized_writer.h"
#include "torch_mpk/abi/table.h"

namespace mpk {
namespace {

constexpr int64_t kMostRows = 64, kMostRowsDirect = 16;  // of x
constexpr int64_t kBlockRows = 16;                       // of weights, that a warp multiplies at a time
constexpr int64_t kStepColumns = 128;                    // of x, that have a factor
constexpr int64_t kFewColumns = 256;                     // of a chunk, which is not made narrower
constexpr int64_t kLineBytes = 128;                      // of a row of weights, that a box has side by side
constexpr int64_t kMostWhole = 100 * 1024;  // bytes of x that is staged whole although it could be otherwise

// ---- weights in boxes

struct RowsFields {
  int64_t mainloop_tiles = 1;  // tiles of one mainloop
  int64_t stage_columns = 0;   // of a stage of x, where it comes in stages

  static constexpr std::array<FieldOf<RowsFields>, 2> kAll = {{
      {"mainloop_tiles", "kMainloopTiles", &RowsFields::mainloop_tiles},
      {"stage_columns", "kStageColumns", &RowsFields::stage_columns},
  }};
};

struct RowsCut : TileShape, RowsFields {};

// Numbers of x that a worker converts in a nanosecond, before it multiplies by them: on an H200, 7 more rows of
// 24,576 columns took 58 us more.
constexpr double kConvertedPerNs = 3;
// The same of an x that is only copied, and summed. What a warp takes for a block and 128 columns, and for eight rows
// of x of them, beside others: with one row, 6 of them took 23 us for 64 such steps each; a step of Qwen3-8B took 13.6
// ms with 32 rows.
constexpr double kKeptPerNs = 12, kStepNs = 250, kFragmentNs = 500;

// The use of shared memory, see QuantizedShape in quantized_rows.cuh.
class Cutter {
 public:
  Cutter(const Linears& job, const WeightFormat& format, Input x) : job_(job), format_(format), x_(x) {}

  RowsCut best() const {
    const int64_t columns = job_.batch <= 8 ? 1024 : job_.batch <= 16 ? 512 : kFewColumns;
    int64_t bytes = is_staged() ? 1024 : bytes_of(columns);
    // Blocks of a warp: as many as there are registers for their sums, beside what 4 bits become.
    int64_t held = job_.batch <= 16 ? 3 : job_.batch <= 32 || format_.bits() == 8 ? 2 : 1;
    while (true) {
      const RowsCut c = cut(bytes, held);
      const bool can_narrow = bytes > bytes_of(kFewColumns);
      if (staged_bytes(c) <= job_.room_beside_boxes || (!can_narrow && held == 1)) return c;
      can_narrow ? bytes /= 2 : held--;
    }
  }

  int64_t staged_bytes(const RowsCut& c) const {
    const int64_t blocks = divide_up(c.mainloop_tiles * c.parts, kBlockRows / c.tile_rows);
    const int64_t rows = round_up(job_.batch, 8), sums = std::max(blocks, warps()) * rows * kSumPitch * 4;
    const int64_t at_hand = is_staged() ? job_.size : kStages * c.stage_columns;
    const int64_t x = job_.batch * (at_hand * job_.element + (is_staged() ? 1 : kStages) * kAccessBytes);
    const bool has_sums = keeps_x() || format_.has_zero();
    const int64_t sums_of_x = has_sums ? kStepColumns / std::min(format_.block_columns, kStepColumns) : 0;
    const int64_t of_step = (keeps_x() ? 0 : 1) + sums_of_x;
    const int64_t factors = (at_hand / kStepColumns * of_step + 1) * rows * 4;  // and one for each row
    const int64_t scales = tiles_of_worker(c) * c.parts * scale_bytes(c);
    const int64_t whole = is_staged() ? round_up(x, kSharedAlignment) + sums : std::max(x, sums);
    return round_up(whole, kSharedAlignment) + round_up(factors, kSharedAlignment) + scales;
  }

  double nanoseconds(const RowsCut& c) const {
    const Costs& costs = job_.arch.costs;
    const double tiles = double(divide_up(job_.tiles(c.tile_rows), job_.workers));
    const double weights = tiles * double(job_.parts * (c.tile_rows * c.row_bytes + scale_bytes(c)));
    const double numbers = double(job_.batch * job_.size), passes = tiles / double(c.mainloop_tiles);
    const double x = numbers * double(job_.element) * passes;
    const double memory = std::max(weights / costs.memory_bytes_per_ns, (weights + x) / costs.by_warps.bytes_per_ns);
    const double of_x = numbers * (is_staged() ? 1 : passes) / (keeps_x() ? kKeptPerNs : kConvertedPerNs);
    return std::max(memory + of_x, products_ns(c));
  }

 private:
  bool is_staged() const { return x_ == Input::kWhole; }
  int64_t warps() const { return job_.warps - (is_staged() ? 0 : kProducerWarps); }
  int64_t tiles_of_worker(const RowsCut& c) const { return divide_up(job_.tiles(c.tile_rows), job_.workers); }
  bool keeps_x() const { return format_.bits() == 4 && !format_.quantizes_x(); }

  // The steps of the warp with most blocks, where warps take turns at chunks if there are few blocks.
  double products_ns(const RowsCut& c) const {
    const int64_t blocks = divide_up(c.mainloop_tiles * c.parts, kBlockRows / c.tile_rows);
    const int64_t sharers = std::min(std::max<int64_t>(warps() / blocks, 1), c.chunks());
    const int64_t turns = divide_up(c.chunks(), sharers) * divide_up(blocks, warps());
    const double passes = double(tiles_of_worker(c)) / double(c.mainloop_tiles);
    const double steps = double(turns * format_.columns_of(c.chunk_bytes) / kStepColumns) * passes;
    return steps * (kStepNs + kFragmentNs * double(divide_up(job_.batch, 8)));
  }

  int64_t bytes_of(int64_t columns) const { return columns * format_.bits() / 8; }

  // Bytes of a box's scales and zero points, see BlockScale in quantized_format.cuh.
  int64_t scale_bytes(const RowsCut& c) const {
    if (format_.scales_rows()) return 0;
    const int64_t scale = is_reduced_float(format_.scale_dtype) ? 2 : 4;
    const int64_t with_zero = scale == 2 && format_.zero_bytes != 4 ? 4 : 8;
    return format_.scale_columns() * (format_.block_rows == 1 ? c.tile_rows : 1) *
           (format_.has_zero() ? with_zero : scale);
  }

  RowsCut cut(int64_t bytes, int64_t held) const {
    const bool is_even = job_.batch <= 16 || job_.tiles(kBlockRows) < job_.workers;
    const int64_t box_rows = is_even ? 8 : kBlockRows;
    const int64_t most_bytes = kMinSlotBytes / box_rows / kBoxRowBytes * kBoxRowBytes;
    const int64_t row_bytes = format_.row_bytes();
    RowsCut c{{box_rows, job_.parts, 1, row_bytes, std::min({bytes, row_bytes, most_bytes})}, {}};
    c.is_boxed = true;
    const int64_t mine = tiles_of_worker(c);
    const int64_t most = std::max<int64_t>(held * warps() * (kBlockRows / box_rows) / job_.parts, 1);
    c.mainloop_tiles = std::max<int64_t>(divide_up(mine, divide_up(mine, most)), 1);
    // Where a pass has few blocks, warps take turns at chunks, of which there are to be enough for half of them.
    const int64_t blocks = divide_up(c.mainloop_tiles * c.parts, kBlockRows / box_rows);
    while (c.chunk_bytes > bytes_of(kFewColumns) && 2 * blocks * c.chunks() <= warps())
      c.chunk_bytes = c.chunk_bytes / 2 / kLineBytes * kLineBytes;
    c.in_flight = entries_in_flight(kMinSlotBytes) * kMinSlotBytes / c.entry_bytes();
    c.stage_columns = format_.columns_of(c.chunk_bytes);
    return c;
  }

  const Linears& job_;
  const WeightFormat format_;
  const Input x_;
};

class RowsWriter : public BoxedWriter {
 public:
  explicit RowsWriter(const codegen::JobPlace& place)
      : BoxedWriter(place,
                    {"QuantizedRows",
                     "linear::compute_quantized_rows",
                     "",
                     "linear::QuantizedShape<V>::kStagedBytes",
                     "",
                     {"torch_mpk/device/tasks/quantized_rows.cuh"}},
                    fields_of<RowsFields>(place.job.cut).mainloop_tiles,
                    constants(fields_of<RowsFields>(place.job.cut)), false) {}
};

// Whether groups of sums that are scaled together are of columns that the kernel scales, and of rows of a box, or one.
bool has_whole_blocks(const WeightFormat& f) {
  const bool are_columns = f.block_columns % kStepColumns == 0 || f.block_columns == 64 || f.block_columns == 32;
  return has_blocks_of_rows(f) && (f.scales_rows() || are_columns) &&
         (!f.quantizes_x() || f.x_columns == kStepColumns || f.x_columns >= f.columns);
}

class Rows : public Kernel {
 public:
  Rows() : Kernel("quantized_linear.rows") {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    return refuses_reduced(node);
  }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    if (auto refusal = refuses_boxes(schedule, job, kMostRows)) return refusal;
    for (int n : job.body)
      if (!has_whole_blocks(WeightFormat::of(schedule.graph.nodes()[n])))
        return "blocks of scales are not whole blocks of " + std::to_string(kBlockRows) + " x " +
               std::to_string(kStepColumns);
    return std::nullopt;
  }

  // x comes in stages if shared memory has no room for all of it, unless it must be staged.
  static Input input_of_x(const Schedule& schedule, const Job& job) {
    const Tensor& x = Linears::input(schedule, job);
    const bool must_be_whole = !job.prologue.empty() || schedule.polled[x.buffer] || !has_aligned_rows(x);
    const bool is_short = x.numel() * size_bytes(x.dtype) <= kMostWhole && leaves_room(x, schedule.target);
    return must_be_whole || is_short ? Input::kWhole : Input::kStages;
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
    const RowsCut best = cutter.best();
    Cut cut = job.cut;
    cut.input = input_of_x(schedule, job);
    cut.staged_bytes = cutter.staged_bytes(best);
    if (cut.staged_bytes > linears.room_beside_boxes) return {};
    cut.num_tiles = linears.tiles(best.tile_rows);
    cut.shape = static_cast<const TileShape&>(best);
    cut.fields = list_fields<RowsFields>(best);
    cut.cost_ns = cutter.nanoseconds(best);
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    const Cut& cut = proof.cut();
    proof.require(cut.shape && cut.shape->is_boxed && cut.shape->x_rows == 0, "its weights do not come in boxes");
    const TileShape& s = *cut.shape;
    const auto own = fields_of<RowsFields>(cut);
    const WeightFormat format = WeightFormat::of(proof.first());
    proof.require(s.chunk_parts == 1 && s.readers == 1 && !proof.schedule().warps.all_read_entries,
                  "a box of " + proof.str(s.tile_rows) + " rows is taken by one warp");
    proof.require(s.tile_rows == 8 || s.tile_rows == kBlockRows, "a box is not a block of products, or half of one");
    proof.require(own.mainloop_tiles > 0 && own.stage_columns == format.columns_of(s.chunk_bytes),
                  "stages of x are not as wide as boxes");
    proof.require_plain_end();
    proof.require_scratch(0);
    proof.require(has_whole_blocks(format), "its scales are not those of whole blocks");
    const Linears linears(proof.schedule(), proof.job());
    RowsCut c{s, own};
    const int64_t bytes = Cutter(linears, format, cut.input).staged_bytes(c);
    proof.require(cut.staged_bytes >= bytes,
                  "it keeps " + proof.str(bytes) + " bytes in " + proof.str(cut.staged_bytes));
  }

  bool takes_companions() const override { return true; }
  codegen::JobCode emit(const codegen::JobPlace& place) const override { return RowsWriter(place).run(); }
};

// ---- weights where they are

class DirectWriter : public QuantizedWriter {
 public:
  explicit DirectWriter(const codegen::JobPlace& place)
      : QuantizedWriter(place, {"QuantizedLinear",
                                "linear::compute_quantized_direct",
                                "",
                                "linear::DirectShape<V>::kStagedBytes",
                                "",
                                {"torch_mpk/device/tasks/quantized_linear.cuh"}}) {}

 private:
  void add_weight(const Node& node, const Tensor& weight) override { weights_.add(refs_, node, weight); }
  std::string write_places() override {
    using namespace codegen;
    const bool is_apart = first_.operand("weight").tensor.strides[1] != 1 || format_.has_word_rows();
    std::vector<std::string> pitches;
    for (int n : job_.body) {
      const Tensor& weight = context_.node(n).operand("weight").tensor;
      pitches.push_back(str(weight.strides[1] * size_bytes(weight.dtype)));
    }
    return QuantizedWriter::write_places() + write_tables(context_, refs_, job_) +
           constant("kRun", std::min(format_.run(), size_)) + weights_.members() +
           constant("kWordColumns", is_apart ? format_.packed : size_) +
           returning("int64_t", "word_pitch(int i)", is_apart ? choose("i", pitches) : "0");
  }

  codegen::WeightsInPlace weights_;
};

class Direct : public Kernel {
 public:
  Direct() : Kernel("quantized_linear.direct") {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    return refuses_quantized(node);
  }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    if (auto refusal = refuses_quantized(schedule, job)) return refusal;
    const Linears linears(schedule, job);
    if (linears.batch > kMostRowsDirect)
      return "x has " + std::to_string(linears.batch) + " rows, expected at most " + std::to_string(kMostRowsDirect);
    if (linears.x_bytes() > most_staged(schedule.target)) return "x does not fit shared memory";
    const auto are_apart = [](const Tensor& weight) { return weight.strides[1] != 1; };
    if (!all_weights(schedule, job, are_apart) &&
        !all_weights(schedule, job, [&](const Tensor& weight) { return !are_apart(weight); }))
      return "neighbours of some weights lie side by side, and of others apart";
    return std::nullopt;
  }

  int64_t polled_elements(const Schedule& schedule, const Job& job, const Tensor& made) const override {
    return polled_whole(schedule, job, made);
  }

  // An estimate: a lane takes a byte at a time, and waits for it.
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    constexpr double kSlower = 16;
    const Linears linears(schedule, job);
    Cut cut = job.cut;
    cut.input = Input::kWhole;
    cut.staged_bytes = staged_bytes(linears, format_of(schedule, job));
    if (cut.staged_bytes > room(schedule)) return {};
    cut.num_tiles = linears.tiles(1);
    const double row_bytes = double(format_of(schedule, job).row_bytes());
    const double bytes = double(divide_up(cut.num_tiles, linears.workers) * linears.parts) * row_bytes;
    cut.cost_ns = kSlower * double(linears.batch) * bytes / linears.arch.costs.memory_bytes_per_ns;
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    proof.require(!proof.cut().shape && proof.cut().is_staged(), "it reads weights where they are, and x staged");
    const Linears linears(proof.schedule(), proof.job());
    proof.require(proof.cut().staged_bytes >= staged_bytes(linears, WeightFormat::of(proof.first())),
                  "x and its factors do not fit what it stages");
    proof.require_plain_end();
  }

  static int64_t staged_bytes(const Linears& job, const WeightFormat& format) {
    return job.x_bytes() + job.batch * divide_up(job.size, std::min(format.run(), job.size)) * 4;
  }

  bool takes_companions() const override { return true; }
  codegen::JobCode emit(const codegen::JobPlace& place) const override { return DirectWriter(place).run(); }
};

const Rows kRows{};
const Direct kDirect{};
[[maybe_unused]] const bool kRegistered =
    add_kernel("quantized_linear", kRows) && add_kernel("quantized_linear", kDirect);

}  // namespace
}  // namespace mpk
