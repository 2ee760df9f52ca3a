// Row tasks: jobs of their own, and chains in front of stream tasks. Also the references every job makes.
#include <algorithm>
#include <stdexcept>

#include "emit.h"
#include "torch_mpk/codegen/unsupported.h"
#include "torch_mpk/device/table.h"

namespace mpk::codegen {

void fail(const Node& node, const std::string& why) {
  throw Unsupported(node.def->name + (node.label.empty() ? "" : " (" + node.label + ")") + ": " + why);
}

int Refs::add_raw(uint32_t index, uint64_t offset) {
  refs_.push_back(make_ref(index, offset));
  return static_cast<int>(refs_.size()) - 1;
}

int Refs::add(const Node& node, const Tensor& t) {
  const Buffer& buffer = plan_.graph().buffers()[t.buffer];
  const int64_t offset = t.offset * size_bytes(t.dtype);
  if (buffer.kind == BufferKind::kInput) return add_raw(buffer.index, offset);
  if (buffer.kind == BufferKind::kOutput) return add_raw(plan_.num_inputs + buffer.index, offset);
  const int64_t place = plan_.schedule.workspace_offsets[t.buffer];
  if (place < 0) fail(node, "buffer '" + buffer.name + "' is needed in memory, but the schedule stores it nowhere");
  return add_raw(plan_.polled(t.buffer) ? kPolledIndex : kWorkspaceIndex, place + offset);
}

std::string Refs::pointer(const Node& node, const Tensor& t, bool writable) {
  const std::string type = plan_.polled(t.buffer) ? "uint16_t" : cuda_type(t.dtype);
  return "job.pointer<" + std::string(writable ? "" : "const ") + type + ">(" + str(add(node, t)) + ")";
}

std::string row_offset(const Tensor& t, const std::string& row) {
  Pattern leading;
  if (t.shape.size() > 1)
    leading = pattern({t.shape.begin(), t.shape.end() - 1}, {t.strides.begin(), t.strides.end() - 1}, 0);
  std::string text;
  int64_t step = 1;
  for (size_t d = leading.dims.size(); d-- > 0;) {
    const auto [size, stride] = leading.dims[d];
    std::string index = step == 1 ? "(" + row + ")" : "(" + row + ") / " + str(step);
    if (d > 0) index = "(" + index + ") % " + str(size);
    if (stride != 0) text = "int64_t(" + index + ") * " + str(stride) + (text.empty() ? "" : " + ") + text;
    step *= size;
  }
  return text.empty() ? "0" : text;
}

bool aligned_rows(Plan& plan, const Tensor& t, bool is_activation) {
  const int64_t bytes = size_bytes(t.dtype);
  bool aligned = t.offset * bytes % 16 == 0 && (t.shape.empty() || t.shape.back() * bytes % 16 == 0);
  for (size_t d = 0; d + 1 < t.shape.size(); d++) aligned &= t.shape[d] == 1 || t.strides[d] * bytes % 16 == 0;
  const Buffer& buffer = plan.graph().buffers()[t.buffer];
  if (!aligned || buffer.kind != BufferKind::kInput) return aligned;
  if (is_activation) return false;
  plan.input_alignment[buffer.index] = std::max(plan.input_alignment[buffer.index], 16);
  return true;
}

bool has_short_rows(const Tensor& t) {
  const int64_t row = t.shape.empty() ? 1 : t.shape.back();
  const int64_t pitch = t.shape.size() < 2 ? row : t.strides[t.strides.size() - 2];
  return std::max(row, pitch) * size_bytes(t.dtype) < int64_t{1} << 32;
}

namespace {

void check_inner_stride(const Node& node, const Operand& operand) {
  const Tensor& t = operand.tensor;
  if (!t.shape.empty() && t.shape.back() != 1 && t.strides.back() != 1)
    fail(node, "operand " + operand.name + " needs stride 1 in its last dimension, got " + str(t.strides.back()));
}

const Tensor& input_of(const Node& row_task) { return row_task.operands.front().tensor; }
const Tensor& output_of(const Node& row_task) { return row_task.operands.back().tensor; }

}  // namespace

Chain find_chain(const Plan& plan, const std::vector<int>& prologue, const Node& node, const Tensor& operand) {
  Chain chain{{}, &operand};
  for (bool found = true; found;) {
    found = false;
    for (int n : prologue) {
      const Node& task = plan.node(n);
      if (output_of(task).buffer != chain.source->buffer) continue;
      if (!(pattern(output_of(task)) == pattern(*chain.source)) || output_of(task).dtype != chain.source->dtype)
        fail(node, "reads the result of " + task.def->name +
                       " in front of it as another view; schedule that as a job of its own");
      chain.tasks.insert(chain.tasks.begin(), &task);
      chain.source = &input_of(task);
      found = true;
      break;
    }
  }
  return chain;
}

ChainCode emit_chain(Plan& plan, Refs& refs, const Node& node, const Chain& chain, const ChainOptions& options) {
  ChainCode code;
  const Tensor* target = options.target;
  const Tensor& source = *chain.source;
  const int64_t size = source.shape.back();
  const std::string type = cuda_type(source.dtype);
  const int64_t width = 16 / size_bytes(source.dtype);
  if (!is_float(source.dtype) || source.dtype == DType::kF64)
    fail(node, "rows of " + std::string(info(source.dtype).name) +
                   " are not supported, expected float32, float16 or bfloat16");
  for (const Node* task : chain.tasks)
    for (const Operand& operand : task->operands) check_inner_stride(*task, operand);
  code.vectorized =
      size % width == 0 && aligned_rows(plan, source, true) && (target == nullptr || aligned_rows(plan, *target, true));
  const std::string place = refs.pointer(node, source) + " + " + row_offset(source, "row");
  const bool polled = plan.polled(source.buffer);
  std::string members, constructed, applied, first_applied;  // of the tasks, and of the first among them
  auto reads_first = [&](const Tensor& t) { code.early &= plan.known_before(t.buffer, options.phase); };
  for (size_t i = 0; i < chain.tasks.size(); i++) {
    const Node& task = *chain.tasks[i];
    const std::string name = "task" + str(static_cast<int64_t>(i)), trait = "Task" + str(static_cast<int64_t>(i));
    std::string row = "row";
    if (input_of(task).shape.back() != size || input_of(task).dtype != source.dtype ||
        output_of(task).dtype != source.dtype)
      fail(task, "expected rows of " + str(size) + " elements of " + info(source.dtype).name + " on both sides");
    code.text +=
        "  struct " + trait + " {\n    using T = " + type + ";\n    static constexpr int kSize = " + str(size) + ";\n";
    if (task.def->name == "rms_norm") {
      const Operand* weight = task.find("weight");
      const std::string style = task.string_attr("style");
      const char* names[] = {"llama", "torch", "gemma"};
      const char* values[] = {"kLlama", "kTorch", "kGemma"};
      const auto found = std::find(std::begin(names), std::end(names), style);
      if (found == std::end(names)) fail(task, "unknown style '" + style + "', expected llama, torch or gemma");
      const bool vectorized = code.vectorized && (!weight || aligned_rows(plan, weight->tensor, false));
      code.vectorized &= vectorized;
      code.text +=
          "    using Weight = " + std::string(weight ? cuda_type(weight->tensor.dtype) : type) +
          ";\n    static constexpr float kEps = " + float_literal(task.float_attr("eps")) +
          ";\n    static constexpr rms_norm::Style kStyle = rms_norm::Style::" + values[found - std::begin(names)] +
          ";\n    static constexpr bool kHasWeight = " + (weight ? "true" : "false") +
          ", kVectorized = " + (vectorized ? "true" : "false") + ";\n";
      if (weight) {
        reads_first(weight->tensor);
        code.text += "    static MPK_DEVICE const Weight* weight(const Job& job) { return job.pointer<const Weight>(" +
                     str(refs.add(task, weight->tensor)) + "); }\n";
      }
    } else if (task.def->name == "rope") {
      const Tensor& x = input_of(task);
      if (size % 2 != 0) fail(task, "the head size must be even, got " + str(size));
      row = options.batch_row ? "batch_row" : "row / " + str(x.shape[1]);
      bool aligned = true;
      for (const char* angle : {"cos", "sin"}) {
        const Tensor& t = task.operand(angle).tensor;
        reads_first(t);
        if (t.dtype != source.dtype)
          fail(task, std::string("expected ") + angle + " of x's dtype " + info(source.dtype).name);
        code.text += "    static MPK_DEVICE const T* " + std::string(angle) +
                     "(const Job& job, uint32_t row) { return " + refs.pointer(task, t) + " + " + row_offset(t, "row") +
                     "; }\n";
        aligned &= aligned_rows(plan, t, true);
      }
      code.text += "    static constexpr bool kVectorized = " + std::string(code.vectorized ? "true" : "false") +
                   ", kAlignedTables = " + (aligned ? "true" : "false") + ";\n";
    } else {
      fail(task, "this row task has no CUDA code");
    }
    code.text += "  };\n";
    code.headers.push_back(task.def->header);
    members += "    " + task.def->name + "::Task<" + trait + ", Group> " + name + ";\n";
    constructed += (constructed.empty() ? "" : ", ") + name + "(group, job, " + row + ")";
    const std::string apply = "      " + name + ".apply(group, data);\n";
    if (i == 0)
      first_applied = apply;
    else
      applied += "      group.sync();\n" + apply;
  }
  const std::string copy =
      "copy_row<" + type + ", " + str(size) + ", " + (code.vectorized ? "true" : "false") + ">(group, ";
  code.fetch = "      " + copy + "data, " + place + ");\n";
  if (polled)
    code.fetch = "      copy_polled_row<" + type + ", " + str(size) + ", " + (code.vectorized ? "true" : "false") +
                 ">(group, data, " + place + ");\n";
  if (!code.vectorized && !chain.tasks.empty()) first_applied = "      group.sync();\n" + first_applied;
  std::string brought = code.fetch + first_applied;
  if (polled && !chain.tasks.empty() && chain.tasks.front()->def->name == "rms_norm")
    brought = "      task0.apply_to_polled(group, data, " + place + ");\n";
  if (target != nullptr) {
    if (!code.vectorized) applied += "      group.sync();\n";
    applied += "      " + copy + refs.pointer(node, *target, true) + " + " + row_offset(*target, "row") + ", data);\n";
  }
  const std::string parameters = "(Group& group, const Job& job, uint32_t row, " + type + "* data) {\n";
  code.text += "  template <class Group>\n  struct Chain {\n" + members +
               "    MPK_DEVICE Chain(const Group& group, const Job& job, uint32_t row" +
               (options.batch_row ? ", uint32_t batch_row)" : ")") + (constructed.empty() ? "" : " : " + constructed) +
               " {}\n    MPK_DEVICE void fetch" + parameters + code.fetch + "    }\n    MPK_DEVICE void apply" +
               parameters + first_applied + applied + "    }\n    MPK_DEVICE void bring" + parameters + brought +
               applied + "    }\n  };\n";
  return code;
}

}  // namespace mpk::codegen
