// What a kernel is generated for. One for 8.0 is compiled for its device where a task has code for that alone, and says so.
#pragma once

#ifndef MPK_ARCH
#define MPK_ARCH __CUDA_ARCH__
#endif
