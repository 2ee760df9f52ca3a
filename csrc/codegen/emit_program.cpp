// Pointwise programs as CUDA code.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "emit.h"

namespace mpk::codegen {

std::string str(int64_t v) { return std::to_string(v); }

std::string float_literal(double v) {
  if (std::isnan(v)) return "__int_as_float(0x7fc00000)";
  if (std::isinf(v)) return v > 0 ? "infinity()" : "-infinity()";
  char text[40];
  std::snprintf(text, sizeof(text), "%.9g", v);
  std::string literal = text;
  if (literal.find_first_of(".e") == std::string::npos) literal += ".0";
  return literal + "f";
}

std::string double_literal(double v) {
  if (std::isnan(v)) return "static_cast<double>(__int_as_float(0x7fc00000))";
  if (std::isinf(v)) return v > 0 ? "static_cast<double>(infinity())" : "static_cast<double>(-infinity())";
  char text[40];
  std::snprintf(text, sizeof(text), "%.17g", v);
  std::string literal = text;
  return literal.find_first_of(".e") == std::string::npos ? literal + ".0" : literal;
}

namespace {

std::string constant(const Instr& i) {
  const std::string type = cuda_type(i.dtype);
  if (i.dtype == DType::kF64) return double_literal(i.imm);
  if (is_float(i.dtype)) return "cast<" + type + ">(" + float_literal(i.imm) + ")";
  if (i.imm_int == std::numeric_limits<int64_t>::min()) return "static_cast<" + type + ">(-9223372036854775807LL - 1)";
  return "static_cast<" + type + ">(" + str(i.imm_int) + "LL)";
}

const char* compute_type(DType t) { return is_reduced_float(t) ? "float" : cuda_type(t); }

bool is_comparison(Op op) { return op >= Op::k_eq; }

// How far from the offset an access may reach, in elements.
int64_t reach(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  int64_t r = 0;
  for (size_t d = 0; d < sizes.size(); d++) r += (sizes[d] > 0 ? sizes[d] - 1 : 0) * std::abs(strides[d]);
  return r;
}

}  // namespace

Pattern pattern(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t offset) {
  Pattern p{offset, {}};
  for (size_t d = 0; d < sizes.size(); d++) {
    if (sizes[d] == 1) continue;
    if (!p.dims.empty() && p.dims.back().second == strides[d] * sizes[d]) {
      p.dims.back() = {p.dims.back().first * sizes[d], strides[d]};
    } else {
      p.dims.emplace_back(sizes[d], strides[d]);
    }
  }
  return p;
}

std::string emit_store(const Plan& plan, Refs& refs, const Node& node, const Tensor& t, const std::string& index,
                       const std::string& value) {
  const std::string pointer = refs.pointer(node, t, true);
  if (plan.polled(t.buffer)) return "store_element(" + pointer + " + (" + index + "), " + value + ");";
  return pointer + "[" + index + "] = " + value + ";";
}

ProgramCode emit_program(const Plan& plan, Refs& refs, const Node& node, const ProgramOptions& options) {
  const Program& program = *node.program;
  const std::string& x = options.prefix;
  const std::string index = options.index_type;
  ProgramCode code;
  std::string coordinates;

  // Coordinates from the point's number.
  const int rank = static_cast<int>(program.domain.size());
  std::vector<std::string> coordinate(rank, "0");
  int last = rank;
  if (!options.inner.empty()) coordinate[--last] = options.inner;
  int64_t step = 1;
  int outermost = 0;
  while (outermost < last && program.domain[outermost] == 1) outermost++;
  for (int d = last; d-- > 0;) {
    if (program.domain[d] == 1) continue;
    const std::string name = x + "i" + str(d);
    std::string value = step == 1 ? options.point : "(" + options.point + ") / " + str(step);
    if (d > outermost) value = "(" + value + ") % " + str(program.domain[d]);
    coordinates += "    const " + index + " " + name + " = " + value + ";\n";
    coordinate[d] = name;
    step *= program.domain[d];
  }
  auto value = [&](int i) { return x + "v" + str(i); };
  auto address = [&](const Instr& i, size_t offset_arg) {
    std::string text;
    const bool wide = reach(program.domain, i.strides) > std::numeric_limits<int32_t>::max();
    for (int d = 0; d < rank; d++) {
      if (i.strides[d] == 0 || program.domain[d] == 1) continue;
      std::string term = (wide ? "static_cast<int64_t>(" + coordinate[d] + ")" : coordinate[d]);
      if (i.strides[d] != 1) term += " * " + str(i.strides[d]);
      text += (text.empty() ? "" : " + ") + term;
    }
    if (i.args.size() > offset_arg) text += (text.empty() ? "" : " + ") + value(i.args[offset_arg]);
    return text.empty() ? std::string("0") : text;
  };

  // A step advances a counter for each layer. Without fences the compiler fetches all their addresses at once, which
  // take more registers than all else that the kernel does.
  constexpr int kStoresAtOnce = 4;
  int num_stores = 0;
  for (size_t n = 0; n < program.instrs.size(); n++) {
    const Instr& i = program.instrs[n];
    const std::string type = cuda_type(i.dtype);
    const std::string result = value(static_cast<int>(n));
    auto argument = [&](size_t k, const std::string& as) { return "cast<" + as + ">(" + value(i.args[k]) + ")"; };
    std::string expression;
    switch (i.op) {
      case Op::kConst:
        expression = constant(i);
        break;
      case Op::kIndex:
        expression = "static_cast<int64_t>(" + coordinate[i.operand] + ")";
        break;
      case Op::kSize:
        expression = "job.params->scalars[" + str(i.operand) + "]";
        break;
      case Op::kCast:
        expression = argument(0, type);
        break;
      case Op::kWhere:
        expression = argument(0, "bool") + " ? " + argument(1, type) + " : " + argument(2, type);
        break;
      case Op::kLoad: {
        const Tensor& t = node.operands[i.operand].tensor;
        const LocalValue* local = nullptr;
        if (options.locals)
          for (const LocalValue& candidate : *options.locals)
            if (candidate.buffer == t.buffer) local = &candidate;  // the newest
        if (local) {
          if (!i.args.empty() || !(pattern(program.domain, i.strides, t.offset) == local->where) ||
              local->dtype != t.dtype)
            fail(node, "operand " + node.operands[i.operand].name +
                           " reads a result of its own job at another point; " + "schedule it as a job of its own");
          expression = "cast<" + type + ">(" + local->variable + ")";
          break;
        }
        const bool is_constant = plan.graph().buffers()[t.buffer].kind == BufferKind::kInput && !plan.written[t.buffer];
        const std::string pointer = refs.pointer(node, t) + " + (" + address(i, 0) + ")";
        const std::string load = is_constant ? "load_constant(" + pointer + ")" : "*(" + pointer + ")";
        if (plan.polled(t.buffer)) {
          if (!options.early_loads || !i.args.empty())
            fail(node, "operand " + node.operands[i.operand].name + " is polled, but not read at its own point");
          code.preload_fields += "    uint32_t " + result + ";\n";
          code.preload += "    extra." + result + " = ptx::load_relaxed_gpu(" + pointer + ");\n";
          expression = "cast<" + type + ">(element_of<" + std::string(cuda_type(t.dtype)) + ">(c, extra." + result +
                       ", " + pointer + "))";
        } else if (options.early_loads && i.args.empty()) {
          const bool in_word = size_bytes(t.dtype) <= 4;
          const std::string loaded = cuda_type(t.dtype), field = "extra." + result;
          code.preload_fields += "    " + (in_word ? "uint32_t" : loaded) + " " + result + ";\n";
          code.preload += "    " + field + " = " + (in_word ? "to_word(" + load + ")" : load) + ";\n";
          expression = "cast<" + type + ">(" + (in_word ? "from_word<" + loaded + ">(" + field + ")" : field) + ")";
        } else if (i.args.size() > 1) {
          expression = argument(1, "bool") + " ? cast<" + type + ">(" + load + ") : cast<" + type + ">(0)";
        } else {
          expression = "cast<" + type + ">(" + load + ")";
        }
        break;
      }
      case Op::kStore: {
        const Tensor& t = node.operands[i.operand].tensor;
        const std::string stored = x + "s" + str(static_cast<int64_t>(n));
        code.body += "    const " + std::string(cuda_type(t.dtype)) + " " + stored + " = " +
                     argument(0, cuda_type(t.dtype)) + ";\n";
        if (options.locals && i.args.size() == 1)
          options.locals->push_back({t.buffer, pattern(program.domain, i.strides, t.offset), stored, t.dtype});
        if (options.unstored &&
            std::find(options.unstored->begin(), options.unstored->end(), t.buffer) != options.unstored->end())
          continue;
        std::string store = emit_store(plan, refs, node, t, address(i, 1), stored);
        if (i.args.size() > 2) store = "if (" + argument(2, "bool") + ") " + store;
        code.body += "    " + store + "\n";
        if (++num_stores % kStoresAtOnce == 0) code.body += "    ptx::compiler_fence();\n";
        continue;
      }
      default: {
        const DType computed = is_comparison(i.op) ? program.instrs[i.args[0]].dtype : i.dtype;
        const std::string as = compute_type(computed);
        expression = "ops::" + std::string(op_name(i.op)) + "<" + as + ">(";
        for (size_t k = 0; k < i.args.size(); k++) expression += (k ? ", " : "") + argument(k, as);
        expression = "cast<" + type + ">(" + expression + "))";
      }
    }
    code.body += "    const " + type + " " + result + " = " + expression + ";\n";
    code.result = result;
  }
  code.body = coordinates + code.body;
  if (!code.preload.empty()) code.preload = coordinates + code.preload;
  return code;
}

}  // namespace mpk::codegen
