// Compiled, never run: what torch_mpk/jit/dlpack.h declares by hand is what PyTorch's dlpack.h says.
#include <ATen/dlpack.h>

#include <cstddef>

#include "torch_mpk/jit/dlpack.h"

namespace ours = mpk::dlpack;

static_assert(DLPACK_MAJOR_VERSION == ours::kMajorVersion);
static_assert(kDLCPU == ours::kCpu && kDLCUDA == ours::kCuda);
static_assert(kDLInt == ours::kInt && kDLUInt == ours::kUInt && kDLFloat == ours::kFloat);
static_assert(kDLBfloat == ours::kBfloat && kDLBool == ours::kBool);

#define SAME(field, theirs) \
  static_assert(offsetof(ours::Tensor, field) == offsetof(DLTensor, theirs), "DLTensor::" #theirs)
SAME(data, data);
SAME(device, device);
SAME(ndim, ndim);
SAME(dtype, dtype);
SAME(shape, shape);
SAME(strides, strides);
SAME(byte_offset, byte_offset);
static_assert(sizeof(ours::Tensor) == sizeof(DLTensor));
static_assert(sizeof(ours::Device) == sizeof(DLDevice) && offsetof(ours::Device, id) == offsetof(DLDevice, device_id));
static_assert(sizeof(ours::DataType) == sizeof(DLDataType) &&
              offsetof(ours::DataType, lanes) == offsetof(DLDataType, lanes));

#undef SAME
#define SAME(field, theirs) \
  static_assert(offsetof(ours::ExchangeApi, field) == offsetof(DLPackExchangeAPI, theirs), #theirs)
SAME(version, header.version);
SAME(earlier, header.prev_api);
SAME(tensor_from_object, dltensor_from_py_object_no_sync);
SAME(current_stream, current_work_stream);
static_assert(sizeof(ours::ExchangeApi) == sizeof(DLPackExchangeAPI));
