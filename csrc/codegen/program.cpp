#include "program.h"

#include <algorithm>
#include <limits>

#include "../schedule/access.h"
#include "checks.h"
#include "text.h"

namespace mpk::codegen {
namespace {

std::string literal(const Instr& i) {
  const std::string type = cuda_type(i.dtype);
  if (i.dtype == DType::kF64) return double_literal(i.imm);
  if (is_float(i.dtype)) return "cast<" + type + ">(" + float_literal(i.imm) + ")";
  if (i.imm_int == std::numeric_limits<int64_t>::min()) return "static_cast<" + type + ">(-9223372036854775807LL - 1)";
  return "static_cast<" + type + ">(" + str(i.imm_int) + "LL)";
}

bool is_comparison(Op op) { return op >= Op::k_eq; }

// Whether a number is a cache's length or a place in a cache. Such numbers differ between builds and layers that are
// equal otherwise.
bool says_where(const Program& program, size_t number) {
  constexpr int64_t kLeast = 1024, kEnd = int64_t(1) << 31;  // places in a cache; limit of
  const Instr& i = program.instrs[number];
  if (i.op != Op::kConst || i.dtype != DType::kI64 || i.imm_int < kLeast || i.imm_int >= kEnd) return false;
  return std::all_of(program.instrs.begin(), program.instrs.end(), [&](const Instr& user) {
    const bool uses = std::count(user.args.begin(), user.args.end(), static_cast<int>(number)) > 0;
    return !uses || user.op == Op::k_add || is_comparison(user.op);
  });
}

const char* compute_type(DType t) { return is_reduced_float(t) ? "float" : cuda_type(t); }

// The largest distance from the offset that an access may reach, in elements.
int64_t reach(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  int64_t r = 0;
  for (size_t d = 0; d < sizes.size(); d++) r += (sizes[d] > 0 ? sizes[d] - 1 : 0) * std::abs(strides[d]);
  return r;
}

// The dimensions' strides in a point's number, with or without the last dimension.
std::vector<int64_t> row_major(std::vector<int64_t> domain, bool without_last) {
  if (without_last) domain.back() = 1;
  return contiguous_strides(domain);
}

class ProgramWriter {
 public:
  ProgramWriter(const KernelContext& context, Refs& refs, const Node& node, const ProgramOptions& options)
      : context_(context),
        refs_(refs),
        node_(node),
        options_(options),
        program_(*node.program),
        strides_(options.strides.empty() ? row_major(program_.domain, !options.inner.empty()) : options.strides),
        varies_(program_.instrs.size(), false) {}

  ProgramCode run() {
    const std::string coordinates = find_coordinates();
    for (size_t n = 0; n < program_.instrs.size(); n++) {
      const Instr& i = program_.instrs[n];
      if (i.op == Op::kStore) {
        store(i, n);
        continue;
      }
      code_.result = name(static_cast<int>(n));
      varies_[n] = varies(i);
      if (i.op == Op::kLoad && varies_[n] && i.args.size() < 2 && go_together(i, 0) && !find_local(i))
        code_.body += "    const auto " + code_.result + " = load_together<" + cuda_type(i.dtype) + ", " +
                      str(options_.width) + ">(" + place(i) + ");\n";
      else
        define(code_.result, i.dtype, varies_[n], [&] { return expression(i); });
    }
    code_.body = coordinates + code_.body;
    if (!code_.preload.empty()) code_.preload = coordinates + code_.preload;
    return std::move(code_);
  }

 private:
  // The statements that find a point's coordinates from its number.
  std::string find_coordinates() {
    std::string statements;
    const int rank = static_cast<int>(program_.domain.size());
    coordinate_.assign(rank, "0");
    int last = rank;
    if (!options_.inner.empty()) coordinate_[--last] = options_.inner;
    const std::vector<size_t> order = by_falling_stride(program_.domain, strides_);
    for (int d = last; d-- > 0;) {
      if (program_.domain[d] == 1) continue;
      const std::string name = options_.prefix + "i" + str(d);
      statements += "    const " + options_.index_type + " " + name + " = " + index_of(d, order.front()) + ";\n";
      coordinate_[d] = name;
      if (options_.width > 0 && strides_[d] == 1) together_ = d;
    }
    return statements;
  }

