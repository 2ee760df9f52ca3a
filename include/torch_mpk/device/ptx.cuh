// Instructions without a name in CUDA C++. Callers of instructions that some generations lack ask device/arch first.
// Fences and tests, which all may use, ask themselves.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "torch_mpk/abi/launch.h"
#include "torch_mpk/device/arch/arch.cuh"
#include "torch_mpk/device/out_of_line.cuh"

#define MPK_DEVICE __device__ __forceinline__

namespace mpk::ptx {

using SharedAddress = uint32_t;
MPK_DEVICE SharedAddress smem_addr(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- mbarrier: the barrier in shared memory on which copies complete

MPK_DEVICE void mbar_init(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(bar)), "r"(count) : "memory");
}

MPK_DEVICE void mbar_arrive(uint64_t* bar) {
  asm volatile("{\n.reg .b64 t;\nmbarrier.arrive.shared::cta.b64 t, [%0];\n}" ::"r"(smem_addr(bar)) : "memory");
}

// Arrives as `arrivals` threads.
template <int arrivals>
MPK_DEVICE void mbar_arrive_as(uint64_t* bar) {
  if constexpr (arrivals == 1)
    mbar_arrive(bar);
  else
    asm volatile("{\n.reg .b64 t;\nmbarrier.arrive.shared::cta.b64 t, [%0], %1;\n}" ::"r"(smem_addr(bar)), "n"(arrivals)
                 : "memory");
}

// Whether the phase of this parity is complete. Does not block.
MPK_DEVICE bool mbar_peek(uint64_t* bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(smem_addr(bar)), "r"(parity)
               : "memory");
  return done;
}

// The same, but where there is a copy engine the hardware may suspend the thread for a while first.
MPK_DEVICE bool mbar_test(uint64_t* bar, uint32_t parity) {
  if constexpr (!arch::kHasBulkCopies) return mbar_peek(bar, parity);
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(smem_addr(bar)), "r"(parity)
               : "memory");
  return done;
}

// ---- the copy engine

MPK_DEVICE void mbar_arrive_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(bar)), "r"(bytes) : "memory");
}

// L2 policies as createpolicy.fractional makes them: evict_first, and none.
inline constexpr uint64_t kEvictFirst = 0x12f0000000000000, kEvictNormal = 0x1000000000000000;

// Copies contiguous bytes to shared memory; both addresses and the size are multiples of 16. By default they leave L2
// first: a launch reads weights once, and what phases exchange should stay.
MPK_DEVICE void bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* bar, uint64_t hint = kEvictFirst) {
#define MPK_COPY(space)                                                                                               \
  asm volatile("cp.async.bulk." space                                                                                 \
               ".global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(smem_addr(dst)), \
               "l"(src), "r"(bytes), "r"(smem_addr(bar)), "l"(hint)                                                   \
               : "memory")
  if constexpr (arch::kCopiesStayInCta)
    MPK_COPY("shared::cta");
  else
    MPK_COPY("shared::cluster");
#undef MPK_COPY
}

// Copies the box of a map (a CUtensorMap) at these coordinates. Elements outside of the matrix are zero.
MPK_DEVICE void mapped_load(void* dst, const void* map, int column, int row, int block, uint64_t* bar, uint64_t hint) {
#define MPK_COPY(space)                                                                                              \
  asm volatile("cp.async.bulk.tensor.3d." space                                                                      \
               ".global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"( \
                   smem_addr(dst)),                                                                                  \
               "l"(map), "r"(column), "r"(row), "r"(block), "r"(smem_addr(bar)), "l"(hint)                           \
               : "memory")
  if constexpr (arch::kCopiesStayInCta)
    MPK_COPY("shared::cta");
  else
    MPK_COPY("shared::cluster");
#undef MPK_COPY
}

// Copies a box of a matrix, from row `row` and the `block`-th 64 columns on. `hint`: L2 policy.
MPK_DEVICE void box_load(void* dst, const void* map, int row, int block, uint64_t* bar, uint64_t hint = kEvictFirst) {
  mapped_load(dst, map, 0, row, block, bar, hint);
}

// Copies 64 columns of a matrix, swizzled as in a box, from row `row` and column `first` on.
MPK_DEVICE void columns_load(void* dst, const void* map, int row, int first, uint64_t* bar, uint64_t hint) {
  mapped_load(dst, map, first, row, 0, bar, hint);
}

// Copies rows of a matrix without a swizzle, from row `row` and column `column` on.
MPK_DEVICE void rows_load(void* dst, const void* map, int row, int column, uint64_t* bar, uint64_t hint = kEvictFirst) {
  mapped_load(dst, map, column, row, 0, bar, hint);
}

// Prefetches the map itself.
MPK_DEVICE void prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// ---- what threads copy

MPK_DEVICE void copy_async_16(void* dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_addr(dst)), "l"(src) : "memory");
}

