// A CUDA driver without a device, for tests of the launcher: device memory is host memory, a launch is recorded, and
// the exported `fake` tells what was done and decides what happens next.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int kMaxBytes = 32768;

struct Fake {
  // Set by the test.
  int version, arch, num_sms, smem_optin, occupancy, num_devices;
  int static_shared;  // bytes, the kernel's
  int fail_result;    // what the call named fail_call returns
  char fail_call[64];
  uint64_t capturing_stream;  // 0: none
  uint64_t capture_id;
  int param_bytes[16];  // of each of the kernel's parameters, up to a 0; what a launch copies, one behind the other
  int foreign_context;  // whether another context of the device is current
  // Read by the test.
  std::atomic<int> num_launches, num_allocations, num_live, num_context_pushes, context_depth;  // by any thread
  std::atomic<int> num_violations;  // calls that would break a capture: unsafe ones, made in another mode than relaxed;
                                    // or of a user object's destructor
  unsigned grid[3], block[3], cluster[3], shared_bytes;
  int cooperative, programmatic, max_dynamic_shared, non_portable_cluster;
  uint64_t stream;
  char kernel[64];
  char image[256];
  unsigned char params[kMaxBytes];
};

struct Context {
} context, foreign;
thread_local Context* current = nullptr;
thread_local int capture_mode = 0;
thread_local bool in_destructor = false;

struct UserObject {
  void* pointer;
  void (*destroy)(void*);
};
struct Retained {
  uint64_t graph;
  UserObject* object;
};
std::vector<Retained> all_retained;

// As the driver does, on a thread of its own.
void destroy(UserObject* object) {
  std::thread([object] {
    in_destructor = true;
    object->destroy(object->pointer);
    delete object;
  }).join();
}

}  // namespace

