// Checks that a struct's members stand where the other side expects them.
#pragma once

// NVRTC cannot check it. It lays out structs as nvcc does, which can.
#ifdef __CUDACC_RTC__
#define MPK_STANDS_AT(type, member, bytes) true
#else
#define MPK_STANDS_AT(type, member, bytes) (__builtin_offsetof(type, member) == (bytes))
#endif
