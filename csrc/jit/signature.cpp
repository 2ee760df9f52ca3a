#include "torch_mpk/jit/signature.h"

#include <algorithm>

namespace mpk::jit {
namespace {

std::string list(const int64_t* values, int count) {
  std::string text = "(";
  for (int i = 0; i < count; i++) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + (count == 1 ? ",)" : ")");
}

std::string name_of(const dlpack::Device& device) {
  if (device.type == dlpack::kCpu) return "the CPU";
  return (device.type == dlpack::kCuda ? "cuda:" : "device type " + std::to_string(device.type) + ":") +
         std::to_string(device.id);
}

std::string names_of(uint32_t dtypes) {
  std::vector<const char*> names;
  for (int i = 0; i < kNumDTypes; i++)
    if (dtypes >> i & 1) names.push_back(kDTypeInfo[i].name);
  std::string text;
  for (size_t i = 0; i < names.size(); i++)
    text += (i == 0 ? "" : i + 1 < names.size() ? ", " : " or ") + std::string(names[i]);
  return text;
}

}  // namespace

int dtype_of(const dlpack::Tensor& tensor) {
  const auto [code, bits, lanes] = tensor.dtype;
  const auto by_bits = [bits = bits](DType of8, DType of16, DType of32, DType of64) {
    return static_cast<int>(bits == 8 ? of8 : bits == 16 ? of16 : bits == 32 ? of32 : of64);
  };
  if (lanes != 1 || (bits != 8 && bits != 16 && bits != 32 && bits != 64)) return -1;
  switch (code) {
    case dlpack::kBool:
      return static_cast<int>(DType::kBool);
    case dlpack::kUInt:
      return bits == 8 ? static_cast<int>(DType::kU8) : -1;
    case dlpack::kInt:
      return by_bits(DType::kI8, DType::kI16, DType::kI32, DType::kI64);
    case dlpack::kBfloat:
      return static_cast<int>(DType::kBF16);
    case dlpack::kFloat:
      return bits == 8 ? -1 : by_bits(DType::kF16, DType::kF16, DType::kF32, DType::kF64);
  }
  return -1;
}

bool is_contiguous(const dlpack::Tensor& tensor) {
  int64_t expected = 1;
  for (int i = tensor.ndim - 1; i >= 0; i--) {
    if (tensor.shape[i] == 0) return true;
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) {
      return std::find(tensor.shape, tensor.shape + i, 0) != tensor.shape + i;
    }
    expected *= tensor.shape[i];
  }
  return true;
}

Signature::Signature(std::string kernel, std::string text, int device_type, std::vector<Operand> operands,
                     std::vector<std::string> slot_names, std::vector<Expression> expressions)
    : kernel_(std::move(kernel)),
      text_(std::move(text)),
      device_type_(device_type),
      operands_(std::move(operands)),
      slot_names_(std::move(slot_names)),
      expressions_(std::move(expressions)) {
  if (operands_.size() > kMaxOperands || slot_names_.size() > kMaxSlots)
    throw std::invalid_argument(kernel_ + ": a kernel takes at most " + std::to_string(kMaxOperands) +
                                " tensors, and as many names of sizes, strides, dtypes and attributes");
}

void Signature::fail(const std::string& what) const {
  throw SignatureError(kernel_ + ": " + what + " (signature: " + text_ + ")");
}

void Signature::start(Binding& binding) const {
  std::fill_n(binding.bound_by, slot_names_.size(), Binding::kFree);
  binding.leading = nullptr;
  binding.device_by = -1;
}

void Signature::match(int operand, Binding& binding) const {
  match_dtype(operand, binding);
  match_device(operand, binding);
  match_sizes(operand, binding);
  match_strides(operand, binding);
}

bool Signature::bind(const Extent& extent, int64_t value, int operand, Binding& binding) const {
  if (extent.kind == Extent::kLiteral) return value == extent.value;
  if (extent.kind == Extent::kAny) return true;
  if (extent.kind == Extent::kExpression) return expressions_[extent.value].evaluate(binding, *this) == value;
  if (binding.bound_by[extent.value] != Binding::kFree) return binding.values[extent.value] == value;
  binding.values[extent.value] = value;
  binding.bound_by[extent.value] = static_cast<int8_t>(operand);
  return true;
}

std::string Signature::origin(int64_t slot, const Binding& binding) const {
  const int by = binding.bound_by[slot];
  return by == Binding::kAttribute ? " was given" : " was bound by " + operands_[by].name;
}

std::string Signature::expected(const Extent& extent, const Binding& binding) const {
  if (extent.kind == Extent::kLiteral) return std::to_string(extent.value);
  const Expression& expression = expressions_[extent.value];
  return expression.text + " = " + std::to_string(expression.evaluate(binding, *this)) + ", with " +
         expression.values(binding, *this);
}