  // The index in dimension `d`; `first`: the outermost dimension. The numbers of a row and within it take less
  // arithmetic than one made of both.
  std::string index_of(size_t d, size_t first) const {
    int64_t step = strides_[d];
    std::string from = options_.point;
    bool is_first = d == first;
    if (options_.row > 0 && step % options_.row == 0) {
      from = "uint32_t(r)";
      step /= options_.row;
    } else if (options_.row > 0 && options_.row % (step * program_.domain[d]) == 0) {
      from = "n";
      is_first |= step * program_.domain[d] == options_.row;
    }
    const std::string index = step == 1 ? from : "(" + from + ") / " + str(step);
    return is_first ? index : "(" + index + ") % " + str(program_.domain[d]);
  }

  // ---- points that are evaluated together

  // Whether their values differ.
  bool varies(const Instr& i) const {
    if (options_.width == 0) return false;
    if (i.op == Op::kIndex) return i.operand == together_;
    if (i.op == Op::kLoad && (find_local(i) || (together_ >= 0 && i.strides[together_] != 0))) return true;
    return std::any_of(i.args.begin(), i.args.end(), [&](int a) { return varies_[a]; });
  }

  // Whether an access reaches neighbouring elements, for all points or for none.
  bool go_together(const Instr& i, size_t offset_arg) const {
    return options_.width > 1 && together_ >= 0 && i.strides[together_] == 1 &&
           !context_.polled(node_.operands[i.operand].tensor.buffer) &&
           std::none_of(i.args.begin() + offset_arg, i.args.end(), [&](int a) { return varies_[a]; });
  }

  // Defines a variable, with a value for each point if they differ: `write` then writes the expression for point j.
  template <class Write>
  void define(const std::string& name, DType dtype, bool differs, Write write) {
    const std::string type = cuda_type(dtype);
    std::string defined;
    in_each_ = differs;
    if (differs)
      defined =
          "auto " + name + " = each<" + type + ", " + str(options_.width) + ">([&](int j) { return " + write() + "; })";
    else
      defined = type + " " + name + " = " + write();
    in_each_ = false;
    code_.body += "    const " + defined + ";\n";
  }

  // ---- names

  std::string coordinate(int d) const {
    return in_each_ && d == together_ ? "(" + coordinate_[d] + " + j)" : coordinate_[d];
  }
  std::string name(int i) const { return options_.prefix + "v" + str(i); }
  std::string value(int i) const { return name(i) + (in_each_ && varies_[i] ? ".v[j]" : ""); }

  // An instruction's argument number k, converted.
  std::string argument(const Instr& i, size_t k, const std::string& as) const {
    return "cast<" + as + ">(" + value(i.args[k]) + ")";
  }

  // The address of a load or store, from the operand's first element. args[offset_arg], if it exists, is an offset.
  std::string address(const Instr& i, size_t offset_arg) const {
    std::string text;
    const bool wide = reach(program_.domain, i.strides) > std::numeric_limits<int32_t>::max();
    for (size_t d = 0; d < program_.domain.size(); d++) {
      if (i.strides[d] == 0 || program_.domain[d] == 1) continue;
      std::string term = wide ? "static_cast<int64_t>(" + coordinate(d) + ")" : coordinate(d);
      if (i.strides[d] != 1) term += " * " + str(i.strides[d]);
      text += (text.empty() ? "" : " + ") + term;
    }
    if (i.args.size() > offset_arg) text += (text.empty() ? "" : " + ") + value(i.args[offset_arg]);
    return text.empty() ? std::string("0") : text;
  }

