// The part of DLPack's exchange protocol that reads a Python tensor in about 10 ns. Types are declared as dlpack.h 1.3
// lays them out, which PyTorch ships; a test compares them.
#pragma once

#include <cstdint>

namespace mpk::dlpack {

inline constexpr int kCpu = 1, kCuda = 2;
inline constexpr unsigned kMajorVersion = 1;

struct Device {
  int type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

inline constexpr int kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6;

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  const int64_t* shape;
  const int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct ExchangeApi {
  struct {
    uint32_t major, minor;
  } version;
  const void* earlier;
  void* allocate;
  void* managed_tensor_from_object;
  void* object_from_managed_tensor;
  int (*tensor_from_object)(void* object, Tensor* out);  // on failure not 0, and a Python error
  int (*current_stream)(int device_type, int32_t device_id, void** out);
};

}  // namespace mpk::dlpack
