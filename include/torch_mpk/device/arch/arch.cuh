// The features of the GPU generation that a kernel is generated for. No other device code looks at the architecture's
// number. It asks for features by name, as csrc/arch does on the host.
//
// MPK_ARCH overrides the generation: for a task's own code, or for a test that compiles for another device.
#pragma once

#ifndef MPK_ARCH
#define MPK_ARCH __CUDA_ARCH__
#endif

#if MPK_ARCH >= 1200
#include "torch_mpk/device/arch/sm120.cuh"
#elif MPK_ARCH >= 1000
#include "torch_mpk/device/arch/sm100.cuh"
#elif MPK_ARCH >= 900
#include "torch_mpk/device/arch/sm90.cuh"
#else
#include "torch_mpk/device/arch/sm80.cuh"
#endif
