#include "torch_mpk/jit/launch.h"

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>

#include "../arch/arch.h"

namespace mpk::jit {
namespace {

constexpr int kMaxThreads = 1024;  // of a block, on every device

std::string text(const unsigned (&extent)[3]) {
  return "(" + std::to_string(extent[0]) + ", " + std::to_string(extent[1]) + ", " + std::to_string(extent[2]) + ")";
}

size_t aligned(size_t bytes) { return (bytes + 15) / 16 * 16; }

bool holds(int bits, int64_t value) {
  if (bits > 0) return value >= 0 && (bits >= 63 || value < int64_t{1} << bits);
  return bits <= -64 || (value >= -(int64_t{1} << (-bits - 1)) && value < int64_t{1} << (-bits - 1));
}

std::string describe(const Argument& argument, int bits) {
  const std::string type = bits == 1 ? "a bool" : bits > 0 ? "unsigned" : std::to_string(-bits) + " bits";
  return "parameter " + std::to_string(argument.parameter + 1) +
         (argument.field.empty() ? "" : "'s " + argument.field) + " (" + type + ")";
}

uint64_t argument_value(const Argument& argument, const Place& place, const Binding& binding,
                        const Signature& signature) {
  if (argument.kind == Argument::kPointer) {
    const dlpack::Tensor& tensor = binding.tensors[argument.index];
    return binding.is_present[argument.index] ? reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset : 0;
  }
  if (argument.kind == Argument::kInteger) {
    const int64_t value = argument.value.evaluate(binding, signature);
    if (!holds(place.bits, value))
      signature.fail("'" + argument.value.text + "' is " + std::to_string(value) + ", which " +
                     describe(argument, place.bits) + " cannot hold: declare it int64_t");
    return static_cast<uint64_t>(value);
  }
  const uint64_t bits = static_cast<uint64_t>(binding.values[argument.index]);
  if (place.bytes != sizeof(float)) return bits;
  return std::bit_cast<uint32_t>(static_cast<float>(std::bit_cast<double>(bits)));
}

}  // namespace

void Plan::require(const Binding& binding, const Signature& signature) const {
  for (const Expression& requirement : requirements) {
    if (requirement.evaluate(binding, signature)) continue;
    const std::string values = requirement.values(binding, signature);
    signature.fail("requires " + requirement.text + (values.empty() ? "" : ", but " + values));
  }
}

Geometry Plan::geometry(const Launch& launch, const Binding& binding, const Signature& signature) const {
  Geometry geometry = {};
  geometry.cooperative = cooperative;
  geometry.pdl = pdl.evaluate(binding, signature) != 0;
  const auto fill = [&](const char* what, const std::vector<Expression>& expressions, unsigned (&out)[3]) {
    for (size_t i = 0; i < expressions.size(); i++) {
      const int64_t value = expressions[i].evaluate(binding, signature);
      if (value < 0 || value > INT32_MAX)
        signature.fail(std::string("the ") + what + "'s '" + expressions[i].text + "' is " + std::to_string(value));
      out[i] = static_cast<unsigned>(value);
    }
  };
  fill("grid", launch.grid, geometry.grid);
  fill("block", launch.block, geometry.block);
  const bool is_empty = std::find(geometry.grid, geometry.grid + 3, 0u) != geometry.grid + 3;  // or on the CPU
  const double threads = double(geometry.block[0]) * geometry.block[1] * geometry.block[2];
  if (!is_empty && (threads < 1 || threads > kMaxThreads))
    signature.fail("the block is " + text(geometry.block) + ", expected 1 to " + std::to_string(kMaxThreads) +
                   " threads in all");
  fill("cluster", cluster, geometry.cluster);
  if (!launch.shared_bytes.code.empty()) {
    const int64_t value = launch.shared_bytes.evaluate(binding, signature);
    if (value < 0 || value > INT32_MAX)
      signature.fail("the shared memory's '" + launch.shared_bytes.text + "' is " + std::to_string(value));
    geometry.shared_bytes = static_cast<unsigned>(value);
  }
  return geometry;
}

Place Layout::place(const Launch& launch, size_t argument) const {
  if (!arguments.empty()) return arguments[argument];
  const int bytes = parameter_bytes[launch.arguments[argument].parameter];
  return {.offset = 0, .bytes = bytes, .bits = -8 * bytes};
}

void check(const Layout& layout, const Launch& launch) {
  bool fits = layout.parameter_bytes.size() == static_cast<size_t>(launch.num_parameters) &&
              (layout.arguments.empty() || layout.arguments.size() == launch.arguments.size());
  size_t num_bytes = 0;
  for (int bytes : layout.parameter_bytes) num_bytes += aligned(bytes);
  for (size_t i = 0; fits && i < launch.arguments.size(); i++) {
    const auto [offset, bytes, bits] = layout.place(launch, i);
    const int whole = layout.parameter_bytes[launch.arguments[i].parameter];
    fits = bytes <= 8 && offset >= 0 && offset + bytes <= whole && std::abs(bits) <= 8 * bytes;
  }
  if (!fits) throw std::runtime_error("a compiled kernel has other parameters than its launch has arguments");
  if (num_bytes > kMaxParameterBytes)
    throw std::runtime_error("a kernel's parameters have " + std::to_string(num_bytes) + " bytes, at most " +
                             std::to_string(kMaxParameterBytes) + " can be passed");
}

Parameters::Parameters(const Launch& launch, const Layout& layout, const Binding& binding, const Signature& signature) {
  std::byte* next = values_;
  size_t i = 0;
  for (int parameter = 0; parameter < launch.num_parameters; parameter++) {
    const int whole = layout.parameter_bytes[parameter];
    pointers_[parameter] = next;
    const auto is_of_it = [&] { return i < launch.arguments.size() && launch.arguments[i].parameter == parameter; };
    if (!is_of_it() || !launch.arguments[i].field.empty()) std::memset(next, 0, whole);  // unnamed fields are 0
    for (; is_of_it(); i++) {
      const Place place = layout.place(launch, i);
      const uint64_t value = argument_value(launch.arguments[i], place, binding, signature);
      std::memcpy(next + place.offset, &value, place.bytes);
    }
    next += aligned(whole);
  }
}

CpuCode::CpuCode(const std::string& library, const std::string& entry) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error("loading a compiled kernel failed: " + std::string(dlerror()));
  const auto find = [&](const std::string& name) { return dlsym(handle, (name + entry).c_str()); };
  run_ = reinterpret_cast<void (*)(void**)>(find("mpk_run"));
  const auto bytes = reinterpret_cast<const int* (*)()>(find("mpk_parameter_bytes"));
  const auto arguments = reinterpret_cast<const int* (*)()>(find("mpk_arguments"));
  if (!run_ || !bytes || !arguments) throw std::runtime_error(library + " is not a kernel of torch_mpk.jit");
  for (const int* size = bytes(); *size; size++) layout_.parameter_bytes.push_back(*size);
  for (const int* place = arguments(); *place >= 0; place += 3)
    layout_.arguments.push_back({place[0], place[1], place[2]});
}

