// What the generation of GPUs has that a kernel is generated for. Here alone device code looks at its number; the rest
// asks for what it needs, by name, as csrc/arch has it for the host.
//
// A kernel that is compiled for a device of another generation, for a task's own code or for a test, defines MPK_ARCH.
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