// commit_copies groups this thread's copies since the last group. await_copies waits until at most the latest `groups`
// groups are in flight.
MPK_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups>
MPK_DEVICE void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// Arrives at `bar` when this thread's copies so far have landed.
MPK_DEVICE void copy_async_arrive(uint64_t* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_addr(bar)) : "memory");
}

// Makes mbarrier initialisations visible to the copy engine.
MPK_DEVICE void fence_mbar_init() {
  if constexpr (arch::kHasBulkCopies) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders this thread's ordinary accesses with the copy engine's.
MPK_DEVICE void fence_proxy_async() {
  if constexpr (arch::kHasBulkCopies) asm volatile("fence.proxy.async;" ::: "memory");
}

// The same for shared memory alone; it does not wait for accesses to memory.
MPK_DEVICE void fence_proxy_async_shared() {
  if constexpr (arch::kHasBulkCopies) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- words that synchronise

// compute-sanitizer's racecheck reports two accesses to shared memory unless both are atomic, or all threads of the
// first have arrived at a barrier and all of the second have awaited it. So in a kernel compiled for it words that
// synchronise are accessed atomically, and barriers stand beside those that show more than themselves.
#ifndef MPK_RACECHECK
inline constexpr bool kRacecheck = false;

MPK_DEVICE uint32_t load_acquire_cta(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(smem_addr(p)) : "memory");
  return v;
}

MPK_DEVICE uint64_t load_acquire_cta(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.cta.shared::cta.u64 %0, [%1];" : "=l"(v) : "r"(smem_addr(p)) : "memory");
  return v;
}

MPK_DEVICE void store_release_cta(uint32_t* p, uint32_t v) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(smem_addr(p)), "r"(v) : "memory");
}

MPK_DEVICE void store_relaxed_cta(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.cta.shared::cta.u64 [%0], %1;" ::"r"(smem_addr(p)), "l"(v) : "memory");
}

MPK_DEVICE void store_release_cta(uint64_t* p, uint64_t v) {
  asm volatile("st.release.cta.shared::cta.u64 [%0], %1;" ::"r"(smem_addr(p)), "l"(v) : "memory");
}
#else
inline constexpr bool kRacecheck = true;

MPK_DEVICE uint32_t load_acquire_cta(const uint32_t* p) {
  uint32_t v;
  asm volatile("atom.acquire.cta.shared::cta.or.b32 %0, [%1], 0;" : "=r"(v) : "r"(smem_addr(p)) : "memory");
  return v;
}

MPK_DEVICE uint64_t load_acquire_cta(const uint64_t* p) {
  uint64_t v;
  asm volatile("atom.acquire.cta.shared::cta.or.b64 %0, [%1], 0;" : "=l"(v) : "r"(smem_addr(p)) : "memory");
  return v;
}

MPK_DEVICE void store_release_cta(uint32_t* p, uint32_t v) {
  asm volatile("{\n.reg .b32 t;\natom.release.cta.shared::cta.exch.b32 t, [%0], %1;\n}" ::"r"(smem_addr(p)), "r"(v)
               : "memory");
}

MPK_DEVICE void store_release_cta(uint64_t* p, uint64_t v) {
  asm volatile("{\n.reg .b64 t;\natom.release.cta.shared::cta.exch.b64 t, [%0], %1;\n}" ::"r"(smem_addr(p)), "l"(v)
               : "memory");
}

MPK_DEVICE void store_relaxed_cta(uint64_t* p, uint64_t v) { store_release_cta(p, v); }
#endif

// Words that another warp's release publishes.
template <class T>
MPK_DEVICE T load_published(const T* p) {
  if constexpr (kRacecheck)
    return load_acquire_cta(p);
  else
    return *p;
}
template <class T>
MPK_DEVICE void store_published(T* p, T v) {
  if constexpr (kRacecheck)
    store_release_cta(p, v);
  else
    *p = v;
}