int64_t Signature::size_of(int operand, const Extent& extent, const Binding& binding) const {
  if (extent.kind == Extent::kLiteral) return extent.value;
  if (extent.kind == Extent::kSlot) return binding.values[extent.value];
  const int64_t size = expressions_[extent.value].evaluate(binding, *this);
  if (size < 0) fail(operands_[operand].name + " would have the size " + expected(extent, binding));
  return size;
}

void Signature::match_dtype(int operand, Binding& binding) const {
  const Operand& o = operands_[operand];
  const int dtype = dtype_of(binding.tensors[operand]);
  const char* name = dtype < 0 ? "of a dtype that kernels do not take" : kDTypeInfo[dtype].name;
  if (dtype < 0 || !(o.dtypes >> dtype & 1)) fail(o.name + " is " + name + ", expected " + names_of(o.dtypes));
  if (o.dtype_slot >= 0 && !bind({Extent::kSlot, o.dtype_slot}, dtype, operand, binding))
    fail(o.name + " is " + name + ", but " + slot_names_[o.dtype_slot] + "=" +
         kDTypeInfo[binding.values[o.dtype_slot]].name + origin(o.dtype_slot, binding));
}

void Signature::match_device(int operand, Binding& binding) const {
  const Operand& o = operands_[operand];
  const dlpack::Device& device = binding.tensors[operand].device;
  if (device.type != device_type_)
    fail(o.name + " is on " + name_of(device) + ", expected " +
         (device_type_ == dlpack::kCpu ? "the CPU" : "a CUDA device"));
  if (binding.device_by < 0) {
    binding.device = device;
    binding.device_by = operand;
  } else if (device.id != binding.device.id) {
    fail(o.name + " is on " + name_of(device) + ", but " + operands_[binding.device_by].name + " is on " +
         name_of(binding.device));
  }
}

void Signature::match_sizes(int operand, Binding& binding) const {
  const Operand& o = operands_[operand];
  const dlpack::Tensor& t = binding.tensors[operand];
  const int num_sizes = static_cast<int>(o.sizes.size()), num_leading = t.ndim - num_sizes;
  if (o.has_leading ? num_leading < 0 : num_leading != 0)
    fail(o.name + " has shape " + list(t.shape, t.ndim) + ", expected " + (o.has_leading ? "at least " : "") +
         std::to_string(num_sizes) + (num_sizes == 1 ? " dimension: " : " dimensions: ") + o.text);
  if (o.has_leading) {
    if (!binding.leading) {
      binding.leading = &t;
      binding.num_leading = num_leading;
      binding.leading_by = operand;
    } else if (num_leading != binding.num_leading ||
               !std::equal(t.shape, t.shape + num_leading, binding.leading->shape)) {
      fail(o.name + " has ...=" + list(t.shape, num_leading) + ", but ...=" +
           list(binding.leading->shape, binding.num_leading) + " was bound by " + operands_[binding.leading_by].name);
    }
  }
  for (int i = 0; i < num_sizes; i++) {
    const Extent& extent = o.sizes[i];
    const int64_t size = t.shape[num_leading + i];
    if (bind(extent, size, operand, binding)) continue;
    const std::string dimension = "dimension " + std::to_string(num_leading + i);
    if (extent.kind != Extent::kSlot)
      fail(o.name + " has size " + std::to_string(size) + " in " + dimension + ", expected " +
           expected(extent, binding));
    const std::string& name = slot_names_[extent.value];
    fail(o.name + " has " + name + "=" + std::to_string(size) + " in " + dimension + ", but " + name + "=" +
         std::to_string(binding.values[extent.value]) + origin(extent.value, binding));
  }
  if (o.numel_slot >= 0) {
    int64_t count = 1;
    for (int i = 0; i < t.ndim; i++) count *= t.shape[i];
    binding.values[o.numel_slot] = count;
  }
}

void Signature::match_strides(int operand, Binding& binding) const {
  const Operand& o = operands_[operand];
  const dlpack::Tensor& t = binding.tensors[operand];
  if (o.strides.empty()) {
    if (!is_contiguous(t))
      fail(o.name + " has strides " + list(t.strides, t.ndim) + " for shape " + list(t.shape, t.ndim) +
           ", expected a contiguous tensor: pass " + o.name + ".contiguous(), or name its strides in the signature");
    return;
  }
  for (int i = 0; i < t.ndim; i++) {
    const Extent& extent = o.strides[i];
    if (t.shape[i] <= 1 && extent.kind != Extent::kSlot) continue;  // no element is reached by it
    if (bind(extent, t.strides[i], operand, binding)) continue;
    const std::string where =
        o.name + " has stride " + std::to_string(t.strides[i]) + " in dimension " + std::to_string(i);
    if (extent.kind != Extent::kSlot) fail(where + ", expected " + expected(extent, binding));
    fail(where + ", but " + slot_names_[extent.value] + "=" + std::to_string(binding.values[extent.value]) +
         origin(extent.value, binding));
  }
}

}  // namespace mpk::jit
