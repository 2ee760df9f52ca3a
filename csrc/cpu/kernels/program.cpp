#include "program.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace mpk::cpu {
namespace {

constexpr int64_t kRegisterBytes = kBlock * 8;

template <class T>
void fill(uint8_t* to, T value) {
  std::fill_n(reinterpret_cast<T*>(to), kBlock, value);
}

bool is_compare(Op op) {
  switch (op) {
#define X(name, arity, expression) case Op::k_##name:
    MPK_POINTWISE_COMPARE(X)
#undef X
    return true;
    default:
      return false;
  }
}

bool is_integer_division(Op op) { return op == Op::k_floordiv || op == Op::k_truncdiv || op == Op::k_remainder; }

// The dtype in which operations on mixed classes compute: PyTorch's promotion.
DType wider(DType a, DType b) {
  constexpr int kRank[kNumClasses] = {2, 3, 1, 0};  // in the order of ValueClass
  return kRank[class_of(a)] >= kRank[class_of(b)] ? a : b;
}

}  // namespace

ProgramRunner::ProgramRunner(const Node& node, const Microkernels& microkernels, bool keep_inner)
    : microkernels_(microkernels) {
  merge_dims(*node.program, keep_inner);
  if (sizes_.size() > kMaxDims)
    fail(node, "its program has " + std::to_string(sizes_.size()) + " dimensions that cannot be merged, at most " +
                   std::to_string(kMaxDims) + " are supported");
  compile(node);
  allocate();
}

// Merges neighbouring dimensions that every access walks evenly. An indexed dimension stays.
void ProgramRunner::merge_dims(const Program& program, bool keep_inner) {
  const int num_dims = static_cast<int>(program.domain.size());
  std::vector<bool> alone(num_dims, false);
  if (keep_inner && num_dims > 0) alone[num_dims - 1] = true;
  for (const Instr& instr : program.instrs)
    if (instr.op == Op::kIndex) alone[instr.operand] = true;
  for (int d = 0; d < num_dims; d++) {
    if (program.domain[d] == 1 && !alone[d]) continue;
    bool merges = !members_.empty() && !alone[d] && !alone[members_.back().back()];
    if (merges) {
      const int previous = members_.back().back();
      for (const Instr& instr : program.instrs)
        if (instr.op == Op::kLoad || instr.op == Op::kStore)
          merges &= instr.strides[previous] == instr.strides[d] * program.domain[d];
    }
    if (merges) {
      sizes_.back() *= program.domain[d];
      members_.back().push_back(d);
    } else {
      sizes_.push_back(program.domain[d]);
      members_.push_back({d});
    }
  }
  if (sizes_.empty()) {
    sizes_.push_back(1);
    members_.push_back({});
  }
}

int ProgramRunner::add(Step step) {
  steps_.push_back(std::move(step));
  return static_cast<int>(steps_.size()) - 1;
}

// Converts the step's value to the class and rounding of `dtype`.
int ProgramRunner::convert(int step, DType dtype) {
  if (steps_[step].dtype == dtype) return step;
  Step cast;
  cast.op = Op::kCast;
  cast.dtype = dtype;
  cast.value_class = class_of(dtype);
  cast.args[0] = step;
  cast.cast = microkernels_.cast[steps_[step].value_class][static_cast<int>(dtype)];
  cast.invariant = steps_[step].invariant;
  return add(std::move(cast));
}

void ProgramRunner::compile(const Node& node) {
  std::vector<int> step_of;  // of each instruction
  for (const Instr& instr : node.program->instrs) {
    Step step;
    step.op = instr.op;
    step.dtype = instr.dtype;
    step.value_class = class_of(instr.dtype);
    for (size_t a = 0; a < instr.args.size(); a++) step.args[a] = step_of[instr.args[a]];
    complete(step, node, instr);
    step_of.push_back(add(std::move(step)));
  }
  if (!steps_.empty()) {
    result_step_ = step_of.back();
    result_class_ = steps_[result_step_].value_class;
  }
}

// Completes a step. Arguments of another dtype are converted first, where that matters.
void ProgramRunner::complete(Step& step, const Node& node, const Instr& instr) {
  switch (instr.op) {
    case Op::kConst:
      step.imm = instr.imm;
      step.imm_int = instr.imm_int;
      step.round = microkernels_.round_of(instr.dtype);
      step.invariant = true;
      break;
    case Op::kSize:
      step.scalar = instr.operand;
      step.invariant = true;
      break;
    case Op::kIndex:
      for (size_t d = 0; d < members_.size(); d++)
        if (members_[d] == std::vector<int>{instr.operand}) step.dim = static_cast<int>(d);
      break;
    case Op::kLoad:
    case Op::kStore:
      complete_access(step, node, instr);
      break;
    case Op::kCast:
      step.cast = microkernels_.cast[steps_[step.args[0]].value_class][static_cast<int>(instr.dtype)];
      step.invariant = steps_[step.args[0]].invariant;
      break;
    case Op::kBitCast:
      step.invariant = steps_[step.args[0]].invariant;
      break;
    case Op::kWhere:
      for (int a : {1, 2}) step.args[a] = convert(step.args[a], instr.dtype);
      step.invariant =
          steps_[step.args[0]].invariant && steps_[step.args[1]].invariant && steps_[step.args[2]].invariant;
      break;
    default:
      complete_operation(step, node, instr);
  }
}