  std::string expression(const Instr& i) {
    const std::string type = cuda_type(i.dtype);
    switch (i.op) {
      case Op::kConst:
        if (says_where(program_, &i - program_.instrs.data()))
          return "static_cast<int64_t>(" + refs_.number(i.imm_int) + ")";
        return literal(i);
      case Op::kIndex:
        return "static_cast<int64_t>(" + coordinate(i.operand) + ")";
      case Op::kSize:
        return "job.params->scalars[" + str(i.operand) + "]";
      case Op::kCast:
        return argument(i, 0, type);
      case Op::kWhere:
        return argument(i, 0, "bool") + " ? " + argument(i, 1, type) + " : " + argument(i, 2, type);
      case Op::kBitCast:
        if (i.dtype == DType::kF32) return "__int_as_float(" + argument(i, 0, "int32_t") + ")";
        return "static_cast<int32_t>(__float_as_uint(" + argument(i, 0, "float") + "))";
      case Op::kLoad:
        if (const std::string* variable = find_given(i)) return "cast<" + type + ">(" + *variable + ")";
        if (const LocalValue* local = find_local(i))
          return "cast<" + type + ">(" + local->variable + (in_each_ ? ".v[j]" : "") + ")";
        return load(i);
      default: {
        const DType computed = is_comparison(i.op) ? program_.instrs[i.args[0]].dtype : i.dtype;
        const std::string as = compute_type(computed);
        std::string call = "ops::" + std::string(op_name(i.op)) + "<" + as + ">(";
        for (size_t k = 0; k < i.args.size(); k++) call += (k ? ", " : "") + argument(i, k, as);
        return "cast<" + type + ">(" + call + "))";
      }
    }
  }

  // The variable that replaces a load; null if there is none.
  const std::string* find_given(const Instr& i) const {
    if (!options_.given) return nullptr;
    const auto found = options_.given->find(&i - program_.instrs.data());
    return found == options_.given->end() ? nullptr : &found->second;
  }

  // The job's newest value that a load reads; null if it reads memory.
  const LocalValue* find_local(const Instr& i) const {
    if (!options_.locals) return nullptr;
    const Tensor& t = node_.operands[i.operand].tensor;
    const LocalValue* local = nullptr;
    for (const LocalValue& candidate : *options_.locals)
      if (candidate.buffer == t.buffer) local = &candidate;
    require(local == nullptr || (i.args.empty() && local->dtype == t.dtype && where(i) == local->where), node_,
            "operand " + node_.operands[i.operand].name +
                " reads a result of its own job at another point; schedule it as a job of its own");
    return local;
  }

  // The elements that an access reaches, in the order of points.
  Pattern where(const Instr& i) const {
    std::vector<int64_t> sizes, strides;
    for (size_t d : by_falling_stride(program_.domain, strides_)) {
      sizes.push_back(program_.domain[d]);
      strides.push_back(i.strides[d]);
    }
    return pattern(sizes, strides, node_.operands[i.operand].tensor.offset);
  }

  std::string place(const Instr& load) {
    return refs_.pointer(node_, node_.operands[load.operand].tensor) + " + (" + address(load, 0) + ")";
  }

  bool is_common(const Instr& i) const {
    for (size_t d = 0; d < i.strides.size(); d++)
      if (program_.domain[d] != 1 && i.strides[d] != 0) return false;
    return options_.common_loads && i.args.empty();
  }

  std::string load(const Instr& i) {
    const Operand& operand = node_.operands[i.operand];
    const Tensor& t = operand.tensor;
    const std::string type = cuda_type(i.dtype), loaded = cuda_type(t.dtype);
    const bool is_constant =
        context_.graph().buffers()[t.buffer].kind == BufferKind::kInput && !context_.written[t.buffer];
    const std::string pointer = place(i);
    const std::string load = is_constant ? "load_constant(" + pointer + ")" : "*(" + pointer + ")";
    const std::string name = this->name(static_cast<int>(&i - program_.instrs.data())), field = "extra." + name;
    if (context_.polled(t.buffer)) {
      require(options_.early_loads && i.args.empty(), node_,
              "operand " + operand.name + " is polled, but not read at its own point");
      preload("uint32_t", name, "ptx::load_relaxed_gpu(" + pointer + ")");
      return "cast<" + type + ">(element_of<" + loaded + ">(c, " + field + ", " + pointer + "))";
    }
    if (is_common(i)) {
      code_.common_fields += "    " + loaded + " " + name + ";\n";
      code_.common += "    common." + name + " = " + load + ";\n";
      return "cast<" + type + ">(common." + name + ")";
    }
    if (options_.early_loads && i.args.empty()) {
      const bool in_word = size_bytes(t.dtype) <= 4;
      preload(in_word ? "uint32_t" : loaded, name, in_word ? "to_word(" + load + ")" : load);
      return "cast<" + type + ">(" + (in_word ? "from_word<" + loaded + ">(" + field + ")" : field) + ")";
    }
    if (i.args.size() > 1)
      return argument(i, 1, "bool") + " ? cast<" + type + ">(" + load + ") : cast<" + type + ">(0)";
    return "cast<" + type + ">(" + load + ")";
  }

