// The emulator's version of instructions without a name in CUDA C++.
#pragma once

#include "torch_mpk/abi/launch.h"

#define MPK_DEVICE inline

namespace mpk::ptx {

using SharedAddress = uintptr_t;
inline SharedAddress smem_addr(const void* p) { return reinterpret_cast<SharedAddress>(p); }

inline void mbar_init(uint64_t* bar, uint32_t count) { emulator::barrier_init(bar, count); }
inline void mbar_arrive(uint64_t* bar) { emulator::barrier_arrive(bar, 0); }
template <int arrivals>
void mbar_arrive_as(uint64_t* bar) {
  for (int i = 0; i < arrivals; i++) mbar_arrive(bar);
}
inline bool mbar_test(uint64_t* bar, uint32_t parity) {
  if (emulator::barrier_test(bar, parity)) return true;
  emulator::yield();
  return false;
}
inline bool mbar_peek(uint64_t* bar, uint32_t parity) { return mbar_test(bar, parity); }
inline void mbar_arrive_expect(uint64_t* bar, uint32_t bytes) { emulator::barrier_arrive(bar, bytes); }
inline constexpr uint64_t kEvictFirst = 0, kEvictNormal = 0;
inline void bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* bar, uint64_t = kEvictFirst) {
  emulator::copy_async(dst, src, bytes, bar);
}
// The emulator's tensor maps, see EmulatedKernel.
struct MatrixMap {
  const uint8_t* data;
  uint64_t rows, columns, pitch;
  uint32_t box_rows, box_blocks;  // of 64 columns; for a plain map, columns
};
inline void columns_load(void* dst, const void* map, int row, int first, uint64_t* bar, uint64_t = kEvictFirst) {
  emulator::require_aligned_to(dst, 1024);
  const MatrixMap& m = *static_cast<const MatrixMap*>(map);
  for (uint32_t b = 0; b < m.box_blocks; b++)
    for (uint32_t r = 0; r < m.box_rows; r++)
      for (uint32_t access = 0; access < 8; access++) {
        alignas(16) static const uint8_t zero[16] = {};
        const uint64_t from_row = row + r, column = uint64_t(first) + b * 64 + access * 8;
        const bool is_in = from_row < m.rows && column < m.columns;
        // The swizzle follows addresses, not rows, which is the same only in boxes of a multiple of eight rows.
        const uint32_t line = b * m.box_rows + r;
        uint8_t* to = static_cast<uint8_t*>(dst) + line * 128 + (access ^ line % 8) * 16;
        emulator::copy_async(to, is_in ? m.data + from_row * m.pitch + column * 2 : zero, 16, bar);
      }
}
inline void box_load(void* dst, const void* map, int row, int block, uint64_t* bar, uint64_t hint = kEvictFirst) {
  columns_load(dst, map, row, block * 64, bar, hint);
}
inline void prefetch_map(const void*) {}
inline void rows_load(void* dst, const void* map, int row, int column, uint64_t* bar, uint64_t = kEvictFirst) {
  emulator::require_aligned_to(dst, 128);
  const MatrixMap& m = *static_cast<const MatrixMap*>(map);
  for (uint32_t r = 0; r < m.box_rows; r++)
    for (uint32_t c = 0; c < m.box_blocks; c += 8) {
      alignas(16) static const uint8_t zero[16] = {};
      const uint64_t from_row = uint64_t(row) + r, from_column = uint64_t(column) + c;
      const bool is_in = from_row < m.rows && from_column < m.columns;
      uint8_t* to = static_cast<uint8_t*>(dst) + (r * m.box_blocks + c) * 2;
      emulator::copy_async(to, is_in ? m.data + from_row * m.pitch + from_column * 2 : zero, 16, bar);
    }
}
inline void copy_async_16(void* dst, const void* src) { emulator::copy_thread(dst, src, 16); }
inline void commit_copies() { emulator::commit_copies(); }
template <int groups>
void await_copies() {
  emulator::await_copies(groups);
}
inline void copy_async_arrive(uint64_t* bar) { emulator::arrive_after_copies(bar); }
inline void fence_mbar_init() {}
inline void fence_proxy_async() {}
inline void fence_proxy_async_shared() {}

