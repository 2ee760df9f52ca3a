#include "chain.h"

#include <map>
#include <stdexcept>

#include "../schedule/refusals.h"
#include "checks.h"
#include "pattern.h"
#include "text.h"

namespace mpk::codegen {
namespace {

std::map<std::string, RowEmitter>& row_emitters() {
  static std::map<std::string, RowEmitter> all;
  return all;
}

const Tensor& input_of(const Node& row_task) { return row_task.operands.front().tensor; }
const Tensor& output_of(const Node& row_task) { return row_task.operands.back().tensor; }

class ChainWriter {
 public:
  ChainWriter(KernelContext& context, Refs& refs, const Node& node, const Chain& chain, const ChainOptions& options)
      : context_(context),
        refs_(refs),
        node_(node),
        chain_(chain),
        options_(options),
        source_(*chain.source),
        size_(source_.shape.back()),
        type_(cuda_type(source_.dtype)) {}

  ChainCode run() {
    const int64_t width = 16 / size_bytes(source_.dtype);
    const Tensor* target = options_.target;
    for (const Node* task : chain_.tasks)
      if (const auto why = refuses_row_task(*task)) fail(*task, *why);
    code_.vectorized = size_ % width == 0 && (options_.is_there || context_.aligned_rows(source_, true)) &&
                       (target == nullptr || context_.aligned_rows(*target, true));
    if (!options_.is_there) place_ = refs_.pointer(node_, source_) + " + " + row_offset(source_, "row");
    for (size_t i = 0; i < chain_.tasks.size(); i++) add_task(*chain_.tasks[i], str(static_cast<int64_t>(i)));
    write_class();
    return std::move(code_);
  }

 private:
  void add_task(const Node& task, const std::string& number) {
    const std::string name = "task" + number, traits = "Task" + number;
    require(input_of(task).shape.back() == size_ && input_of(task).dtype == source_.dtype &&
                output_of(task).dtype == source_.dtype,
            task, "expected rows of " + str(size_) + " elements of " + info(source_.dtype).name + " on both sides");
    const RowEmitter emit = row_emitters().at(task.def->name);
    const RowCode row = emit({context_, refs_, task, options_, size_, source_.dtype, code_.vectorized});
    code_.vectorized &= row.vectorized;
    code_.early &= row.early;
    code_.text += "  struct " + traits + " {\n    using T = " + type_ +
                  ";\n    static constexpr int kSize = " + str(size_) + ";\n" + row.traits + "  };\n";
    code_.headers.push_back(task.def->header);
    const std::string type = task.def->name + "::Task<" + traits + ", Group>";
    members_ += "    static_assert(RowTask<" + type + ", Group, " + type_ + ">);\n    " + type + " " + name + ";\n";
    constructed_ += (constructed_.empty() ? "" : ", ") + name + "(group, job, " + row.row + ")";
    const std::string apply = "      " + name + ".apply(group, data);\n";
    if (&task == chain_.tasks.front()) {
      first_polls_ = row.polls;
      first_applied_ = apply;
    } else {
      applied_ += "      group.sync();\n" + apply;
    }
  }

  void write_class() {
    const bool polled = context_.polled(source_.buffer);
    const auto copy = [&](const char* function) {
      return std::string(function) + "<" + type_ + ", " + str(size_) + ", " + truth(code_.vectorized) + ">(group, ";
    };
    code_.fetch = "      " + copy(polled ? "copy_polled_row" : "copy_row") + "data, " + place_ + ");\n";
    if (!code_.vectorized && !chain_.tasks.empty()) first_applied_ = "      group.sync();\n" + first_applied_;
    std::string staged = code_.fetch + first_applied_;
    if (polled && first_polls_) staged = "      task0.apply_to_polled(group, data, " + place_ + ");\n";
    if (const Tensor* target = options_.target) {
      if (!code_.vectorized) applied_ += "      group.sync();\n";
      applied_ += "      " + copy("copy_row") + refs_.pointer(node_, *target, true) + " + " +
                  row_offset(*target, "row") + ", data);\n";
    }
    const auto member = [&](const std::string& name, const std::string& body) {
      return "    MPK_DEVICE void " + name + "(Group& group, const Job& job, uint32_t row, " + type_ + "* data) {\n" +
             body + "    }\n";
    };
    code_.text += "  template <class Group>\n  struct Chain {\n" + members_ +
                  "    MPK_DEVICE Chain(const Group& group, const Job& job, uint32_t row" +
                  (options_.batch_row ? ", uint32_t batch_row)" : ")") +
                  (constructed_.empty() ? "" : " : " + constructed_) + " {}\n" +
                  (options_.is_there ? "" : member("fetch", code_.fetch)) + member("apply", first_applied_ + applied_) +
                  (options_.is_there ? "" : member("stage", staged + applied_)) + "  };\n";
  }

  KernelContext& context_;
  Refs& refs_;
  const Node& node_;
  const Chain& chain_;
  const ChainOptions& options_;
  const Tensor& source_;
  const int64_t size_;
  const std::string type_;
  std::string place_;                    // of the row in memory
  std::string members_, constructed_;    // of the chain's class
  std::string first_applied_, applied_;  // the first task, and the others
  bool first_polls_ = false;
  ChainCode code_;
};

}  // namespace

std::optional<std::string> refuses_row_task(const Node& task) {
  if (!row_emitters().contains(task.def->name)) return "this row task has no CUDA code";
  if (auto why = refuses_row_dtype(task.operands.front())) return why;
  for (const Operand& operand : task.operands)
    if (auto why = refuses_inner_stride(operand)) return why;
  return std::nullopt;
}

bool add_row_emitter(const std::string& task, RowEmitter emitter) {
  if (!row_emitters().emplace(task, emitter).second)
    throw std::logic_error("task '" + task + "' has two emitters of rows");
  return true;
}

Chain find_chain(const KernelContext& context, const std::vector<int>& prologue, const Node& node,
                 const Tensor& operand) {
  Chain chain{{}, &operand};
  for (bool found = true; found;) {
    found = false;
    for (int n : prologue) {
      const Node& task = context.node(n);
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

ChainCode emit_chain(KernelContext& context, Refs& refs, const Node& node, const Chain& chain,
                     const ChainOptions& options) {
  return ChainWriter(context, refs, node, chain, options).run();
}

}  // namespace mpk::codegen
