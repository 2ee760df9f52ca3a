// Included in front of every CUDA kernel of torch_mpk.jit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "torch_mpk/device/arch/arch.cuh"
#include "torch_mpk/jit/parameters.h"

namespace mpk {

using fp16_t = __half;
using bf16_t = __nv_bfloat16;

inline constexpr int kWarpThreads = 32;
inline constexpr unsigned kFullMask = 0xffffffff;

template <class A, class B>
__host__ __device__ constexpr auto cdiv(A a, B b) {
  return (a + b - 1) / b;
}

// For kernels launched with pdl=True. Nothing that the previous kernel writes may be read before pdl_wait().
__device__ inline void pdl_wait() {
  if constexpr (arch::kOverlapsLaunches) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel of the stream start.
__device__ inline void pdl_launch() {
  if constexpr (arch::kOverlapsLaunches) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace mpk
