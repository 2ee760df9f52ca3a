// The part of the CUDA driver API that the runtime uses, loaded by dlopen when it is first needed, so that neither
// building nor importing torch_mpk needs CUDA. Types are declared as cuda.h lays them out; tests compare the two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace mpk::cu {

using Result = int;
using Device = int;
using DevicePtr = unsigned long long;
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Stream = struct StreamHandle*;
using Graph = struct GraphHandle*;
using GraphNode = struct GraphNodeHandle*;
using UserObject = struct UserObjectHandle*;

inline constexpr Result kErrorOutOfMemory = 2;
inline constexpr Result kErrorNotInitialized = 3;
inline constexpr Result kErrorNoBinaryForGpu = 209;
inline constexpr Result kErrorUnsupportedPtxVersion = 222;
inline constexpr Result kErrorCooperativeLaunchTooLarge = 720;
inline constexpr int kAttributeMultiprocessorCount = 16;
inline constexpr int kAttributeComputeCapabilityMajor = 75;
inline constexpr int kAttributeComputeCapabilityMinor = 76;
inline constexpr int kAttributeMaxSharedMemoryPerBlockOptin = 97;
inline constexpr int kFuncAttributeSharedSizeBytes = 1;
inline constexpr int kFuncAttributeNumRegs = 4;
inline constexpr int kFuncAttributeMaxDynamicSharedSizeBytes = 8;
inline constexpr int kFuncAttributeNonPortableClusterSizeAllowed = 14;
inline constexpr int kJitErrorLogBuffer = 5;
inline constexpr int kJitErrorLogBufferSizeBytes = 6;
inline constexpr unsigned kHostAllocPortable = 1;
inline constexpr unsigned kHostAllocDeviceMap = 2;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr int kCaptureStatusNone = 0;
inline constexpr int kCaptureModeRelaxed = 2;
inline constexpr unsigned kUserObjectNoDestructorSync = 1;
inline constexpr unsigned kGraphUserObjectMove = 1;
inline constexpr int kLaunchAttributeCooperative = 2;
inline constexpr int kLaunchAttributeClusterDimension = 4;
inline constexpr int kLaunchAttributeProgrammaticStreamSerialization = 6;

inline constexpr int kTensorMapUint16 = 1;
inline constexpr int kTensorMapPlain = 0, kTensorMapSwizzle128 = 3, kTensorMapPromotion256 = 3;

struct alignas(128) TensorMap {
  uint64_t opaque[16];
};

struct LaunchAttribute {
  int id;
  int padding;
  union {
    char bytes[64];
    int cooperative;
    unsigned cluster[3];
    int programmatic;
  } value;
};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};

