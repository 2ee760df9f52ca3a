// Runs generated kernels on the CPU: every CUDA thread a fiber, every CTA an OS thread.
//
// Included before everything else. It supplies CUDA C++'s built-ins; torch_mpk/device/ptx.cuh beside it replaces the
// file of that name. Bulk copies land late and in random order. Until then the target holds NaN, so that code that does
// not wait for them fails. Words for other GPUs land late and in random order, too. Products of warpgroups are made
// when they are awaited, and their sums are NaN until then.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#define __CUDA_ARCH__ EMULATED_ARCH
#undef __shared__
#define __shared__ __thread
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __noinline__
#define __noinline__
#define __builtin_assume(condition)

#define EMULATOR_EXPORT __attribute__((visibility("default")))

namespace emulator {

// A kernel, called by each of its threads with the address of its parameter.
using Kernel = void (*)(const void* block);
template <class Block, void (*kernel)(Block)>
void call(const void* block) {
  kernel(*static_cast<const Block*>(block));
}
extern const Kernel kernels[];

// The order in which the threads of a warp, and the warps of a CTA, run to their next wait. In one of these orders, a
// missing barrier lets a thread read too early.
enum class Order { kForward, kReverse, kShuffled };

// The compiler's sanitizer checks the processor's own accesses.
inline void require_aligned_to(const void* p, unsigned bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes != 0) abort();
}
inline void require_aligned(const void* p) { require_aligned_to(p, 16); }
void yield();                                        // lets the other fibers of the CTA run
void warp_collect(const void* value, size_t bytes);  // blocks until all lanes of the warp have called it
const void* warp_value(int lane);                    // that lane's value; valid until the next call
// Barrier `number` of the CTA, among `threads` threads, or all if that is 0. Returns the OR of the values.
bool barrier(int number, int threads, bool value);
void barrier_init(uint64_t* bar, uint32_t count);
void barrier_arrive(uint64_t* bar, uint32_t expected_bytes);
bool barrier_test(uint64_t* bar, uint32_t parity);
void copy_async(void* dst, const void* src, uint32_t bytes, uint64_t* bar);  // completes `bytes` on `bar`
void copy_thread(void* dst, const void* src, uint32_t bytes);                // belongs to the calling thread
void commit_copies();
void await_copies(size_t groups);
void arrive_after_copies(uint64_t* bar);
// Products of the calling thread that `multiply` adds to `count` sums: groups of them, as `wgmma` has them.
void start_product(float* sums, int count, std::function<void()> multiply);
void commit_products();
void await_products(size_t groups);
void store_late(uint64_t* p, uint64_t v);  // for another GPU
void land_stores();                        // all, before later stores
bool at_fault(const void* p);  // whether the signal or result about to be stored there is lost; may be late, too

template <class T>
T exchange(T v, int lane) {
  warp_collect(&v, sizeof(v));
  T other;
  std::memcpy(&other, warp_value(lane), sizeof(other));
  return other;
}

}  // namespace emulator

extern __thread uint3 threadIdx, blockIdx;

inline int lane_id() { return threadIdx.x % 32; }
template <class T>
T __shfl_xor_sync(unsigned, T v, int o) {
  return emulator::exchange(v, lane_id() ^ o);
}
template <class T>
T __shfl_sync(unsigned, T v, int lane) {
  return emulator::exchange(v, lane);
}
template <class T>
T __shfl_up_sync(unsigned, T v, unsigned o) {
  return emulator::exchange(v, lane_id() < int(o) ? lane_id() : lane_id() - int(o));
}
template <class T>
T __shfl_down_sync(unsigned, T v, unsigned o) {
  return emulator::exchange(v, lane_id() + int(o) < 32 ? lane_id() + int(o) : lane_id());
}
inline bool __any_sync(unsigned, bool v) {
  emulator::warp_collect(&v, sizeof(v));
  bool any = false;
  for (int i = 0; i < 32; i++) any |= *static_cast<const bool*>(emulator::warp_value(i));
  return any;
}
inline unsigned __ballot_sync(unsigned, bool v) {
  emulator::warp_collect(&v, sizeof(v));
  unsigned votes = 0;
  for (int i = 0; i < 32; i++) votes |= unsigned(*static_cast<const bool*>(emulator::warp_value(i))) << i;
  return votes;
}
inline unsigned __reduce_or_sync(unsigned, unsigned v) {
  emulator::warp_collect(&v, sizeof(v));
  unsigned any = 0;
  for (int i = 0; i < 32; i++) any |= *static_cast<const unsigned*>(emulator::warp_value(i));
  return any;
}
inline int __ffs(int v) { return __builtin_ffs(v); }
inline bool __all_sync(unsigned mask, bool v) { return !__any_sync(mask, !v); }
inline void __syncwarp(unsigned = ~0u) { emulator::warp_collect(nullptr, 0); }
inline bool __syncthreads_or(bool v) { return emulator::barrier(0, 0, v); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() {
  emulator::land_stores();
  __threadfence();
}
inline void __nanosleep(unsigned ns) {
  for (unsigned i = 0; i < ns / 256; i++) emulator::yield();
}
inline unsigned atomicAdd(unsigned* p, unsigned v) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
template <class F>
unsigned atomic_update(unsigned* p, F next) {
  unsigned old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n(p, &old, next(old), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}
inline unsigned atomicMax(unsigned* p, unsigned v) {
  return atomic_update(p, [&](unsigned old) { return old > v ? old : v; });
}
inline unsigned atomicMin(unsigned* p, unsigned v) {
  return atomic_update(p, [&](unsigned old) { return old < v ? old : v; });
}
inline unsigned atomicExch(unsigned* p, unsigned v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* p, std::type_identity_t<T> v) {
  *p = v;
}
template <class T>
void __stcs(T* p, std::type_identity_t<T> v) {
  *p = v;
}
inline float __int_as_float(int v) {
  float f;
  std::memcpy(&f, &v, 4);
  return f;
}
inline unsigned __float_as_uint(float v) {
  unsigned u;
  std::memcpy(&u, &v, 4);
  return u;
}
inline float __uint_as_float(unsigned v) { return __int_as_float(static_cast<int>(v)); }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
}
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __logf(float v) { return std::log(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  return a < b ? a : b;
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  return a > b ? a : b;
}