// Prefetches for later readers: of this multiprocessor, or of any.
template <class T>
MPK_DEVICE void prefetch_l1(const T* p) {
  asm volatile("prefetch.global.L1 [%0];" : : "l"(p));
}
template <class T>
MPK_DEVICE void prefetch_l2(const T* p) {
  asm volatile("prefetch.global.L2 [%0];" : : "l"(p));
}

// Loads memory that no launch writes and that is read once. It evicts nothing from L1, and L2 prefetches what follows.
MPK_DEVICE uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// The same of memory that an earlier phase may have written.
MPK_DEVICE uint4 load_made_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

MPK_DEVICE uint32_t load_acquire_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

MPK_DEVICE uint32_t load_relaxed_gpu(const uint16_t* p) {
  uint16_t v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}

MPK_DEVICE uint32_t load_relaxed_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

MPK_DEVICE uint2 load_relaxed_gpu(const uint2* p) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}

MPK_DEVICE uint4 load_relaxed_gpu(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Each half is loaded atomically.
MPK_DEVICE ulonglong2 load_relaxed_gpu(const ulonglong2* p) {
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
  return v;
}

// A store without a branch. The compiler may move other accesses across it, but not across a barrier. Jobs do not read
// what they store this way.
MPK_DEVICE void store_if(bool condition, uint16_t* p, uint16_t v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.global.u16 [%0], %1;\n}" ::"l"(p), "h"(v),
               "r"(uint32_t(condition)));
}

MPK_DEVICE void store_relaxed_gpu(uint16_t* p, uint16_t v) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
}

MPK_DEVICE void store_relaxed_gpu(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

MPK_DEVICE void store_relaxed_gpu(uint2* p, const uint2& v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

MPK_DEVICE void store_relaxed_gpu(uint4* p, const uint4& v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Each half is stored atomically.
MPK_DEVICE void store_relaxed_gpu(ulonglong2* p, const ulonglong2& v) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(v.x), "l"(v.y) : "memory");
}

MPK_DEVICE void add_relaxed_gpu(uint32_t* p, uint32_t v) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

MPK_DEVICE void add_release_gpu(uint32_t* p, uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

MPK_DEVICE uint32_t fetch_add_relaxed_gpu(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

// Counts 0, 1, ..., last, 0, ...; returns the value before.
MPK_DEVICE uint32_t fetch_inc_acq_rel_gpu(uint32_t* p, uint32_t last) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(last) : "memory");
  return old;
}

// Between GPUs. Each half is loaded, or stored, atomically.
MPK_DEVICE ulonglong2 load_relaxed_sys(const ulonglong2* p) {
  ulonglong2 v;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
  return v;
}
MPK_DEVICE uint32_t load_relaxed_sys(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
MPK_DEVICE void store_relaxed_sys(ulonglong2* p, const ulonglong2& v) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(v.x), "l"(v.y) : "memory");
}
MPK_DEVICE void store_relaxed_sys(uint32_t* p, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

MPK_DEVICE void store_release_sys(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// ---- tensor cores: D = A B + D with A[16][16], B[16][8], D[16][8], of bf16 or fp16, summed in fp32

struct Pair {
  uint32_t v[2];
};
struct Quad {
  uint32_t v[4];
};

template <class T>
MPK_DEVICE void mma(float (&d)[4], Quad a, Pair b);
template <>
MPK_DEVICE void mma<__nv_bfloat16>(float (&d)[4], Quad a, Pair b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b.v[0]), "r"(b.v[1]));
}
template <>
MPK_DEVICE void mma<__half>(float (&d)[4], Quad a, Pair b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b.v[0]), "r"(b.v[1]));
}

// Converts two e4m3 numbers to float16, exactly, the lower byte to the lower half; and two floats to e4m3, saturating.
MPK_DEVICE uint32_t halves_of_e4m3(uint16_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
}
MPK_DEVICE uint16_t e4m3_of(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
// a * b + c of two halves each, rounded once.
MPK_DEVICE __half2 fma_halves(__half2 a, __half2 b, __half2 c) { return __hfma2(a, b, c); }
// Four bytes of a word and of another, chosen by the nibbles of `which`.
MPK_DEVICE uint32_t choose_bytes(uint32_t a, uint32_t b, uint32_t which) { return __byte_perm(a, b, which); }

// (word & mask) ^ flips, as one instruction. The compiler makes it two where both are constants.
MPK_DEVICE uint32_t mask_and_flip(uint32_t word, uint32_t mask, uint32_t flips) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(word), "r"(mask), "r"(flips));
  return result;
}