// X(member, symbol, parameter types). Every symbol exists since the driver of CUDA 12.0.
#define MPK_CUDA_DRIVER_FUNCTIONS(X)                                                                                   \
  X(init, cuInit, (unsigned))                                                                                          \
  X(driver_get_version, cuDriverGetVersion, (int*))                                                                    \
  X(get_error_name, cuGetErrorName, (Result, const char**))                                                            \
  X(get_error_string, cuGetErrorString, (Result, const char**))                                                        \
  X(device_get, cuDeviceGet, (Device*, int))                                                                           \
  X(device_get_count, cuDeviceGetCount, (int*))                                                                        \
  X(device_get_name, cuDeviceGetName, (char*, int, Device))                                                            \
  X(device_get_attribute, cuDeviceGetAttribute, (int*, int, Device))                                                   \
  X(primary_ctx_retain, cuDevicePrimaryCtxRetain, (Context*, Device))                                                  \
  X(primary_ctx_release, cuDevicePrimaryCtxRelease_v2, (Device))                                                       \
  X(ctx_get_current, cuCtxGetCurrent, (Context*))                                                                      \
  X(ctx_get_device, cuCtxGetDevice, (Device*))                                                                         \
  X(ctx_push_current, cuCtxPushCurrent_v2, (Context))                                                                  \
  X(ctx_pop_current, cuCtxPopCurrent_v2, (Context*))                                                                   \
  X(ctx_synchronize, cuCtxSynchronize, ())                                                                             \
  X(module_load_data_ex, cuModuleLoadDataEx, (Module*, const void*, unsigned, int*, void**))                           \
  X(module_unload, cuModuleUnload, (Module))                                                                           \
  X(module_get_function, cuModuleGetFunction, (Function*, Module, const char*))                                        \
  X(func_get_attribute, cuFuncGetAttribute, (int*, int, Function))                                                     \
  X(func_set_attribute, cuFuncSetAttribute, (Function, int, int))                                                      \
  X(occupancy, cuOccupancyMaxActiveBlocksPerMultiprocessor, (int*, Function, int, size_t))                             \
  X(mem_alloc, cuMemAlloc_v2, (DevicePtr*, size_t))                                                                    \
  X(mem_free, cuMemFree_v2, (DevicePtr))                                                                               \
  X(mem_host_alloc, cuMemHostAlloc, (void**, size_t, unsigned))                                                        \
  X(mem_host_get_device_pointer, cuMemHostGetDevicePointer_v2, (DevicePtr*, void*, unsigned))                          \
  X(mem_free_host, cuMemFreeHost, (void*))                                                                             \
  X(memset_d8_async, cuMemsetD8Async, (DevicePtr, unsigned char, size_t, Stream))                                      \
  X(memcpy_htod_async, cuMemcpyHtoDAsync_v2, (DevicePtr, const void*, size_t, Stream))                                 \
  X(memcpy_dtoh_async, cuMemcpyDtoHAsync_v2, (void*, DevicePtr, size_t, Stream))                                       \
  X(stream_create, cuStreamCreate, (Stream*, unsigned))                                                                \
  X(stream_destroy, cuStreamDestroy_v2, (Stream))                                                                      \
  X(stream_synchronize, cuStreamSynchronize, (Stream))                                                                 \
  X(stream_get_capture_info, cuStreamGetCaptureInfo_v2, (Stream, int*, uint64_t*, Graph*, const GraphNode**, size_t*)) \
  X(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (int*))                                                  \
  X(user_object_create, cuUserObjectCreate, (UserObject*, void*, void (*)(void*), unsigned, unsigned))                 \
  X(user_object_release, cuUserObjectRelease, (UserObject, unsigned))                                                  \
  X(graph_retain_user_object, cuGraphRetainUserObject, (Graph, UserObject, unsigned, unsigned))                        \
  X(launch_kernel_ex, cuLaunchKernelEx, (const LaunchConfig*, Function, void**, void**))                               \
  X(tensor_map_encode, cuTensorMapEncodeTiled,                                                                         \
    (TensorMap*, int, unsigned, void*, const uint64_t*, const uint64_t*, const unsigned*, const unsigned*, int, int,   \
     int, int))

// There is no usable driver or device, or the driver refused a call. what(): with the remedy, if known.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Driver {
#define X(member, symbol, parameters) Result(*member) parameters;
  MPK_CUDA_DRIVER_FUNCTIONS(X)
#undef X
  // Since CUDA 12.4; nullptr before.
  Result (*func_load)(Function);
  Result (*func_get_param_info)(Function, size_t, size_t*, size_t*);

  int version;  // 12080 is CUDA 12.8

  // Throws Error for any result but success.
  void check(Result result, const std::string& what) const;
};

// The driver of this process, initialised. Throws Error when there is none or it is too old. TORCH_MPK_LIBCUDA names
// another library than libcuda.so.1, for tests.
const Driver& driver();

// Makes a context current for a scope. Free if it is current already, as it is under PyTorch.
class ContextGuard {
 public:
  ContextGuard(const Driver& driver, Context context) : driver_(driver) {
    Context current = nullptr;
    driver_.ctx_get_current(&current);
    if (current == context) return;
    driver_.check(driver_.ctx_push_current(context), "cuCtxPushCurrent");
    pushed_ = true;
  }
  ~ContextGuard() {
    Context popped;
    if (pushed_) driver_.ctx_pop_current(&popped);
  }

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

// Lets this thread allocate and synchronise while some stream of the process is being captured.
class RelaxedCaptureGuard {
 public:
  explicit RelaxedCaptureGuard(const Driver& driver) : driver_(driver) { driver_.exchange_capture_mode(&mode_); }
  ~RelaxedCaptureGuard() { driver_.exchange_capture_mode(&mode_); }

 private:
  const Driver& driver_;
  int mode_ = kCaptureModeRelaxed;
};

struct DeviceInfo {
  int ordinal;
  std::string name;
  int arch;  // 90 for compute capability 9.0
  int num_sms;
  int64_t smem_optin_bytes;  // shared memory one CTA may use
  int driver_version;
};

int num_devices();  // 0 without a driver
DeviceInfo device_info(int ordinal);

}  // namespace mpk::cu
