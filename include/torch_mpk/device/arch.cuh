// What a kernel is generated for: 8.0 on newer devices too, where one is compiled for its device for a task's own code.
#pragma once

#ifndef MPK_ARCH
#define MPK_ARCH __CUDA_ARCH__
#endif
