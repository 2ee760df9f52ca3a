#include "writer.h"

#include <algorithm>
#include <utility>

#include "../../codegen/checks.h"
#include "../../codegen/pattern.h"
#include "../../codegen/row_epilogues.h"
#include "../../codegen/tasks/rms_norm.h"
#include "../../codegen/text.h"
#include "../../schedule/access.h"
#include "linears.h"

namespace mpk::codegen {
namespace {

uint32_t u32(int64_t v) { return static_cast<uint32_t>(v); }

}  // namespace

LinearWriter::LinearWriter(const JobPlace& place, JobCode code)
    : context_(place.context),
      place_(place),
      job_(place.job),
      first_(place.node()),
      x_(first_.operand("x").tensor),
      batch_(x_.shape[0]),
      size_(x_.shape[1]),
      element_(size_bytes(x_.dtype)),
      dtype_(first_.operands.back().tensor.dtype),
      weight_element_(size_bytes(first_.operand("weight").tensor.dtype)),
      row_bytes_(first_.operand("weight").tensor.shape[1] * weight_element_),
      owners_(owners_of_epilogues(context_.graph(), job_)),
      paired_(!owners_.empty() && (job_.body.size() == 1 || is_side_by_side(context_.graph(), job_))),
      shape_(job_.cut.shape.value_or(whole_rows())),
      code_(std::move(code)),
      refs_(context_, code_.refs) {
  if (code_.headers.empty()) code_.headers = {first_.def->header};
}

JobCode LinearWriter::run() {
  check_operands();
  chain_ = find_chain(context_, job_.prologue, first_, x_);
  check_staging();
  find_matrices();
  write_stream();
  write_sizes();
  write_early();
  write_results();
  write_behind();
  return std::move(code_);
}

void LinearWriter::check_operands() {
  for (int n : job_.body) {
    const Node& node = context_.node(n);
    const Tensor& x = node.operand("x").tensor;
    require(pattern(x) == pattern(x_) && x.buffer == x_.buffer, node, "linears of one job must have one input");
    const Tensor& weight = node.operand("weight").tensor;
    require(!job_.cut.shape || context_.aligned_rows(weight, false), node,
            "a weight that streams is not aligned to 16 bytes");
    rows_.push_back(Linears::weight_rows(node));
    require(!paired_ || rows_.back() == rows_.front(), node,
            "linears with a common epilogue must have equally many rows");
  }
}

// x is staged, or read in place.
void LinearWriter::check_staging() const {
  require(job_.cut.input != Input::kInPlace || takes_any_x() || context_.aligned_rows(x_, true), first_,
          "x is too large to stage and not aligned to 16 bytes");
}

void LinearWriter::find_matrices() {
  for (size_t i = 0; i < job_.body.size(); i++) {
    const Node& node = context_.node(job_.body[i]);
    const Tensor& weight = node.operand("weight").tensor;
    const int64_t first = paired_ ? 0 : tiles_;
    first_tile_.push_back(str(first) + "u");
    num_rows_.push_back(str(rows_[i]) + "u");
    tiles_ = first + (rows_[i] + shape_.tile_rows - 1) / shape_.tile_rows;
    add_weight(node, weight);
    if (job_.cut.shape && shape_.x_rows == 0)
      code_.matrices.push_back({u32(weight.strides[0] * weight_element_), u32(rows_[i]), u32(first), u32(tiles_)});
  }
  if (paired_) first_tile_ = {"0u"}, num_rows_ = {num_rows_.front()};
  add_input();
}

StreamRow LinearWriter::stream_row() const {
  const TileShape& s = shape_;
  const uint32_t chunks = u32(s.chunks()), entries = u32(s.entries());
  return {{u32(s.tile_rows), u32(s.parts), u32(s.chunk_parts), u32(s.row_bytes), u32(s.chunk_bytes), chunks, entries,
           inverse(chunks), inverse(entries), u32(s.in_flight), 1, 0},
          job_.tickets,
          u32(s.run)};
}

void LinearWriter::write_stream() {
  if (code_.matrices.empty()) return;
  if (shape_.shares_entries) code_.shared_loop = cuda_type(dtype_);
  code_.stream = stream_row();
}

std::string LinearWriter::shape_constants() const {
  return constant("kTileRows", shape_.tile_rows) + constant("kChunkParts", shape_.chunk_parts);
}

bool LinearWriter::reads_x() const { return !job_.cut.is_staged(); }

void LinearWriter::write_sizes() {
  const ChainCode prologue = emit_chain(context_, refs_, first_, chain_, {.phase = place_.phase});
  code_.headers.insert(code_.headers.end(), prologue.headers.begin(), prologue.headers.end());
  early_ = prologue.early;
  code_.body = "  using T = " + std::string(cuda_type(dtype_)) + ";\n" + constant("kBatch", batch_) +
               constant("kSize", size_) + constant("kSegments", static_cast<int64_t>(first_tile_.size())) +
               constant("kParts", shape_.parts) + shape_constants() +
               constant("kChunkSize", shape_.chunk_bytes * size_ / std::max<int64_t>(row_bytes_, 1)) +
               "  static constexpr uint32_t kNumTiles = " + str(job_.cut.num_tiles) + ";\n" +
               flag("kStaged", job_.cut.is_staged()) + flag("kRowTasks", !chain_.tasks.empty()) +
               flag("kClaimed", job_.assignment == Assignment::kClaimed) + flag("kSharesLoop", shape_.shares_entries) +
               returning("uint32_t", "first_tile(int i)", choose("i", first_tile_)) +
               returning("uint32_t", "num_rows(int i)", choose("i", num_rows_)) + prologue.text;
  code_.body += write_places();
  code_.body += constant("kPitchX", x_.strides[0]) +
                returning(type_of_x(), "x(const Job& job)", reads_x() ? refs_.pointer(first_, x_) : "nullptr");
}

// Whether chains and extras may fetch their first operands before the phase's events.
void LinearWriter::write_early() {
  const auto made_here = [&](int buffer) {
    const auto makes = [&](int n) { return writes(context_.node(n), buffer); };
    return std::any_of(job_.body.begin(), job_.body.end(), makes) ||
           std::any_of(job_.epilogue.begin(), job_.epilogue.end(), makes);
  };
  for (const std::vector<int>* nodes : {&job_.body, &job_.epilogue})
    for (int n : *nodes)
      for (const Operand& operand : context_.node(n).operands) {
        const int b = operand.tensor.buffer;
        if (!operand.is_write && operand.name != "x" && !made_here(b))
          early_ &= context_.polled(b) || context_.known_before(b, place_.phase);
      }
  code_.body += flag("kEarly", early_);
}

TileShape LinearWriter::whole_rows() const {
  TileShape shape;
  if (paired_) shape.parts = static_cast<int64_t>(job_.body.size());
  shape.row_bytes = shape.chunk_bytes = row_bytes_;
  return shape;
}

// The epilogue of a value: bias, rounding, the linear's own result, the pointwise tasks.
void LinearWriter::write_results() {
  for (size_t i = 0; i < job_.body.size(); i++) write_result(static_cast<int>(i));
  if (!segments_with_rows_.empty()) write_segments_with_rows();
  if (paired_ && segments_with_rows_.empty()) write_epilogues(-1, finish_, preload_);
  if (const int norm = norm_of(job_); norm >= 0) write_norm(context_.node(norm));
  code_.has_extra = !fields_.empty();
  code_.body += flag("kHasExtra", code_.has_extra) + "  struct Extra {\n" + fields_ + "  };\n" +
                function("Extra", "preload(const Job& job, int segment, int r, uint32_t n)",
                         "    Extra extra{};\n" + preload_ + "    return extra;\n");
  if (has_common()) code_.body += common_loads(common_fields_, common_);
  code_.body +=
      "  template <class C>\n" + function(job_.cut.row_sums ? "float" : "void",
                                          "finish(C& c, const Job& job, int segment, int r, uint32_t n, const float "
                                          "(&results)[kParts], const Extra& extra" +
                                              std::string(has_common() ? ", const Common& common)" : ")"),
                                          finish_);
}

void LinearWriter::write_result(int i) {
  const Node& node = context_.node(job_.body[i]);
  if (const auto rows = rows_behind(context_.graph(), job_, node); !rows.empty()) return write_rows(i, rows);
  const std::string number = str(i);
  const Tensor& y = node.operands.back().tensor;
  const bool is_segment = !paired_ && job_.body.size() > 1;
  std::string value = "results[" + (paired_ ? number : "0") + "]", store;
  if (const std::string factor = row_factor(node); !factor.empty()) {
    const std::string field = paired_ ? "factor" + number : "factor0", load = "extra." + field + " = " + factor + ";\n";
    if (fields_.find(" " + field + ";") == std::string::npos) fields_ += "    float " + field + ";\n";
    preload_ += "    " + (paired_ ? load : "if (segment == " + number + ") " + load);
    value += " * extra." + field;
  }
  if (const Operand* bias = node.find("bias")) {
    const std::string field = paired_ ? "bias" + number : "bias0";
    if (fields_.find(" " + field + ";") == std::string::npos) fields_ += "    uint32_t " + field + ";\n";
    const std::string load = "extra." + field + " = to_word(" + refs_.pointer(node, bias->tensor) + "[n]);\n";
    preload_ += "    " + (paired_ ? load : "if (segment == " + number + ") " + load);
    value += " + to_float(from_word<" + std::string(cuda_type(bias->tensor.dtype)) + ">(extra." + field + "))";
  }
  const std::string name = "y" + number;
  if (!contains(job_.unstored, y.buffer))
    store = "    " + emit_store(context_, refs_, node, y, "int64_t(r) * " + str(y.strides[0]) + " + n", name) + "\n";
  std::string statements = "    const T " + name + " = cast<T>(" + value + ");\n" + store;
  if (!owners_.empty()) locals_.push_back({y.buffer, pattern(y), name, dtype_});
  if (!is_segment) {
    finish_ += statements;
    return;
  }
  std::string preload;
  write_epilogues(i, statements, preload);
  const auto of_segment = [&](const std::string& text) {
    return text.empty() ? text : "    if (segment == " + number + ") {\n" + text + "    }\n";
  };
  finish_ += of_segment(statements);
  preload_ += of_segment(preload);
}

// The row tasks at the end of a segment, and the stores of their rows, see linear_tile_rows.cuh.
void LinearWriter::write_rows(int i, const std::vector<const Node*>& tasks) {
  const Node& node = context_.node(job_.body[i]);
  require(shape_.x_rows > 0 && shape_.parts == 1, node, "its tiles have no whole rows for the row tasks behind it");
  const Tensor &x = tasks.front()->operands.front().tensor, &y = tasks.back()->operands.back().tensor;
  const int64_t size = x.shape.back();
  const ChainCode chain = emit_chain(context_, refs_, node, {tasks, &x}, {.phase = place_.phase, .is_there = true});
  code_.headers.insert(code_.headers.end(), chain.headers.begin(), chain.headers.end());
  std::string bias;
  if (const Operand* operand = node.find("bias")) {
    const std::string elements = refs_.pointer(node, operand->tensor), type = "Vec<T, 2>";
    const bool is_aligned = context_.aligned_rows(operand->tensor, false);
    bias = returning(type, "bias(const Job& job, uint32_t n)",
                     is_aligned ? "*reinterpret_cast<const " + type + "*>(" + elements + " + n)"
                                : type + "{" + elements + "[n], " + elements + "[n + 1]}");
  }
  // Stored with the rows' epilogues, not by the chain: lanes whose rows are past x's end go through the chain, too.
  const std::string store = contains(job_.unstored, y.buffer)
                                ? ""
                                : "    store_together(" + refs_.pointer(*tasks.back(), y, true) + " + " +
                                      row_offset(y, "row") + " + column, elements);\n";
  std::vector<int> epilogues;
  for (size_t e = 0; e < job_.epilogue.size(); e++)
    if (owners_[e] == i && context_.node(job_.epilogue[e]).program) epilogues.push_back(job_.epilogue[e]);
  constexpr int64_t kLanes = 4;  // of a row
  code_.body += "  struct Rows" + str(i) + " {\n  using T = " + cuda_type(dtype_) + ";\n" + constant("kSize", size) +
                constant("kOfX", rows_[i] / size) + chain.text + bias +
                emit_row_epilogues(context_, refs_, job_, epilogues, y, kLanes, store) + "  };\n";
  segments_with_rows_.push_back(i);
}

void LinearWriter::write_segments_with_rows() {
  std::string condition, calls;
  for (int i : segments_with_rows_) {
    const std::string is_this = "segment == " + str(i);
    condition += (condition.empty() ? "" : " || ") + is_this;
    calls += "    if (" + is_this + ") return f(Rows" + str(i) + "{});\n";
  }
  code_.body += returning("bool", "has_rows(int segment)", condition) + "  template <class F>\n" +
                function("void", "with_rows(int segment, F f)", calls);
}

// The norm at the job's end: its part of each element, and the element's square for the rows' sums.
void LinearWriter::write_norm(const Node& norm) {
  const Operand* weight = norm.find("weight");
  const Tensor &rows = norm.operands.front().tensor, &y = norm.operands.back().tensor;
  const auto element = std::find_if(locals_.rbegin(), locals_.rend(),
                                    [&](const LocalValue& local) { return local.buffer == rows.buffer; });
  require(element != locals_.rend() && job_.cut.row_sums, norm, "the job that ends with it does not make its rows");
  if (weight) {
    require(weight->tensor.dtype == dtype_, norm, "its weight has another dtype than its rows");
    fields_ += "    uint32_t factor;\n";
    preload_ += "    extra.factor = to_word(" + refs_.pointer(norm, weight->tensor) + "[n]);\n";
    fetch_ = "    ptx::prefetch_l2(" + refs_.pointer(norm, weight->tensor) + " + n);\n";
    finish_ += "    const T factor = from_word<T>(extra.factor);\n";
  }
  const std::string value = weighted_element(norm, "element", weight ? "&factor" : "static_cast<const T*>(nullptr)");
  finish_ += "    const float element = to_float(" + element->variable + ");\n    " +
             emit_store(context_, refs_, norm, y, "int64_t(r) * " + str(rows.shape.back()) + " + n", value) +
             "\n    return element * element;\n";
  code_.headers.push_back(norm.def->header);
}

// Members for the sums of squares that it leaves, if it ends with a norm, and for those of x's rows, if another job's
// norm made x.
void LinearWriter::write_row_sums() {
  const Job* maker = find_norm(context_.schedule, x_.buffer);
  code_.body += flag("kEndsWithNorm", job_.cut.row_sums.has_value()) + flag("kScalesRows", maker != nullptr);
  if (job_.cut.row_sums) {
    write_sums("row_sums", "kRowSums", *job_.cut.row_sums);
    code_.body += function("void", "fetch_factor(const Job& job, uint32_t n)", fetch_);
  }
  if (maker == nullptr) return;
  require(job_.cut.input == Input::kBoxStages, first_, "rows of x lack factors, but do not come in stages");
  const Node& norm = context_.node(norm_of(*maker));
  write_sums("sums_of_x", "kSumsOfX", *maker->cut.row_sums);
  code_.body += "  static constexpr float kEps = " + float_literal(norm.float_attr("eps")) + ";\n";
}

void LinearWriter::write_sums(const std::string& name, const std::string& count, const RowSums& sums) {
  code_.body += constant(count, sums.count) +
                returning("float*", name + "(const Job& job)", refs_.workspace(sums.offset, "float"));
}

// The epilogues of an owner, or all of them if linears are side by side.
void LinearWriter::write_epilogues(int owner, std::string& finish, std::string& preload) {
  const int64_t row = rows_[std::max(owner, 0)], points = batch_ * row;
  // Tiles' epilogues reorder dimensions. Unsigned numbers turn their divisions into shifts.
  const bool is_tile = shape_.x_rows > 0;
  const std::string point =
      "    const " + std::string(is_tile ? "uint32_t" : "int32_t") + " point = r * " + str(row) + " + n;\n";
  std::string body, loads;
  for (size_t i = 0; i < job_.epilogue.size(); i++) {
    const Node& node = context_.node(job_.epilogue[i]);
    if ((owner >= 0 && owners_[i] != owner) || !node.program) continue;
    require(points < (int64_t(1) << 31), first_, "more than 2^31 results");
    const std::optional<std::vector<int64_t>> strides =
        strides_behind(context_.graph(), makers_of(job_, node.id), node);
    require(strides && node.program->num_points() == points, node,
            "an epilogue of " + str(points) + " results must have as many points, each of one of them");
    const ProgramCode program = emit_program(context_, refs_, node,
                                             {.prefix = "e" + str(static_cast<int64_t>(i)) + "_",
                                              .point = "point",
                                              .strides = *strides,
                                              .row = is_tile ? row : 0,
                                              .early_loads = true,
                                              .common_loads = has_common(),
                                              .locals = &locals_,
                                              .unstored = &job_.unstored});
    fields_ += program.preload_fields;
    loads += program.preload;
    common_fields_ += program.common_fields;
    common_ += program.common;
    body += program.body;
  }
  if (body.empty()) return;
  finish += point + body;
  if (!loads.empty()) preload += point + loads;
}

void WeightsInPlace::add(Refs& refs, const Node& node, const Tensor& weight) {
  weights_.push_back("job.pointer<const uint8_t>(" + str(refs.add(node, weight)) + ")");
  pitches_.push_back("int64_t(" + str(weight.strides[0] * size_bytes(weight.dtype)) + ")");
}

std::string WeightsInPlace::members() const {
  return returning("const uint8_t*", "weight(const Job& job, int i)", choose("i", weights_)) +
         returning("int64_t", "weight_pitch(int i)", choose("i", pitches_));
}

}  // namespace mpk::codegen