cu::Module CudaCode::module_of(const std::string& image) {
  // Functions of one image share its variables.
  static std::mutex mutex;
  static auto* modules = new std::map<std::pair<int, std::string>, cu::Module>;
  const std::lock_guard lock(mutex);
  cu::Module& module = (*modules)[{device_.ordinal, image}];
  if (module) return module;
  char log[4096] = {};
  int options[] = {cu::kJitErrorLogBuffer, cu::kJitErrorLogBufferSizeBytes};
  void* values[] = {log, reinterpret_cast<void*>(sizeof(log) - 1)};
  const cu::Result result = driver_.module_load_data_ex(&module, image.c_str(), 2, options, values);
  if (result != 0) module = nullptr;
  driver_.check(result,
                "loading kernel " + kernel_ + " on " + device_.name + (log[0] ? " [" + std::string(log) + "]" : ""));
  return module;
}

CudaCode::CudaCode(const std::string& image, std::string kernel, std::string symbol, int device, int num_parameters,
                   std::vector<Place> arguments)
    : driver_(cu::driver()), device_(cu::device_info(device)), kernel_(std::move(kernel)) {
  if (!driver_.func_get_param_info)
    throw cu::Error("torch_mpk.jit needs a driver of CUDA 12.4 or newer: update NVIDIA's driver");
  cu::Device handle;
  driver_.check(driver_.device_get(&handle, device), "cuDeviceGet");
  driver_.check(driver_.primary_ctx_retain(&context_, handle), "cuDevicePrimaryCtxRetain");
  const cu::ContextGuard current(driver_, context_);
  const cu::RelaxedCaptureGuard relaxed(driver_);
  driver_.check(driver_.module_get_function(&function_, module_of(image), symbol.c_str()), "finding kernel " + kernel_);
  if (driver_.func_load) driver_.check(driver_.func_load(function_), "loading kernel " + kernel_);
  for (int i = 0; i < num_parameters; i++) {
    size_t offset = 0, size = 0;
    driver_.check(driver_.func_get_param_info(function_, i, &offset, &size), "cuFuncGetParamInfo");
    layout_.parameter_bytes.push_back(static_cast<int>(size));
  }
  layout_.arguments = std::move(arguments);
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
  const auto has = [this](bool Arch::* capability) {
    const Arch* arch = arch_of_device(device_.arch);
    return arch != nullptr && arch->*capability;
  };
  if (has_cluster && !has(&Arch::has_clusters))
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
  if (pdl && has(&Arch::overlaps_launches)) {  // older devices have no such overlap, and need none
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