  void preload(const std::string& type, const std::string& name, const std::string& loaded) {
    code_.preload_fields += "    " + type + " " + name + ";\n";
    code_.preload += "    extra." + name + " = " + loaded + ";\n";
  }

  void store(const Instr& i, size_t number) {
    const Tensor& t = node_.operands[i.operand].tensor;
    const std::string stored = options_.prefix + "s" + str(static_cast<int64_t>(number));
    const bool differs = options_.width > 0;
    define(stored, t.dtype, differs, [&] { return argument(i, 0, cuda_type(t.dtype)); });
    if (options_.locals && i.args.size() == 1) options_.locals->push_back({t.buffer, where(i), stored, t.dtype});
    const std::vector<int>* unstored = options_.unstored;
    if (unstored && std::find(unstored->begin(), unstored->end(), t.buffer) != unstored->end()) return;
    const bool together = go_together(i, 1);
    in_each_ = differs && !together;
    const std::string value = stored + (in_each_ ? ".v[j]" : "");
    const std::string condition = i.args.size() > 2 ? argument(i, 2, "bool") : "";
    const auto place = [&] { return refs_.pointer(node_, t, true) + " + (" + address(i, 1) + ")"; };
    std::string statement;
    if (!condition.empty() && !together && !context_.polled(t.buffer)) {
      statement = "store_if(" + condition + ", " + place() + ", " + value + ");";
    } else {
      statement = together ? "store_together(" + place() + ", " + stored + ");"
                           : emit_store(context_, refs_, node_, t, address(i, 1), value);
      if (!condition.empty()) statement = "if (" + condition + ") " + statement;
    }
    if (in_each_) statement = "for_each<" + str(options_.width) + ">([&](int j) { " + statement + " });";
    in_each_ = false;
    code_.body += "    " + statement + "\n";
    // A decode step advances a counter for each layer. Without fences the compiler loads all their addresses at once,
    // which takes more registers than the rest of the kernel.
    constexpr int kStoresAtOnce = 4;
    if (++num_stores_ % kStoresAtOnce == 0) code_.body += "    ptx::compiler_fence();\n";
  }

  const KernelContext& context_;
  Refs& refs_;
  const Node& node_;
  const ProgramOptions& options_;
  const Program& program_;
  const std::vector<int64_t> strides_;   // of the dimensions, in the point's number
  std::vector<std::string> coordinate_;  // of each dimension, an expression
  int together_ = -1;                    // the dimension along which points are evaluated together
  std::vector<bool> varies_;             // per instruction: has a value for each point
  bool in_each_ = false;                 // the code being written is for one point, number j
  int num_stores_ = 0;
  ProgramCode code_;
};

}  // namespace

ProgramCode emit_program(const KernelContext& context, Refs& refs, const Node& node, const ProgramOptions& options) {
  return ProgramWriter(context, refs, node, options).run();
}

std::string common_loads(const std::string& fields, const std::string& statements) {
  return "  struct Common {\n" + fields + "  };\n" +
         function("Common", "common(const Job& job)", "    Common common{};\n" + statements + "    return common;\n");
}

std::string emit_store(const KernelContext& context, Refs& refs, const Node& node, const Tensor& t,
                       const std::string& index, const std::string& value) {
  const std::string pointer = refs.pointer(node, t, true);
  if (context.polled(t.buffer)) return "store_element(" + pointer + " + (" + index + "), " + value + ");";
  return pointer + "[" + index + "] = " + value + ";";
}

}  // namespace mpk::codegen
