// Linears with quantised weights and up to 64 rows of x. `rows` copies weights as boxes, converts them in registers,
// and multiplies on tensor cores (quantized_rows.cuh), even with one row of x, where vector units would take longer to
// convert than memory to load. `direct` reads other weights in place.
#include <array>

#include "../../codegen/checks.h"
#include "../../codegen/text.h"
#include "../../schedule/choices.h"
#include "../../schedule/kernel.h"
#include "../fields.h"
#include "linears.h"
#include "torch_mpk/abi/table.h"
#include "torch_mpk/graph/weight_format.h"
#include "writer.h"

namespace mpk {
namespace {

constexpr int64_t kMostRows = 64, kMostRowsDirect = 16;  // of x
constexpr int64_t kBlockRows = 16;                       // of weights, multiplied by a warp at a time
constexpr int64_t kStepColumns = 128;                    // of weights, whose sums are scaled together
constexpr int64_t kMostWhole = 100 * 1024;               // the most bytes of x that are staged as a whole by choice

// The format of all of a job's weights.
WeightFormat format_of(const Schedule& schedule, const Job& job) {
  return WeightFormat::of(schedule.graph.nodes()[job.body.front()]);
}

std::optional<std::string> refuses_operands(const Node& node) {
  const Operand& x = node.operand("x");
  if (auto why = refuses_row_dtype(x)) return why;
  if (auto why = refuses_dtype(node.operands.back(), x.tensor.dtype)) return why;
  for (const Operand& operand : node.operands)
    if (auto why = refuses_inner_stride(operand)) return why;
  return WeightFormat::refuses(node);
}

std::optional<std::string> refuses_format(const Schedule& schedule, const Job& job) {
  for (int n : job.body) {
    const Node& node = schedule.graph.nodes()[n];
    const WeightFormat mine = WeightFormat::of(node), first = format_of(schedule, job);
    if (mine.scales_rows() != first.scales_rows() || mine.block_columns != first.block_columns)
      return "weights of one job are scaled in blocks of different columns";
    for (const char* name : {"weight", "weight_scale"})
      if (!is_constant(schedule.graph, node.operand(name).tensor)) return "the launch writes a " + std::string(name);
  }
  if (schedule.warps.all_read_entries) return kNotTogether;
  if (norm_of(job) >= 0) return "it ends with a norm";
  if (Linears(schedule, job).are_empty()) return "x is empty";
  return std::nullopt;
}

// The common code of both kernels: the places of scales.
class QuantizedWriter : public codegen::LinearWriter {
 protected:
  QuantizedWriter(const codegen::JobPlace& place, codegen::JobCode code)
      : LinearWriter(place, std::move(code)), format_(WeightFormat::of(first_)) {}

  // If each row has one scale, it is a factor of the row's results. Otherwise scales stand beside the weights.
  std::string row_factor(const Node& node) override {
    if (!format_.scales_rows()) return "";
    const Tensor& scale = node.operand("weight_scale").tensor;
    const int64_t rows = WeightFormat::of(node).block_rows;
    return "to_float(" + refs_.pointer(node, scale) + "[int64_t(n / " + codegen::str(rows) + "u) * " +
           codegen::str(scale.strides[0]) + "])";
  }

  std::string write_places() override {
    using namespace codegen;
    std::vector<std::string> scales, pitches, block_rows;
    for (int n : format_.scales_rows() ? std::vector<int>{} : job_.body) {
      const Node& node = context_.node(n);
      const Tensor& scale = node.operand("weight_scale").tensor;
      scales.push_back(refs_.pointer(node, scale));
      pitches.push_back(str(scale.strides[0]));
      block_rows.push_back(str(WeightFormat::of(node).block_rows) + "u");
    }
    const Operand* given = first_.find("x_scale");
    std::string text = flag("kIsE4M3", format_.storage == DType::kE4M3) + flag("kScalesByRow", format_.scales_rows()) +
                       constant("kScaleColumns", format_.scales_rows() ? 0 : format_.block_columns) +
                       constant("kXScaleColumns", format_.x_columns) + flag("kGivenXScale", given != nullptr) +
                       returning("float", "x_scale(const Job& job)",
                                 given != nullptr ? refs_.pointer(first_, given->tensor) + "[0]" : "0.0f");
    if (scales.empty()) return text;
    text += "  using Scale = " + std::string(cuda_type(format_.scale_dtype)) + ";\n";
    return text + returning("const Scale*", "scale(const Job& job, int i)", choose("i", scales)) +
           returning("int64_t", "scale_pitch(int i)", choose("i", pitches)) +
           returning("uint32_t", "scale_rows(int i)", choose("i", block_rows));
  }

