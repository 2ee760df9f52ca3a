#include "quantized_writer.h"

#include "../../codegen/text.h"
#include "../../schedule/kernel.h"
#include "blocks.h"
#include "format_members.h"
#include "linears.h"
#include "torch_mpk/abi/table.h"

namespace mpk {

std::optional<std::string> refuses_quantized(const Node& node) {
  const Operand& x = node.operand("x");
  if (auto why = refuses_row_dtype(x)) return why;
  if (auto why = refuses_dtype(node.operands.back(), x.tensor.dtype)) return why;
  for (const char* name : {"x", "bias", "column_groups", "codebook", "scale_code", "scale_scale", "y"})
    if (const Operand* operand = node.find(name))
      if (auto why = refuses_inner_stride(*operand)) return why;
  return WeightFormat::refuses(node);
}

std::optional<std::string> refuses_quantized(const Schedule& schedule, const Job& job) {
  if (auto refusal = refuses_weights(schedule, job)) return refusal;
  if (schedule.warps.all_read_entries) return kNotTogether;
  if (norm_of(job) >= 0) return "it ends with a norm";
  if (Linears(schedule, job).are_empty()) return "x is empty";
  return std::nullopt;
}

std::string QuantizedWriter::row_factor(const Node& node) {
  if (!format_.scales_rows()) return "";
  const Tensor& scale = node.operand("weight_scale").tensor;
  const int64_t rows = WeightFormat::of(node).block_rows;
  return "to_float(" + refs_.pointer(node, scale) + "[int64_t(n / " + codegen::str(rows) + "u) * " +
         codegen::str(scale.strides[0]) + "])";
}

std::string QuantizedWriter::write_places() {
  using namespace codegen;
  const Operand* given = first_.find("x_scale");
  std::string text = format_members(format_) + flag("kScalesByRow", format_.scales_rows()) +
                     constant("kScaleColumns", format_.scales_rows() ? 0 : format_.block_columns) +
                     flag("kGivenXScale", given != nullptr) +
                     returning("float", "x_scale(const Job& job)",
                               given != nullptr ? refs_.pointer(first_, given->tensor) + "[0]" : "0.0f");
  if (format_.scales_rows()) return text;
  text += flag("kRowsHaveScales", format_.block_rows == 1) + write_block_rows(context_, job_) +
          write_blocks(context_, refs_, job_, "weight_scale", "Scale", "scale");
  return format_.has_zero() ? text + write_blocks(context_, refs_, job_, "zero", "Zero", "zero") : text;
}

std::optional<std::string> refuses_reduced(const Node& node) {
  const DType x = node.operand("x").tensor.dtype;
  if (!is_reduced_float(x)) return "x is " + std::string(info(x).name) + ", not of 16-bit floats";
  return refuses_quantized(node);
}

std::optional<std::string> refuses_boxes(const Schedule& schedule, const Job& job, int64_t most_rows) {
  if (auto refusal = refuses_quantized(schedule, job)) return refusal;
  const Linears linears(schedule, job);
  if (linears.batch > most_rows)
    return "x has " + std::to_string(linears.batch) + " rows, expected at most " + std::to_string(most_rows);
  if (!linears.arch.has_bulk_copies) return "the chip has no copy engine";
  if (schedule.warps.slot_bytes % kBoxAlignment != 0) return "slots of the ring are no multiple of a box";
  if (!has_boxed_weights(schedule, job)) return "a weight's rows are not aligned multiples of 128 bytes";
  return std::nullopt;
}

bool has_blocks_of_rows(const WeightFormat& f) {
  const bool are_rows = f.block_rows == 1 || f.block_rows % kWarpRows == 0 || f.block_rows >= f.rows;
  return !f.has_word_rows() && !f.has_groups && !f.has_code && !f.is_e2m1() && !f.has_nested_scales() &&
         f.row_bytes() % kBoxRowBytes == 0 && (f.scales_rows() || are_rows);
}

std::optional<std::string> refuses_lines(const WeightFormat& f) {
  const int64_t line = f.columns_of(kBoxRowBytes);
  if (f.block_columns >= f.columns || f.block_columns % line == 0 || line % f.block_columns == 0) return std::nullopt;
  return "a scale is for " + std::to_string(f.block_columns) + " columns, of which lines of " + std::to_string(line) +
         " are no multiple, nor part";
}

std::optional<std::string> refuses_conversion(const Node& node) {
  constexpr int64_t kGroupColumns = 64;  // that share a scale; fewer would take too many registers
  const WeightFormat f = WeightFormat::of(node);
  const DType dtype = node.operand("x").tensor.dtype;
  if (f.quantizes_x()) return "x is quantised";
  if (!has_blocks_of_rows(f) || (f.block_columns % kGroupColumns != 0 && f.block_columns < f.columns))
    return "blocks of scales are not whole blocks of " + std::to_string(kWarpRows) + " x " +
           std::to_string(kGroupColumns);
  if (f.scales_rows()) return std::nullopt;
  if (f.block_rows != 1 && f.block_rows < f.rows) return "rows share scales";
  if (f.scale_dtype != dtype || (f.zero == ZeroKind::kAdded && f.zero_bytes != size_bytes(dtype)))
    return "scales are " + std::string(info(f.scale_dtype).name) + ", and x is " + info(dtype).name;
  return std::nullopt;
}

void BoxedWriter::add_weight(const Node& node, const Tensor& weight) {
  refs_.add_map(node, in_words(weight), shape_.tile_rows, shape_.chunk_bytes / 2);
}

StreamRow BoxedWriter::stream_row() const {
  StreamRow row = LinearWriter::stream_row();
  row.stream.chunk_parts = 0;
  row.stream.entries = 1;
  row.stream.by_entries = inverse(1);
  row.stream.rotates = by_rows_ ? 0 : 1;
  row.stream.box_order = shape_.joins_boxes() ? kJoined : by_rows_ ? kByRows : kByChunks;
  row.run = static_cast<uint32_t>(mainloop_tiles_);
  return row;
}

std::string BoxedWriter::shape_constants() const {
  using namespace codegen;
  return constant("kBoxRows", shape_.tile_rows) + constants_ + constant("kEpilogueTiles", mainloop_tiles_) +
         constant("kSplit", 1) + flag("kByWarpgroups", false) + flag("kBoxesOfX", false) + constant("kXRows", batch_) +
         constant("kWorkerTiles", divide_up(job_.cut.num_tiles, context_.schedule.target.num_workers)) +
         returning("const void*", "map_of_x(const Job& job)", "nullptr");
}

}  // namespace mpk
