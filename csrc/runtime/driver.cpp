#include "torch_mpk/runtime/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

namespace mpk::cu {
namespace {

constexpr int kMinVersion = 12000;

std::string version_string(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::unique_ptr<Driver> load(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library)
    throw Error("no CUDA driver: " + std::string(dlerror()) +
                ". Install NVIDIA's driver (in a container: start it with --gpus), or run the model on the CPU");
  auto driver = std::make_unique<Driver>();
  std::string missing;
  const auto find = [&](const char* symbol) { return dlsym(library, symbol); };
#define X(member, symbol, parameters)                                         \
  driver->member = reinterpret_cast<decltype(driver->member)>(find(#symbol)); \
  if (!driver->member && missing.empty()) missing = #symbol;
  MPK_CUDA_DRIVER_FUNCTIONS(X)
#undef X
  driver->func_load = reinterpret_cast<decltype(driver->func_load)>(find("cuFuncLoad"));
  driver->func_get_param_info = reinterpret_cast<decltype(driver->func_get_param_info)>(find("cuFuncGetParamInfo"));

  driver->version = 0;
  if (driver->driver_get_version) driver->driver_get_version(&driver->version);
  if (!missing.empty() || driver->version < kMinVersion)
    throw Error("the CUDA driver is too old: it serves CUDA " + version_string(driver->version) +
                (missing.empty() ? "" : " and has no " + missing) + ", torch_mpk needs CUDA " +
                version_string(kMinVersion) + " or newer. Update NVIDIA's driver");
  driver->check(driver->init(0), "cuInit");
  return driver;
}

int attribute(const Driver& d, int id, Device device) {
  int value = 0;
  d.check(d.device_get_attribute(&value, id, device), "cuDeviceGetAttribute");
  return value;
}

}  // namespace

void Driver::check(Result result, const std::string& what) const {
  if (result == 0) return;
  const char* name = nullptr;
  const char* text = nullptr;
  get_error_name(result, &name);
  get_error_string(result, &text);
  std::string message = what + " failed: " + (name ? name : "error " + std::to_string(result));
  if (text) message += std::string(": ") + text;
  switch (result) {
    case kErrorOutOfMemory:
      message += ". Free memory on the device; torch.cuda.empty_cache() returns what PyTorch holds unused";
      break;
    case kErrorNotInitialized:
      message += ". CUDA does not survive fork(): start processes with the spawn method";
      break;
    case kErrorCooperativeLaunchTooLarge:
      message +=
          ". All workers of a megakernel run at once, one on each multiprocessor of the device, and this stream may "
          "use fewer: launch outside of green contexts and MPS partitions";
      break;
    case kErrorNoBinaryForGpu:
      message += ". The kernel was built for another architecture than this device's";
      break;
    case kErrorUnsupportedPtxVersion:
      message +=
          ". The driver serves CUDA " + version_string(version) + ": update it, or use a compiler of that release";
      break;
  }
  throw Error(message);
}

const Driver& driver() {
  static std::mutex mutex;
  // Keyed by path, so that a test's driver does not replace the real one. Never freed: executables may outlive this
  // map.
  static auto* drivers = new std::map<std::string, std::unique_ptr<Driver>>;
  const char* path = std::getenv("TORCH_MPK_LIBCUDA");
  const std::lock_guard lock(mutex);
  std::unique_ptr<Driver>& slot = (*drivers)[path ? path : "libcuda.so.1"];
  if (!slot) slot = load(path ? path : "libcuda.so.1");
  return *slot;
}

int num_devices() {
  try {
    int count = 0;
    return driver().device_get_count(&count) == 0 ? count : 0;
  } catch (const Error&) {
    return 0;
  }
}

DeviceInfo device_info(int ordinal) {
  const Driver& d = driver();
  Device device;
  d.check(d.device_get(&device, ordinal), "CUDA device " + std::to_string(ordinal) + ": cuDeviceGet");
  char name[256] = {};
  d.check(d.device_get_name(name, sizeof(name) - 1, device), "cuDeviceGetName");
  return DeviceInfo{
      .ordinal = ordinal,
      .name = name,
      .arch = 10 * attribute(d, kAttributeComputeCapabilityMajor, device) +
              attribute(d, kAttributeComputeCapabilityMinor, device),
      .num_sms = attribute(d, kAttributeMultiprocessorCount, device),
      .smem_optin_bytes = attribute(d, kAttributeMaxSharedMemoryPerBlockOptin, device),
      .driver_version = d.version,
  };
}

}  // namespace mpk::cu