  const WeightFormat format_;
};

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

// The use of shared memory, see QuantizedShape in quantized_rows.cuh.
class Cutter {
 public:
  Cutter(const Linears& job, const WeightFormat& format, Input x) : job_(job), format_(format), x_(x) {}

  RowsCut best() const {
    int64_t columns = is_staged() || job_.batch <= 8 ? 1024 : job_.batch <= 16 ? 512 : 256;
    int64_t held = job_.batch <= 16 ? 3 : 2;
    while (true) {
      const RowsCut c = cut(columns, held);
      const bool can_narrow = columns > 2 * kStepColumns;
      if (staged_bytes(c) <= job_.room_beside_boxes || (!can_narrow && held == 1)) return c;
      can_narrow ? columns /= 2 : held--;
    }
  }

  int64_t staged_bytes(const RowsCut& c) const {
    const int64_t blocks = divide_up(c.mainloop_tiles * c.parts, kBlockRows / c.tile_rows);
    const int64_t rows = round_up(job_.batch, 8), sums = std::max(blocks, warps()) * rows * kSumPitch * 4;
    const int64_t at_hand = is_staged() ? job_.size : kStages * c.stage_columns;
    const int64_t x = job_.batch * (at_hand * job_.element + (is_staged() ? 1 : kStages) * kAccessBytes);
    const int64_t factors = (at_hand / kStepColumns + 1) * rows * 4;  // and one for each row
    const int64_t scales = format_.scales_rows() ? 0 : tiles_of_worker(c) * c.parts * format_.scale_columns() * 4;
    const int64_t whole = is_staged() ? round_up(x, kSharedAlignment) + sums : std::max(x, sums);
    return round_up(whole, kSharedAlignment) + round_up(factors, kSharedAlignment) + scales;
  }

  double nanoseconds(const RowsCut& c) const {
    const Costs& costs = job_.arch.costs;
    const double tiles = double(divide_up(job_.tiles(c.tile_rows), job_.workers));
    const double weights = tiles * double(c.tile_rows * job_.parts * c.row_bytes);
    const double x = double(job_.batch * job_.size * job_.element) * tiles / double(c.mainloop_tiles);
    return std::max(weights / costs.memory_bytes_per_ns, (weights + x) / costs.by_warps.bytes_per_ns);
  }

 private:
  bool is_staged() const { return x_ == Input::kWhole; }
  int64_t warps() const { return job_.warps - (is_staged() ? 0 : kProducerWarps); }
  int64_t tiles_of_worker(const RowsCut& c) const { return divide_up(job_.tiles(c.tile_rows), job_.workers); }

  RowsCut cut(int64_t columns, int64_t held) const {
    const bool is_even = job_.batch <= 16 || job_.tiles(kBlockRows) < job_.workers;
    const int64_t box_rows = is_even ? 8 : kBlockRows;
    const int64_t most_bytes = kMinSlotBytes / box_rows / kBoxRowBytes * kBoxRowBytes;
    RowsCut c{{box_rows, job_.parts, 1, job_.size, std::min({columns, job_.size, most_bytes})}, {}};
    c.is_boxed = true;
    const int64_t mine = tiles_of_worker(c);
    const int64_t most = std::max<int64_t>(held * warps() * (kBlockRows / box_rows) / job_.parts, 1);
    c.mainloop_tiles = std::max<int64_t>(divide_up(mine, divide_up(mine, most)), 1);
    // If a pass has few blocks, warps take turns at chunks, so there must be chunks enough for half of the warps.
    const int64_t blocks = divide_up(c.mainloop_tiles * c.parts, kBlockRows / box_rows);
    while (c.chunk_bytes > 2 * kStepColumns && 2 * blocks * c.chunks() <= warps())
      c.chunk_bytes = c.chunk_bytes / 2 / kStepColumns * kStepColumns;
    c.in_flight = entries_in_flight(kMinSlotBytes) * kMinSlotBytes / c.entry_bytes();
    c.stage_columns = c.chunk_bytes;
    return c;
  }

