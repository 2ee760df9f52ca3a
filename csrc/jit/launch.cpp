#include "torch_mpk/jit/launch.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

namespace mpk::jit {
namespace {

constexpr size_t kMaxDepth = 32;

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

std::string text(const unsigned (&extent)[3]) {
  return "(" + std::to_string(extent[0]) + ", " + std::to_string(extent[1]) + ", " + std::to_string(extent[2]) + ")";
}

}  // namespace

int64_t Expression::evaluate(const Binding& binding, const Signature& signature) const {
  int64_t stack[kMaxDepth];
  size_t depth = 0;
  for (const Instruction& instruction : code) {
    if (instruction.op == Op::kConstant || instruction.op == Op::kSlot) {
      if (depth == kMaxDepth) signature.fail("'" + text + "' is nested too deep");
      stack[depth++] = instruction.op == Op::kSlot ? binding.values[instruction.operand] : instruction.operand;
      continue;
    }
    const int64_t b = stack[--depth];
    int64_t& a = stack[depth - 1];
    bool overflows = false;
    const bool divides = instruction.op == Op::kFloorDiv || instruction.op == Op::kMod || instruction.op == Op::kCdiv;
    if (divides && b <= 0) signature.fail("'" + text + "' divides by " + std::to_string(b));
    switch (instruction.op) {
      case Op::kAdd:
        overflows = __builtin_add_overflow(a, b, &a);
        break;
      case Op::kSub:
        overflows = __builtin_sub_overflow(a, b, &a);
        break;
      case Op::kMul:
        overflows = __builtin_mul_overflow(a, b, &a);
        break;
      case Op::kFloorDiv:
        a = floor_div(a, b);
        break;
      case Op::kMod:
        a -= floor_div(a, b) * b;
        break;
      case Op::kCdiv:
        a = floor_div(a, b) + (a % b != 0);
        break;
      case Op::kMin:
        a = std::min(a, b);
        break;
      case Op::kMax:
        a = std::max(a, b);
        break;
      default:
        break;
    }
    if (overflows) signature.fail("'" + text + "' is beyond 64 bits");
  }
  return stack[0];
}

Geometry Plan::geometry(const Binding& binding, const Signature& signature) const {
  Geometry geometry = {};
  geometry.cooperative = cooperative;
  geometry.pdl = pdl;
  const auto fill = [&](const char* what, const std::vector<Expression>& expressions, unsigned (&out)[3]) {
    for (size_t i = 0; i < expressions.size(); i++) {
      const int64_t value = expressions[i].evaluate(binding, signature);
      if (value < 0 || value > INT32_MAX)
        signature.fail(std::string("the ") + what + "'s '" + expressions[i].text + "' is " + std::to_string(value));
      out[i] = static_cast<unsigned>(value);
    }
  };
  fill("grid", grid, geometry.grid);
  fill("block", block, geometry.block);
  fill("cluster", cluster, geometry.cluster);
  if (!shared_bytes.code.empty()) {
    const int64_t value = shared_bytes.evaluate(binding, signature);
    if (value < 0 || value > INT32_MAX)
      signature.fail("the shared memory's '" + shared_bytes.text + "' is " + std::to_string(value));
    geometry.shared_bytes = static_cast<unsigned>(value);
  }
  return geometry;
}

Parameters::Parameters(const Plan& plan, const std::vector<int>& bytes, const Binding& binding,
                       const Signature& signature) {
  for (size_t i = 0; i < plan.arguments.size(); i++) {
    const Argument& argument = plan.arguments[i];
    pointers_[i] = &values_[i];
    if (argument.kind == Argument::kPointer) {
      const dlpack::Tensor& tensor = binding.tensors[argument.index];
      values_[i] =
          binding.is_present[argument.index] ? reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset : 0;
    } else if (argument.kind == Argument::kInteger) {
      const int64_t value = argument.value.evaluate(binding, signature);
      // Signed or not, a parameter of fewer bytes holds it if the bytes that are cut off carry nothing.
      const int num_bits = 8 * bytes[i];
      const bool fits =
          num_bits >= 64 || (value >= -(int64_t{1} << (num_bits - 1)) && value < int64_t{1} << (num_bits - 1));
      if (!fits)
        signature.fail("'" + argument.value.text + "' is " + std::to_string(value) + ", which the " +
                       std::to_string(num_bits) + "-bit parameter cannot hold: declare it int64_t");
      values_[i] = static_cast<uint64_t>(value);
    } else {
      double value;
      std::memcpy(&value, &binding.values[argument.index], sizeof(value));
      if (bytes[i] == sizeof(float)) {
        const float rounded = static_cast<float>(value);
        std::memcpy(&values_[i], &rounded, sizeof(rounded));
      } else {
        std::memcpy(&values_[i], &value, sizeof(value));
      }
    }
  }
}

CpuCode::CpuCode(const std::string& library) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error("loading a compiled kernel failed: " + std::string(dlerror()));
  run_ = reinterpret_cast<void (*)(void**)>(dlsym(handle, "mpk_run"));
  const auto bytes = reinterpret_cast<const int* (*)()>(dlsym(handle, "mpk_parameter_bytes"));
  if (!run_ || !bytes) throw std::runtime_error(library + " is not a kernel of torch_mpk.jit");
  for (const int* size = bytes(); *size; size++) parameter_bytes_.push_back(*size);
}