void ProgramRunner::complete_access(Step& step, const Node& node, const Instr& instr) {
  const Operand& operand = node.operands[instr.operand];
  if (operand.tensor.dtype != instr.dtype)
    fail(node, "instruction " + std::to_string(&instr - node.program->instrs.data()) + " accesses " + operand.name +
                   " as " + info(instr.dtype).name + ", but it is " + info(operand.tensor.dtype).name);
  step.place = Place(operand.tensor);
  step.element_bytes = size_bytes(operand.tensor.dtype);
  for (const auto& dims : members_) step.strides.push_back(dims.empty() ? 0 : instr.strides[dims.back()]);
  if (instr.op == Op::kStore) step.args[0] = convert(step.args[0], instr.dtype);
}

void ProgramRunner::complete_operation(Step& step, const Node& node, const Instr& instr) {
  DType dtype = instr.dtype;  // the dtype that it computes in
  if (is_compare(instr.op)) {
    dtype = node.program->instrs[instr.args[0]].dtype;
    for (int arg : instr.args) dtype = wider(dtype, node.program->instrs[arg].dtype);
  } else {
    step.round = microkernels_.round_of(instr.dtype);
  }
  step.invariant = true;
  for (size_t a = 0; a < instr.args.size(); a++) {
    // Converts an argument of another class first. One that differs only in rounding is used as it is.
    if (steps_[step.args[a]].value_class != class_of(dtype))
      step.args[a] = convert(step.args[a], class_dtype(class_of(dtype)));
    step.invariant &= steps_[step.args[a]].invariant;
  }
  if (is_integer_division(instr.op) && class_of(dtype) == kInt) {
    const Step& divisor = steps_[step.args[1]];
    step.checks_divisors = divisor.op != Op::kConst || divisor.imm_int == 0;
  }
  step.arith = microkernels_.arith[static_cast<int>(instr.op)][class_of(dtype)];
  if (step.arith == nullptr)
    fail(node, std::string("operation ") + op_name(instr.op) + " is not defined for " + info(dtype).name);
}

void ProgramRunner::require_result(DType dtype) {
  if (steps_[result_step_].value_class != class_of(dtype)) {
    result_step_ = convert(result_step_, dtype);
    result_class_ = class_of(dtype);
  }
  allocate();
}

// Gives each step a free register. Invariant steps and the result have registers of their own.
void ProgramRunner::allocate() {
  std::vector<int> last_use(steps_.size());
  for (size_t i = 0; i < steps_.size(); i++) {
    last_use[i] = static_cast<int>(i);
    for (int arg : steps_[i].args)
      if (arg >= 0) last_use[arg] = static_cast<int>(i);
  }
  std::vector<int64_t> free;
  int64_t num_registers = 0;
  point_cost_ = 0;
  for (Step& step : steps_)
    if (step.invariant) step.out_offset = num_registers++ * kRegisterBytes;
  for (size_t i = 0; i < steps_.size(); i++) {
    Step& step = steps_[i];
    if (step.invariant) continue;
    point_cost_ += 1 / kPointsPerNs;
    if (step.op != Op::kStore) {
      if (free.empty()) free.push_back(num_registers++);
      step.out_offset = free.back() * kRegisterBytes;
      free.pop_back();
    }
    for (size_t j = 0; j <= i; j++)
      if (last_use[j] == static_cast<int>(i) && steps_[j].op != Op::kStore && !steps_[j].invariant &&
          static_cast<int>(j) != result_step_)
        free.push_back(steps_[j].out_offset / kRegisterBytes);
  }
  scratch_bytes_ = num_registers * kRegisterBytes;
  if (result_step_ >= 0) result_offset_ = steps_[result_step_].out_offset;
}

void ProgramRunner::start(const Frame& frame, uint8_t* scratch) const {
  for (const Step& step : steps_)
    if (step.invariant) execute(step, frame, nullptr, 0, kBlock, scratch);
}