  const Linears& job_;
  const WeightFormat format_;
  const Input x_;
};

class RowsWriter : public QuantizedWriter {
 public:
  explicit RowsWriter(const codegen::JobPlace& place)
      : QuantizedWriter(place, {"QuantizedRows",
                                "linear::compute_quantized_rows",
                                "",
                                "linear::QuantizedShape<V>::kStagedBytes",
                                "",
                                {"torch_mpk/device/tasks/quantized_rows.cuh"}}),
        own_(fields_of<RowsFields>(job_.cut)) {}

 private:
  void add_weight(const Node& node, const Tensor& weight) override {
    refs_.add_map(node, in_words(weight), shape_.tile_rows, shape_.chunk_bytes / 2);
  }

  StreamRow stream_row() const override {
    StreamRow row = LinearWriter::stream_row();
    row.stream.chunk_parts = 0;
    row.stream.entries = 1;
    row.stream.by_entries = inverse(1);
    row.stream.rotates = 1;
    row.run = static_cast<uint32_t>(own_.mainloop_tiles);
    return row;
  }

  std::string shape_constants() const override {
    using namespace codegen;
    return constant("kBoxRows", shape_.tile_rows) + constants(own_) + constant("kEpilogueTiles", own_.mainloop_tiles) +
           constant("kSplit", 1) + flag("kByWarpgroups", false) + flag("kBoxesOfX", false) +
           constant("kXRows", batch_) +
           constant("kWorkerTiles", divide_up(job_.cut.num_tiles, context_.schedule.target.num_workers)) +
           returning("const void*", "map_of_x(const Job& job)", "nullptr");
  }

  const char* type_of_x() const override { return job_.cut.is_staged() ? "const uint16_t*" : "const T*"; }
  void write_behind() override { write_row_sums(); }

  const RowsFields own_;
};

bool has_whole_blocks(const WeightFormat& f) {
  return f.columns % kStepColumns == 0 &&
         (f.scales_rows() ||
          (f.block_columns % kStepColumns == 0 && (f.block_rows % kBlockRows == 0 || f.block_rows >= f.rows))) &&
         (!f.quantizes_x() || f.x_columns == kStepColumns || f.x_columns >= f.columns);
}

class Rows : public Kernel {
 public:
  Rows() : Kernel("quantized_linear.rows") {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    return refuses_operands(node);
  }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    if (auto refusal = refuses_format(schedule, job)) return refusal;
    const Linears linears(schedule, job);
    const Tensor& x = Linears::input(schedule, job);
    if (!is_reduced_float(x.dtype)) return "x is " + std::string(info(x.dtype).name) + ", not of 16-bit floats";
    if (linears.batch > kMostRows)
      return "x has " + std::to_string(linears.batch) + " rows, expected at most " + std::to_string(kMostRows);
    if (!linears.arch.has_bulk_copies) return "the chip has no copy engine";
    if (schedule.warps.slot_bytes % kBoxAlignment != 0) return "slots of the ring are no multiple of a box";
    if (!has_boxed_weights(schedule, job)) return "a weight's rows are not aligned multiples of 128 bytes";
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
    proof.require(s.chunk_parts == 1 && s.readers == 1 && !proof.schedule().warps.all_read_entries,
                  "a box of " + proof.str(s.tile_rows) + " rows is taken by one warp");
    proof.require(s.tile_rows == 8 || s.tile_rows == kBlockRows, "a box is not a block of products, or half of one");
    proof.require(own.mainloop_tiles > 0 && own.stage_columns == s.chunk_bytes, "stages of x are not as wide as boxes");
    proof.require_plain_end();
    proof.require_scratch(0);
    const WeightFormat format = WeightFormat::of(proof.first());
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
    return QuantizedWriter::write_places() + codegen::constant("kRun", std::min(format_.run(), size_)) +
           weights_.members();
  }

  codegen::WeightsInPlace weights_;
};

class Direct : public Kernel {
 public:
  Direct() : Kernel("quantized_linear.direct") {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    return refuses_operands(node);
  }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    if (auto refusal = refuses_format(schedule, job)) return refusal;
    const Linears linears(schedule, job);
    if (linears.batch > kMostRowsDirect)
      return "x has " + std::to_string(linears.batch) + " rows, expected at most " + std::to_string(kMostRowsDirect);
    if (linears.x_bytes() > most_staged(schedule.target)) return "x does not fit shared memory";
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
    const double bytes = double(divide_up(cut.num_tiles, linears.workers) * linears.parts * linears.size);
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
