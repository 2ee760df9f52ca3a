#include "blocks.h"

#include "../../codegen/text.h"
#include "../../schedule/staging.h"

namespace mpk {

using namespace codegen;

const std::vector<std::string> kOfWeight = {"weight",   "weight_scale", "zero",        "column_groups",
                                            "codebook", "scale_code",   "scale_scale", "scale_offset"};

std::optional<std::string> refuses_weights(const Schedule& schedule, const Job& job) {
  const WeightFormat first = format_of(schedule, job);
  for (int n : job.body) {
    const Node& node = schedule.graph.nodes()[n];
    const WeightFormat mine = WeightFormat::of(node);
    if (mine.scales_rows() != first.scales_rows() || mine.block_columns != first.block_columns ||
        (mine.block_rows == 1) != (first.block_rows == 1) || mine.zero != first.zero)
      return "weights of one job are scaled in different blocks";
    if (mine.packed != first.packed || mine.word_rows != first.word_rows)
      return "weights of one job are packed in different ways";
    for (const std::string& name : kOfWeight)
      if (const Operand* operand = node.find(name); operand != nullptr && !is_constant(schedule.graph, operand->tensor))
        return "the launch writes a " + name;
  }
  return std::nullopt;
}

std::string write_blocks(const KernelContext& context, Refs& refs, const Job& job, const char* operand,
                         const std::string& type, const std::string& name) {
  std::vector<std::string> places, pitches, column_pitches;
  DType dtype = DType::kF32;
  for (int n : job.body) {
    const Node& node = context.node(n);
    const Tensor& blocks = node.operand(operand).tensor;
    dtype = blocks.dtype;
    places.push_back(refs.pointer(node, blocks));
    pitches.push_back(str(blocks.strides[0]));
    column_pitches.push_back(str(blocks.strides[1]));
  }
  return "  using " + type + " = " + cuda_type(dtype) + ";\n" +
         returning("const " + type + "*", name + "(const Job& job, int i)", choose("i", places)) +
         returning("int64_t", name + "_pitch(int i)", choose("i", pitches)) +
         returning("int64_t", name + "_column_pitch(int i)", choose("i", column_pitches));
}

std::string write_tables(const KernelContext& context, Refs& refs, const Job& job) {
  const auto table = [&](const std::string& type, const std::string& name) {
    std::vector<std::string> places;
    for (int n : job.body) places.push_back(refs.pointer(context.node(n), context.node(n).operand(name).tensor));
    return returning("const " + type + "*", name + "(const Job& job, int i)", choose("i", places));
  };
  const WeightFormat format = format_of(context.schedule, job);
  std::string text;
  if (format.has_groups) text += constant("kGroups", format.scale_columns()) + table("int32_t", "column_groups");
  if (format.has_code) text += table("float", "codebook");
  if (!format.has_nested_scales()) return text;
  text += constant("kRowScales", format.scale_columns()) + constant("kScaleBlock", format.scale_block);
  for (const char* name : {"scale_code", "scale_scale", "scale_offset"}) text += table("float", name);
  return text;
}

std::string write_block_rows(const KernelContext& context, const Job& job) {
  std::vector<std::string> block_rows;
  for (int n : job.body) block_rows.push_back(str(WeightFormat::of(context.node(n)).block_rows) + "u");
  return returning("uint32_t", "scale_rows(int i)", choose("i", block_rows));
}

}  // namespace mpk