// Two neighbouring numbers of T at a time, each result rounded once: a - b, a * b, a * b + c.
template <class T>
MPK_DEVICE uint32_t subtract_pairs(uint32_t a, uint32_t b);
template <class T>
MPK_DEVICE uint32_t multiply_pairs(uint32_t a, uint32_t b);
template <class T>
MPK_DEVICE uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c);
#define MPK_PAIRS(T, type)                                                     \
  template <>                                                                  \
  MPK_DEVICE uint32_t subtract_pairs<T>(uint32_t a, uint32_t b) {              \
    uint32_t d;                                                                \
    asm("sub.rn." type " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));             \
    return d;                                                                  \
  }                                                                            \
  template <>                                                                  \
  MPK_DEVICE uint32_t multiply_pairs<T>(uint32_t a, uint32_t b) {              \
    uint32_t d;                                                                \
    asm("mul.rn." type " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));             \
    return d;                                                                  \
  }                                                                            \
  template <>                                                                  \
  MPK_DEVICE uint32_t fma_pairs<T>(uint32_t a, uint32_t b, uint32_t c) {       \
    uint32_t d;                                                                \
    asm("fma.rn." type " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); \
    return d;                                                                  \
  }
MPK_PAIRS(__nv_bfloat16, "bf16x2")
MPK_PAIRS(__half, "f16x2")
#undef MPK_PAIRS

// Loads a byte, two, or four, from shared memory.
MPK_DEVICE uint32_t load_shared_8(SharedAddress from) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
MPK_DEVICE uint32_t load_shared_16(SharedAddress from) {
  uint32_t v;
  asm volatile("{\n.reg .u16 t;\nld.shared.u16 t, [%1];\ncvt.u32.u16 %0, t;\n}" : "=r"(v) : "r"(from) : "memory");
  return v;
}
MPK_DEVICE uint32_t load_shared_32(SharedAddress from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

// Loads four 8 x 8 matrices of 16-bit elements from shared memory; each lane gets two elements of each. Lane 8 i + r
// gives the address of row r of matrix i, 16 bytes.
MPK_DEVICE Quad load_matrices(SharedAddress row) {
  Quad m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m.v[0]), "=r"(m.v[1]), "=r"(m.v[2]), "=r"(m.v[3])
               : "r"(row)
               : "memory");
  return m;
}

// The same, each transposed.
MPK_DEVICE Quad load_matrices_transposed(SharedAddress row) {
  Quad m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m.v[0]), "=r"(m.v[1]), "=r"(m.v[2]), "=r"(m.v[3])
               : "r"(row)
               : "memory");
  return m;
}

// Transposes an 8 x 8 matrix of 16-bit elements, two of a row in each lane.
MPK_DEVICE uint32_t transpose(uint32_t v) {
  uint32_t t;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
  return t;
}

// The lower (upper) 16 bits of both words, a's first.
MPK_DEVICE uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
MPK_DEVICE uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

// ---- the rest

// Sets the registers of each thread of this warpgroup, called by all its warps: fewer, or more once other warpgroups
// have released theirs. A multiple of 8.
template <int registers>
MPK_DEVICE void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
MPK_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// Barrier 1 among `threads` threads. True for all if `value` is true for any.
template <int threads>
MPK_DEVICE bool barrier_or(bool value) {
  uint32_t any;
  __syncwarp();
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 q, %1, 0;\nbarrier.cta.red.or.aligned.pred p, 1, %2, q;\nselp.u32 %0, 1, 0, "
      "p;\n}"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(value)), "n"(threads)
      : "memory");
  return any;
}

// A barrier among `threads` threads, whole warps. Barriers 0 and 1 have other uses.
template <int threads>
MPK_DEVICE void barrier(int number) {
  __syncwarp();
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(number), "n"(threads) : "memory");
}

// 2^x to a millionth; what would be subnormal is 0.
MPK_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The compiler moves no access across it.
MPK_DEVICE void compiler_fence() { asm volatile("" ::: "memory"); }

MPK_DEVICE uint64_t global_time_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// The watchdog's clock. The emulator's differs from the global one.
MPK_DEVICE uint64_t watched_time_ns() { return global_time_ns(); }

// threadIdx.x, read anew, so that values computed from it hold no registers from one job to the next.
MPK_DEVICE int thread_index() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}

MPK_DEVICE uint32_t clock() {
  uint32_t t;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");
  return t;
}

}  // namespace mpk::ptx
