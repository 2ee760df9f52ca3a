// Compiled, never run: what torch_mpk/runtime/driver.h declares by hand is what cuda.h says.
#define __CUDA_API_VERSION_INTERNAL  // declares every version of a function, as the driver exports them
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "torch_mpk/runtime/driver.h"

namespace cu = mpk::cu;

// Two parameter types are passed alike when both are pointers, or both are integers of one size.
template <class A, class B>
constexpr bool same_parameter =
    (std::is_pointer_v<A> && std::is_pointer_v<B>) ||
    (!std::is_pointer_v<A> && !std::is_pointer_v<B> && sizeof(A) == sizeof(B) &&
     (std::is_integral_v<A> || std::is_enum_v<A>) && (std::is_integral_v<B> || std::is_enum_v<B>));

template <class F, class G>
struct SameSignature : std::false_type {};

template <class... A, class... B>
  requires(sizeof...(A) == sizeof...(B))
struct SameSignature<cu::Result (*)(A...), CUresult (*)(B...)> : std::bool_constant<(same_parameter<A, B> && ...)> {};

#define X(member, symbol, parameters) \
  static_assert(SameSignature<decltype(cu::Driver::member), decltype(&symbol)>::value, #symbol);
MPK_CUDA_DRIVER_FUNCTIONS(X)
#undef X
static_assert(SameSignature<decltype(cu::Driver::func_load), decltype(&cuFuncLoad)>::value);
static_assert(SameSignature<decltype(cu::Driver::func_get_param_info), decltype(&cuFuncGetParamInfo)>::value);

static_assert(sizeof(cu::TensorMap) == sizeof(CUtensorMap) && alignof(cu::TensorMap) == alignof(CUtensorMap));
static_assert(cu::kTensorMapUint16 == CU_TENSOR_MAP_DATA_TYPE_UINT16);
static_assert(cu::kTensorMapPlain == CU_TENSOR_MAP_SWIZZLE_NONE);
static_assert(cu::kTensorMapSwizzle128 == CU_TENSOR_MAP_SWIZZLE_128B);
static_assert(cu::kTensorMapPromotion256 == CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
static_assert(sizeof(cu::LaunchConfig) == sizeof(CUlaunchConfig));
static_assert(offsetof(cu::LaunchConfig, grid) == offsetof(CUlaunchConfig, gridDimX));
static_assert(offsetof(cu::LaunchConfig, block) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(cu::LaunchConfig, shared_bytes) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(cu::LaunchConfig, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(cu::LaunchConfig, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(cu::LaunchConfig, num_attributes) == offsetof(CUlaunchConfig, numAttrs));
static_assert(sizeof(cu::LaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(cu::LaunchAttribute, id) == offsetof(CUlaunchAttribute, id));
static_assert(offsetof(cu::LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));

static_assert(cu::kErrorOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(cu::kErrorNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(cu::kErrorNoBinaryForGpu == CUDA_ERROR_NO_BINARY_FOR_GPU);
static_assert(cu::kErrorCooperativeLaunchTooLarge == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
static_assert(cu::kErrorUnsupportedPtxVersion == CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
static_assert(cu::kAttributeMultiprocessorCount == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(cu::kAttributeComputeCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(cu::kAttributeComputeCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(cu::kAttributeMaxSharedMemoryPerBlockOptin == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
static_assert(cu::kFuncAttributeSharedSizeBytes == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
static_assert(cu::kFuncAttributeNumRegs == CU_FUNC_ATTRIBUTE_NUM_REGS);
static_assert(cu::kFuncAttributeMaxDynamicSharedSizeBytes == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(cu::kFuncAttributeNonPortableClusterSizeAllowed == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
static_assert(cu::kJitErrorLogBuffer == CU_JIT_ERROR_LOG_BUFFER);
static_assert(cu::kJitErrorLogBufferSizeBytes == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES);
static_assert(cu::kHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(cu::kHostAllocDeviceMap == CU_MEMHOSTALLOC_DEVICEMAP);
static_assert(cu::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(cu::kCaptureStatusNone == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(cu::kCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(cu::kUserObjectNoDestructorSync == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
static_assert(cu::kGraphUserObjectMove == CU_GRAPH_USER_OBJECT_MOVE);
static_assert(cu::kLaunchAttributeCooperative == CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
static_assert(cu::kLaunchAttributeClusterDimension == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(cu::kLaunchAttributeProgrammaticStreamSerialization ==
              CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(offsetof(CUlaunchAttributeValue, clusterDim.x) == 0 && sizeof(CUlaunchAttributeValue::clusterDim) == 12);
static_assert(offsetof(CUlaunchAttributeValue, programmaticStreamSerializationAllowed) == 0);