void ProgramRunner::run_block(const Frame& frame, int64_t first, int count, uint8_t* scratch) const {
  Run runs[kBlock];
  int num_runs = 0;
  const int num_dims = static_cast<int>(sizes_.size()), inner = num_dims - 1;
  int64_t coords[kMaxDims] = {};
  for (int64_t rest = first, d = inner; d >= 0; d--) {
    coords[d] = rest % sizes_[d];
    rest /= sizes_[d];
  }
  for (int begin = 0; begin < count;) {
    Run& run = runs[num_runs++];
    run.begin = begin;
    run.count = static_cast<int>(std::min<int64_t>(count - begin, sizes_[inner] - coords[inner]));
    std::copy(coords, coords + num_dims, run.coords);
    begin += run.count;
    coords[inner] = 0;
    for (int d = inner - 1; d >= 0 && ++coords[d] == sizes_[d]; d--) coords[d] = 0;
  }
  for (const Step& step : steps_)
    if (!step.invariant) execute(step, frame, runs, num_runs, count, scratch);
}

void ProgramRunner::execute(const Step& step, const Frame& frame, const Run* runs, int num_runs, int count,
                            uint8_t* scratch) const {
  uint8_t* out = scratch + step.out_offset;
  const auto arg = [&](int i) { return argument(step, i, scratch); };
  switch (step.op) {
    case Op::kConst:
      fill_constant(step, out);
      break;
    case Op::kSize:
      fill(out, frame.scalars[step.scalar]);
      break;
    case Op::kIndex: {
      const int inner = static_cast<int>(sizes_.size()) - 1;
      auto* values = reinterpret_cast<int64_t*>(out);
      for (int r = 0; r < num_runs; r++)
        for (int i = 0; i < runs[r].count; i++)
          values[runs[r].begin + i] = runs[r].coords[step.dim] + (step.dim == inner ? i : 0);
      break;
    }
    case Op::kLoad:
    case Op::kStore:
      for (int r = 0; r < num_runs; r++) access(step, frame, runs[r], scratch);
      break;
    case Op::kCast:
      step.cast(arg(0), out, count);
      break;
    case Op::kBitCast:
      for (int i = 0; i < count; i++) {
        if (step.value_class == kFloat) {
          const auto bits = static_cast<int32_t>(reinterpret_cast<const int64_t*>(arg(0))[i]);
          std::memcpy(out + i * sizeof(float), &bits, sizeof(float));
        } else {
          int32_t bits;
          std::memcpy(&bits, arg(0) + i * sizeof(float), sizeof(float));
          reinterpret_cast<int64_t*>(out)[i] = bits;
        }
      }
      break;
    case Op::kWhere:
      microkernels_.where[step.value_class](arg(0), arg(1), arg(2), out, count);
      break;
    default:
      if (step.checks_divisors) {
        const auto* divisors = reinterpret_cast<const int64_t*>(arg(1));
        if (std::find(divisors, divisors + count, 0) != divisors + count)
          frame.divided_by_zero->store(true, std::memory_order_relaxed);
      }
      step.arith(arg(0), arg(1), out, count);
      if (step.round != nullptr) step.round(out, count);
  }
}

uint8_t* ProgramRunner::argument(const Step& step, int i, uint8_t* scratch) const {
  return step.args[i] < 0 ? nullptr : scratch + steps_[step.args[i]].out_offset;
}

void ProgramRunner::fill_constant(const Step& step, uint8_t* out) {
  switch (step.value_class) {
    case kFloat:
      fill(out, static_cast<float>(step.imm));
      break;
    case kDouble:
      fill(out, step.imm);
      break;
    case kInt:
      fill(out, step.imm_int);
      break;
    case kTruth:
      fill(out, static_cast<uint8_t>(step.imm_int != 0));
      break;
  }
  if (step.round != nullptr) step.round(out, kBlock);
}

// Loads or stores the points of a run.
void ProgramRunner::access(const Step& step, const Frame& frame, const Run& run, uint8_t* scratch) const {
  const bool is_store = step.op == Op::kStore;
  const int dtype = static_cast<int>(step.dtype), first_arg = is_store ? 1 : 0;
  const auto* offsets = reinterpret_cast<const int64_t*>(argument(step, first_arg, scratch));
  const uint8_t* predicate = argument(step, first_arg + 1, scratch);
  int64_t element = 0;
  for (size_t d = 0; d < sizes_.size(); d++) element += run.coords[d] * step.strides[d];
  uint8_t* memory = step.place.at(frame) + element * step.element_bytes;
  uint8_t* values = (is_store ? argument(step, 0, scratch) : scratch + step.out_offset) +
                    run.begin * kClassBytes[class_of(step.dtype)];
  const int64_t stride = step.strides.back();
  if (offsets == nullptr) {
    is_store ? microkernels_.store[dtype](values, memory, stride, run.count)
             : microkernels_.load[dtype](memory, stride, values, run.count);
    return;
  }
  offsets += run.begin;
  if (predicate != nullptr) predicate += run.begin;
  is_store ? microkernels_.scatter[dtype](values, memory, stride, offsets, predicate, run.count)
           : microkernels_.gather[dtype](memory, stride, offsets, predicate, values, run.count);
}

}  // namespace mpk::cpu