extern "C" {

Fake fake = {};

#define FAIL(name) \
  if (std::strcmp(fake.fail_call, #name) == 0) return fake.fail_result
#define UNSAFE() \
  if ((fake.capturing_stream && capture_mode != 2) || in_destructor) fake.num_violations++

int cuInit(unsigned) {
  FAIL(cuInit);
  return 0;
}
int cuDriverGetVersion(int* version) {
  *version = fake.version;
  return 0;
}
int cuGetErrorName(int result, const char** name) {
  *name = result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "as the test asked for";
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = fake.num_devices;
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < fake.num_devices ? 0 : 101;
}
int cuDeviceGetName(char* name, int size, int) {
  std::strncpy(name, "Fake GPU", size);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 16   ? fake.num_sms
           : attribute == 75 ? fake.arch / 10
           : attribute == 76 ? fake.arch % 10
                             : fake.smem_optin;
  return 0;
}
int cuDevicePrimaryCtxRetain(Context** out, int) {
  *out = &context;
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxGetCurrent(Context** out) {
  *out = current || !fake.foreign_context ? current : &foreign;
  return 0;
}
int cuCtxGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cuCtxPushCurrent_v2(Context* c) {
  if (!c) return 201;
  current = c;
  fake.num_context_pushes++;
  fake.context_depth++;
  return 0;
}
int cuCtxPopCurrent_v2(Context** out) {
  *out = current;
  current = nullptr;
  fake.context_depth--;
  return 0;
}
int cuCtxSynchronize() {
  UNSAFE();
  return 0;
}
int cuModuleLoadDataEx(void** module, const void* image, unsigned, int*, void** values) {
  std::strncpy(fake.image, static_cast<const char*>(image), sizeof(fake.image) - 1);
  if (std::strcmp(fake.fail_call, "cuModuleLoadDataEx") == 0)
    std::strcpy(static_cast<char*>(values[0]), "ptxas says no");
  FAIL(cuModuleLoadDataEx);
  *module = &context;
  return 0;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void*, const char* name) {
  std::strncpy(fake.kernel, name, sizeof(fake.kernel) - 1);
  *function = &context;
  return 0;
}
int cuFuncGetAttribute(int* value, int attribute, void*) {
  *value = attribute == 1 ? fake.static_shared : 168;
  return 0;
}
int cuFuncSetAttribute(void*, int attribute, int value) {
  if (attribute == 8) fake.max_dynamic_shared = value;
  if (attribute == 14) fake.non_portable_cluster = value;
  return 0;
}
int cuFuncGetParamInfo(void*, size_t index, size_t* offset, size_t* size) {
  *offset = 0;
  *size = fake.param_bytes[index];
  return *size ? 0 : 1;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) {
  *blocks = fake.occupancy;
  return 0;
}
int cuMemAlloc_v2(unsigned long long* out, size_t bytes) {
  UNSAFE();
  FAIL(cuMemAlloc);
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(memory, 0xA5, bytes);
  *out = reinterpret_cast<unsigned long long>(memory);
  fake.num_allocations++;
  fake.num_live++;
  return 0;
}
int cuMemFree_v2(unsigned long long memory) {
  UNSAFE();
  std::free(reinterpret_cast<void*>(memory));
  fake.num_live--;
  return 0;
}
int cuMemHostAlloc(void** out, size_t bytes, unsigned) {
  UNSAFE();
  *out = std::calloc(1, bytes);
  fake.num_live++;
  return 0;
}
int cuMemHostGetDevicePointer_v2(unsigned long long* out, void* host, unsigned) {
  *out = reinterpret_cast<unsigned long long>(host);
  return 0;
}
int cuMemFreeHost(void* host) {
  std::free(host);
  fake.num_live--;
  return 0;
}
int cuMemsetD8Async(unsigned long long memory, unsigned char value, size_t bytes, void*) {
  std::memset(reinterpret_cast<void*>(memory), value, bytes);
  return 0;
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void*) {
  std::memcpy(reinterpret_cast<void*>(to), from, bytes);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes, void*) {
  std::memcpy(to, reinterpret_cast<void*>(from), bytes);
  return 0;
}
int cuStreamCreate(void** stream, unsigned) {
  *stream = std::malloc(1);
  fake.num_live++;
  return 0;
}
int cuStreamDestroy_v2(void* stream) {
  std::free(stream);
  fake.num_live--;
  return 0;
}
int cuStreamSynchronize(void*) {
  UNSAFE();
  return 0;
}
// A graph's handle is the id of its capture.
int cuStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t* id, void** graph, const void**, size_t*) {
  const bool capturing = fake.capturing_stream && reinterpret_cast<uint64_t>(stream) == fake.capturing_stream;
  *status = capturing ? 1 : 0;
  *id = fake.capture_id;
  if (graph) *graph = capturing ? reinterpret_cast<void*>(fake.capture_id) : nullptr;
  return 0;
}
int cuUserObjectCreate(UserObject** out, void* pointer, void (*destructor)(void*), unsigned count, unsigned flags) {
  FAIL(cuUserObjectCreate);
  if (count != 1 || flags != 1) return 1;
  *out = new UserObject{pointer, destructor};
  return 0;
}
int cuUserObjectRelease(UserObject* object, unsigned) {
  destroy(object);
  return 0;
}
int cuGraphRetainUserObject(void* graph, UserObject* object, unsigned count, unsigned flags) {
  FAIL(cuGraphRetainUserObject);
  if (!graph || count != 1 || flags != 1) return 1;
  all_retained.push_back({reinterpret_cast<uint64_t>(graph), object});
  return 0;
}
// Not the driver's: destroys what a capture has left; 0: what all have.
void fake_destroy_graph(uint64_t capture) {
  std::erase_if(all_retained, [&](const Retained& retained) {
    const bool is_destroyed = !capture || retained.graph == capture;
    if (is_destroyed) destroy(retained.object);
    return is_destroyed;
  });
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  const int old = capture_mode;
  capture_mode = *mode;
  *mode = old;
  return 0;
}

struct Attribute {
  int id, padding;
  union {
    char bytes[64];
    int number;
    unsigned cluster[3];
  };
};
struct Config {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned num_attributes;
};
int cuLaunchKernelEx(const Config* config, void*, void** params, void**) {
  FAIL(cuLaunchKernelEx);
  fake.num_launches++;
  std::copy_n(config->grid, 3, fake.grid);
  std::copy_n(config->block, 3, fake.block);
  fake.shared_bytes = config->shared;
  fake.stream = reinterpret_cast<uint64_t>(config->stream);
  fake.cooperative = fake.programmatic = 0;
  std::fill_n(fake.cluster, 3, 0);
  for (unsigned i = 0; i < config->num_attributes; i++) {
    const Attribute& attribute = config->attributes[i];
    if (attribute.id == 2) fake.cooperative = attribute.number;
    if (attribute.id == 4) std::copy_n(attribute.cluster, 3, fake.cluster);
    if (attribute.id == 6) fake.programmatic = attribute.number;
  }
  unsigned char* out = fake.params;
  for (int i = 0; fake.param_bytes[i]; out += fake.param_bytes[i++]) std::memcpy(out, params[i], fake.param_bytes[i]);
  return 0;
}

// A map is what it was made of.
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* data, const uint64_t* sizes,
                           const uint64_t* strides, const unsigned* box, const unsigned*, int interleave, int swizzle,
                           int promotion, int fill) {
  FAIL(cuTensorMapEncodeTiled);
  uint64_t fields[16] = {reinterpret_cast<uint64_t>(data),
                         uint64_t(type),
                         rank,
                         sizes[0],
                         sizes[1],
                         sizes[2],
                         strides[0],
                         strides[1],
                         box[0],
                         box[1],
                         box[2],
                         uint64_t(interleave),
                         uint64_t(swizzle),
                         uint64_t(promotion),
                         uint64_t(fill)};
  std::memcpy(map, fields, sizeof(fields));
  return 0;
}

}  // extern "C"
