// The emulator's version of the instructions CUDA C++ has no name for.
#pragma once

#include "torch_mpk/abi.h"

#define MPK_DEVICE inline

namespace mpk::ptx {

inline void mbar_init(uint64_t* bar, uint32_t count) { emulator::barrier_init(bar, count); }
inline void mbar_arrive(uint64_t* bar) { emulator::barrier_arrive(bar, 0); }
inline bool mbar_test(uint64_t* bar, uint32_t parity) {
  if (emulator::barrier_test(bar, parity)) return true;
  emulator::yield();
  return false;
}
inline void mbar_arrive_expect(uint64_t* bar, uint32_t bytes) { emulator::barrier_arrive(bar, bytes); }
inline void bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* bar) { emulator::copy_async(dst, src, bytes, bar); }
inline void copy_async_16(void* dst, const void* src) { emulator::copy_thread(dst, src, 16); }
inline void copy_async_arrive(uint64_t* bar) { emulator::arrive_after_copies(bar); }
inline void fence_mbar_init() {}
inline void fence_proxy_async() {}

template <class T>
T load_acquire_cta(const T* p) {
  emulator::yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
template <class T>
void store_release_cta(T* p, std::type_identity_t<T> v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline uint32_t load_acquire_gpu(const uint32_t* p) { return load_acquire_cta(p); }
inline uint32_t load_relaxed_gpu(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline void add_release_gpu(uint32_t* p, uint32_t v) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }
inline uint32_t fetch_add_relaxed_gpu(uint32_t* p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline uint32_t fetch_inc_acq_rel_gpu(uint32_t* p, uint32_t last) {
  uint32_t old = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  while (!__atomic_compare_exchange_n(p, &old, old >= last ? 0 : old + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
  return old;
}
inline void store_release_sys(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

template <int threads>
bool barrier_or(bool value) {
  return emulator::barrier(threads, value);
}

uint64_t global_time_ns();
inline void prefetch_l2(const void*) {}

}  // namespace mpk::ptx