CudaCode::CudaCode(const std::string& image, std::string kernel, std::string symbol, int device, int num_parameters)
    : driver_(cu::driver()), device_(cu::device_info(device)), kernel_(std::move(kernel)) {
  if (!driver_.func_get_param_info)
    throw cu::Error("torch_mpk.jit needs a driver of CUDA 12.4 or newer: update NVIDIA's driver");
  cu::Device handle;
  driver_.check(driver_.device_get(&handle, device), "cuDeviceGet");
  driver_.check(driver_.primary_ctx_retain(&context_, handle), "cuDevicePrimaryCtxRetain");
  const cu::ContextGuard current(driver_, context_);
  const cu::RelaxedCaptureGuard relaxed(driver_);
  char log[4096] = {};
  int options[] = {cu::kJitErrorLogBuffer, cu::kJitErrorLogBufferSizeBytes};
  void* values[] = {log, reinterpret_cast<void*>(sizeof(log) - 1)};
  driver_.check(driver_.module_load_data_ex(&module_, image.c_str(), 2, options, values),
                "loading kernel " + kernel_ + " on " + device_.name + (log[0] ? " [" + std::string(log) + "]" : ""));
  driver_.check(driver_.module_get_function(&function_, module_, symbol.c_str()), "finding kernel " + kernel_);
  if (driver_.func_load) driver_.check(driver_.func_load(function_), "loading kernel " + kernel_);
  for (int i = 0; i < num_parameters; i++) {
    size_t offset = 0, size = 0;
    driver_.check(driver_.func_get_param_info(function_, i, &offset, &size), "cuFuncGetParamInfo");
    parameter_bytes_.push_back(static_cast<int>(size));
  }
  int bytes = 0;
  driver_.check(driver_.func_get_attribute(&bytes, cu::kFuncAttributeSharedSizeBytes, function_), "cuFuncGetAttribute");
  static_shared_bytes_ = bytes;
}

void CudaCode::allow(const Geometry& geometry) {
  const std::lock_guard lock(mutex_);
  if (geometry.shared_bytes > allowed_shared_bytes_) {
    if (geometry.shared_bytes + static_shared_bytes_ > device_.smem_optin_bytes)
      throw cu::Error("kernel " + kernel_ + " needs " + std::to_string(geometry.shared_bytes) + " + " +
                      std::to_string(static_shared_bytes_) + " bytes of shared memory, a block on " + device_.name +
                      " has " + std::to_string(device_.smem_optin_bytes));
    driver_.check(
        driver_.func_set_attribute(function_, cu::kFuncAttributeMaxDynamicSharedSizeBytes, geometry.shared_bytes),
        "cuFuncSetAttribute");
    allowed_shared_bytes_ = geometry.shared_bytes;
  }
  const unsigned cluster = geometry.cluster[0] * geometry.cluster[1] * geometry.cluster[2];
  if (cluster > allowed_cluster_) {
    driver_.check(driver_.func_set_attribute(function_, cu::kFuncAttributeNonPortableClusterSizeAllowed, 1),
                  "cuFuncSetAttribute");
    allowed_cluster_ = cluster;
  }
}

void CudaCode::run(const Geometry& geometry, void** parameters, void* stream) {
  const auto& [grid, block, cluster, shared_bytes, cooperative, pdl] = geometry;
  if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) return;  // an empty tensor
  const cu::ContextGuard current(driver_, context_);
  const bool has_cluster = cluster[0] * cluster[1] * cluster[2] > 1;
  if (has_cluster && device_.arch < 90)
    throw cu::Error("kernel " + kernel_ + " is launched in clusters, which " + device_.name + " does not have");
  allow(geometry);
  cu::LaunchAttribute attributes[3] = {};
  unsigned num_attributes = 0;
  if (cooperative) {
    attributes[num_attributes].id = cu::kLaunchAttributeCooperative;
    attributes[num_attributes++].value.cooperative = 1;
  }
  if (has_cluster) {
    attributes[num_attributes].id = cu::kLaunchAttributeClusterDimension;
    std::copy_n(cluster, 3, attributes[num_attributes++].value.cluster);
  }
  if (pdl && device_.arch >= 90) {  // older devices have no such overlap, and need none
    attributes[num_attributes].id = cu::kLaunchAttributeProgrammaticStreamSerialization;
    attributes[num_attributes++].value.programmatic = 1;
  }
  const cu::LaunchConfig config = {.grid = {grid[0], grid[1], grid[2]},
                                   .block = {block[0], block[1], block[2]},
                                   .shared_bytes = shared_bytes,
                                   .stream = static_cast<cu::Stream>(stream),
                                   .attributes = attributes,
                                   .num_attributes = num_attributes};
  const cu::Result result = driver_.launch_kernel_ex(&config, function_, parameters, nullptr);
  if (result == 0) return;
  driver_.check(result, "launching kernel " + kernel_ + " with grid " + text(grid) + ", block " + text(block) +
                            (has_cluster ? ", cluster " + text(cluster) : "") + " and " + std::to_string(shared_bytes) +
                            " bytes of dynamic shared memory");
}

}  // namespace mpk::jit