template <class T>
T load_acquire_cta(const T* p) {
  emulator::yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
template <class T>
void store_release_cta(T* p, std::type_identity_t<T> v) {
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline void store_relaxed_cta(uint64_t* p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
template <class T>
T load_published(const T* p) {
  return *p;
}
template <class T>
void store_published(T* p, T v) {
  *p = v;
}
#ifdef MPK_RACECHECK
inline constexpr bool kRacecheck = true;
#else
inline constexpr bool kRacecheck = false;
#endif
inline uint32_t load_acquire_gpu(const uint32_t* p) { return load_acquire_cta(p); }
// The stored units of a vector arrive separately.
template <class T>
T load_relaxed_unit(const T* p) {
  emulator::yield();
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline uint32_t load_relaxed_gpu(const uint16_t* p) { return load_relaxed_unit(p); }
inline uint32_t load_relaxed_gpu(const uint32_t* p) { return load_relaxed_unit(p); }
inline uint2 load_relaxed_gpu(const uint2* p) { return {load_relaxed_unit(&p->x), load_relaxed_unit(&p->y)}; }
inline uint4 load_relaxed_gpu(const uint4* p) {
  emulator::require_aligned(p);
  return {load_relaxed_unit(&p->x), load_relaxed_unit(&p->y), load_relaxed_unit(&p->z), load_relaxed_unit(&p->w)};
}
inline ulonglong2 load_relaxed_gpu(const ulonglong2* p) {
  emulator::require_aligned(p);
  return {load_relaxed_unit(&p->x), load_relaxed_unit(&p->y)};
}
inline uint4 load_once(const uint4* p) {
  emulator::require_aligned(p);
  return *p;
}
inline uint4 load_made_once(const uint4* p) {
  emulator::require_aligned(p);
  return *p;
}
inline void store_if(bool condition, uint16_t* p, uint16_t v) {
  if (condition) *p = v;
}
inline void store_relaxed_gpu(uint16_t* p, uint16_t v) {
  if (!emulator::at_fault(p)) __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
inline void store_relaxed_gpu(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
inline void store_relaxed_gpu(uint2* p, const uint2& v) {
  store_relaxed_gpu(&p->x, v.x);
  store_relaxed_gpu(&p->y, v.y);
}
inline void store_relaxed_gpu(uint4* p, const uint4& v) {
  emulator::require_aligned(p);
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; i++) store_relaxed_gpu(&p->x + i, words[i]);
}
inline void store_relaxed_gpu(ulonglong2* p, const ulonglong2& v) {
  emulator::require_aligned(p);
  if (emulator::at_fault(p)) return;
  __atomic_store_n(&p->x, v.x, __ATOMIC_RELAXED);
  __atomic_store_n(&p->y, v.y, __ATOMIC_RELAXED);
}
inline void add_relaxed_gpu(uint32_t* p, uint32_t v) {
  if (!emulator::at_fault(p)) __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
inline void add_release_gpu(uint32_t* p, uint32_t v) {
  if (!emulator::at_fault(p)) __atomic_fetch_add(p, v, __ATOMIC_RELEASE);
}
inline uint32_t fetch_add_relaxed_gpu(uint32_t* p, uint32_t v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
inline uint32_t fetch_inc_acq_rel_gpu(uint32_t* p, uint32_t last) {
  uint32_t old = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  while (!__atomic_compare_exchange_n(p, &old, old >= last ? 0 : old + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
  return old;
}
inline ulonglong2 load_relaxed_sys(const ulonglong2* p) { return load_relaxed_gpu(p); }
inline uint32_t load_relaxed_sys(const uint32_t* p) { return load_relaxed_gpu(p); }
// Each of the two words travels by itself.
inline void store_relaxed_sys(ulonglong2* p, const ulonglong2& v) {
  emulator::require_aligned(p);
  emulator::store_late(reinterpret_cast<uint64_t*>(&p->x), v.x);
  emulator::store_late(reinterpret_cast<uint64_t*>(&p->y), v.y);
}
inline void store_relaxed_sys(uint32_t* p, uint32_t v) { store_relaxed_gpu(p, v); }
inline void store_release_sys(uint32_t* p, uint32_t v) {
  emulator::land_stores();
  __atomic_store_n(p, v, __ATOMIC_RELEASE);
}

template <int threads>
bool barrier_or(bool value) {
  return emulator::barrier(1, threads, value);
}
template <int threads>
void barrier(int number) {
  emulator::barrier(number, threads, false);
}

struct Pair {
  uint32_t v[2];
};
struct Quad {
  uint32_t v[4];
};

template <class T>
T half_of(uint32_t word, int i) {
  const uint16_t bits = static_cast<uint16_t>(word >> (16 * i));
  T v;
  std::memcpy(&v, &bits, 2);
  return v;
}

template <class T>
void mma(float (&d)[4], Quad a, Pair b) {
  const int row = lane_id() / 4, column = lane_id() % 4 * 2;  // the first of two; rows are 8 apart
  Quad as[4];                                                 // of both rows
  Pair bs[2][4];
  emulator::warp_collect(&a, sizeof(a));
  for (int i = 0; i < 4; i++) std::memcpy(&as[i], emulator::warp_value(row * 4 + i), sizeof(a));
  emulator::warp_collect(&b, sizeof(b));
  for (int i = 0; i < 8; i++) std::memcpy(&bs[i / 4][i % 4], emulator::warp_value(column * 4 + i), sizeof(b));
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) {
      const int word = k / 8, lane = k % 8 / 2;
      const T x = half_of<T>(as[lane].v[2 * word + i / 2], k % 2);
      const T y = half_of<T>(bs[i % 2][lane].v[word], k % 2);
      d[i] = std::fma(static_cast<float>(x), static_cast<float>(y), d[i]);
    }
}

// Two neighbouring numbers of T at a time. In double every product is exact, and its sum as good as that.
template <class T, class Function>
uint32_t of_pairs(Function function) {
  uint32_t pair = 0;
  for (int i = 0; i < 2; i++) {
    const T result(static_cast<float>(function(i)));
    uint16_t bits;
    std::memcpy(&bits, &result, 2);
    pair |= uint32_t(bits) << 16 * i;
  }
  return pair;
}
template <class T>
double in_double(uint32_t word, int i) {
  return static_cast<float>(half_of<T>(word, i));
}
template <class T>
uint32_t subtract_pairs(uint32_t a, uint32_t b) {
  return of_pairs<T>([&](int i) { return in_double<T>(a, i) - in_double<T>(b, i); });
}
template <class T>
uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  return of_pairs<T>([&](int i) { return in_double<T>(a, i) * in_double<T>(b, i); });
}
template <class T>
uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
  return of_pairs<T>([&](int i) { return in_double<T>(a, i) * in_double<T>(b, i) + in_double<T>(c, i); });
}

// In float, where the sums are exact that kernels make of halves.
inline __half2 fma_halves(__half2 a, __half2 b, __half2 c) {
  const auto one = [](__half x, __half y, __half z) {
    return __float2half_rn(std::fma(__half2float(x), __half2float(y), __half2float(z)));
  };
  return __halves2half2(one(a.x, b.x, c.x), one(a.y, b.y, c.y));
}
inline float float_of_e4m3(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7f;
  const float value =
      magnitude < 8 ? std::ldexp(float(magnitude), -9) : std::ldexp(float(magnitude % 8 + 8), int(magnitude / 8) - 10);
  return magnitude == 0x7f ? std::nanf("") : bits & 0x80 ? -value : value;
}
inline uint32_t halves_of_e4m3(uint16_t pair) {
  uint32_t halves = 0;
  for (int i = 0; i < 2; i++) {
    const __half half = __float2half_rn(float_of_e4m3(pair >> 8 * i & 0xff));
    uint16_t of_half;
    std::memcpy(&of_half, &half, 2);
    halves |= uint32_t(of_half) << 16 * i;
  }
  return halves;
}
// Tries all numbers; of two equally near ones, takes that of even bits.
inline uint16_t e4m3_of(float low, float high) {
  const auto nearest = [](float v) -> uint16_t {
    if (v != v) return 0x7f;
    uint16_t best = 0;
    float least = std::numeric_limits<float>::infinity();
    for (uint16_t bits = 0; bits < 0x7f; bits++) {
      const float value = bits < 8 ? std::ldexp(float(bits), -9) : std::ldexp(float(bits % 8 + 8), bits / 8 - 10);
      const float apart = std::fabs(std::fmin(std::fabs(v), 448.0f) - value);
      if (apart < least || (apart == least && bits % 2 == 0)) least = apart, best = bits;
    }
    return best | (std::signbit(v) ? 0x80 : 0);
  };
  return static_cast<uint16_t>(nearest(low) | nearest(high) << 8);
}
inline uint32_t mask_and_flip(uint32_t word, uint32_t mask, uint32_t flips) { return (word & mask) ^ flips; }
inline uint32_t choose_bytes(uint32_t a, uint32_t b, uint32_t which) {
  const uint64_t bytes = a | uint64_t(b) << 32;
  uint32_t chosen = 0;
  for (int i = 0; i < 4; i++) chosen |= uint32_t(bytes >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
  return chosen;
}

inline uint32_t load_shared_8(SharedAddress from) { return *reinterpret_cast<const uint8_t*>(from); }
inline uint32_t load_shared_32(SharedAddress from) { return *reinterpret_cast<const uint32_t*>(from); }
inline uint32_t load_shared_16(SharedAddress from) {
  uint16_t v;
  std::memcpy(&v, reinterpret_cast<const void*>(from), 2);
  return v;
}
inline Quad load_matrices(SharedAddress row) {
  emulator::warp_collect(&row, sizeof(row));
  Quad m;
  for (int i = 0; i < 4; i++) {
    SharedAddress from;
    std::memcpy(&from, emulator::warp_value(8 * i + lane_id() / 4), sizeof(from));
    emulator::require_aligned(reinterpret_cast<const void*>(from));
    std::memcpy(&m.v[i], reinterpret_cast<const uint8_t*>(from) + lane_id() % 4 * 4, 4);
  }
  return m;
}

inline Quad load_matrices_transposed(SharedAddress row) {
  emulator::warp_collect(&row, sizeof(row));
  Quad m;
  for (int i = 0; i < 4; i++) {
    uint16_t halves[2];
    for (int j = 0; j < 2; j++) {
      SharedAddress from;
      std::memcpy(&from, emulator::warp_value(8 * i + lane_id() % 4 * 2 + j), sizeof(from));
      emulator::require_aligned(reinterpret_cast<const void*>(from));
      std::memcpy(&halves[j], reinterpret_cast<const uint8_t*>(from) + lane_id() / 4 * 2, 2);
    }
    m.v[i] = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
  }
  return m;
}

template <int registers>
void give_up_registers() {}
template <int registers>
void take_registers() {}

inline uint32_t transpose(uint32_t v) {
  emulator::warp_collect(&v, sizeof(v));
  uint16_t halves[2];
  for (int i = 0; i < 2; i++) {
    const int row = lane_id() % 4 * 2 + i, column = lane_id() / 4;
    std::memcpy(&halves[i], static_cast<const uint8_t*>(emulator::warp_value(4 * row + column / 2)) + column % 2 * 2,
                2);
  }
  return halves[0] | static_cast<uint32_t>(halves[1]) << 16;
}

inline uint32_t low_halves(uint32_t a, uint32_t b) { return (a & 0xffff) | b << 16; }
inline uint32_t high_halves(uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000); }

inline float exp2(float x) { return std::exp2(x); }

template <class T>
void prefetch_l1(const T*) {}
template <class T>
void prefetch_l2(const T*) {}
inline int thread_index() { return threadIdx.x; }
inline void compiler_fence() {}
uint64_t global_time_ns();
// How long this CTA has run. A busy machine may stop it for seconds, and it is not stuck.
uint64_t watched_time_ns();
// As on a GPU, the clocks of multiprocessors differ.
inline uint32_t clock() { return static_cast<uint32_t>(2 * global_time_ns() + 1000000007ull * blockIdx.x); }

}  // namespace mpk::ptx
