// Included behind emulator.h. Linked with the file that has the kernels and their table.
#include <sched.h>
#include <setjmp.h>
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "torch_mpk/device/ptx.cuh"

__thread uint3 threadIdx, blockIdx;

// Faults of launches, set by tests: a signal or result that a CTA stores is lost or late, or a copy from there is late.
extern "C" {
EMULATOR_EXPORT struct {
  const void* place;   // its place; null: no fault
  uint32_t cta;        // all ones: any
  uint32_t is_late;    // late until another CTA has aborted; otherwise lost
  uint32_t queued_ms;  // how long the CTA waits for a multiprocessor
} emulated_fault = {};
}

namespace mpk {
alignas(1024) __thread uint8_t smem[232448];
}

namespace emulator {
namespace {

constexpr size_t kStackBytes = 64 << 10;

struct Warp {
  int arrived = 0;
  uint32_t generation = 0;
  alignas(16) uint8_t values[2][32][16];
};

struct Fiber {
  ucontext_t start;
  jmp_buf here;
  std::unique_ptr<uint8_t[]> stack{new uint8_t[kStackBytes]};
  bool started = false, done = false;
  const uint32_t* generation = nullptr;  // of the lanes or threads that it waits for, if it does
  uint32_t left = 0;                     // the generation after which it goes on
  uint32_t collected = 0;                // generation of its last warp_collect
  std::vector<struct Copy> copies;
  std::vector<size_t> groups;  // where each group ends in the list
  std::vector<struct Product> products;
  std::vector<size_t> product_groups;

  bool can_run() const { return !done && (generation == nullptr || *generation != left); }
};

struct Copy {
  void* dst;
  const void* src;
  std::vector<uint8_t> data;
  uint64_t* bar;
};

struct Product {
  float* sums;
  std::vector<float> before;  // what the first product in flight adds to; empty for others
  std::function<void()> multiply;
};

struct Store {
  uint64_t* to;
  uint64_t value;
};

struct Launch {
  Kernel kernel;
  const void* block;
  int num_threads;
  Order order;
  uint32_t seed;
};

struct Cta {
  const Launch& launch;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  int num_running;
  jmp_buf scheduler;
  std::vector<Copy> in_flight;
  std::vector<Store> stores;  // for other GPUs, the oldest first
  std::mt19937 random;
  struct {
    int arrived = 0;
    uint32_t generation = 0;
    bool any = false, result = false;
  } barriers[16];
};
thread_local Cta* cta;

// A barrier in its 64 bits: phase, arrivals still expected, arrivals of a phase, bytes outstanding.
struct Bits {
  uint64_t phase : 1, pending : 12, count : 12, : 7;
  int64_t bytes : 32;
};
Bits* bits(uint64_t* bar) { return reinterpret_cast<Bits*>(bar); }
void settle(uint64_t* bar) {
  Bits& b = *bits(bar);
  if (b.pending != 0 || b.bytes != 0) return;
  b.phase ^= 1;
  b.pending = b.count;
}

void enter() {
  cta->launch.kernel(cta->launch.block);
  cta->fibers[threadIdx.x].done = true;
  cta->num_running--;
  _longjmp(cta->scheduler, 1);
}

void resume(int thread) {
  Fiber& f = cta->fibers[thread];
  threadIdx = {static_cast<unsigned>(thread), 0, 0};
  if (_setjmp(cta->scheduler) != 0) return;
  if (f.started) _longjmp(f.here, 1);
  f.started = true;
  getcontext(&f.start);
  f.start.uc_stack.ss_sp = f.stack.get();
  f.start.uc_stack.ss_size = kStackBytes;
  f.start.uc_link = nullptr;
  makecontext(&f.start, enter, 0);
  setcontext(&f.start);
}

bool is_aborted() {
  const auto* params = static_cast<const mpk::LaunchParams*>(cta->launch.block);
  return __atomic_load_n(&params->control->aborted, __ATOMIC_ACQUIRE) != 0;
}

bool is_faulty(const void* place) {
  return place == emulated_fault.place && (emulated_fault.cta == ~0u || blockIdx.x == emulated_fault.cta);
}

void land(size_t i) {
  if (is_faulty(cta->in_flight[i].src) && !is_aborted()) return;
  std::swap(cta->in_flight[i], cta->in_flight.back());
  const Copy copy = std::move(cta->in_flight.back());
  cta->in_flight.pop_back();
  std::memcpy(copy.dst, copy.data.data(), copy.data.size());
  bits(copy.bar)->bytes -= copy.data.size();
  settle(copy.bar);
}

// Lands a store. Of several to one place it takes the oldest.
void land_store() {
  std::vector<Store>& stores = cta->stores;
  const uint64_t* to = stores[cta->random() % stores.size()].to;
  const auto oldest = std::find_if(stores.begin(), stores.end(), [&](const Store& s) { return s.to == to; });
  __atomic_store_n(oldest->to, oldest->value, __ATOMIC_RELAXED);
  stores.erase(oldest);
}

// 0 to size - 1 in the order in which they run until each has to wait.
std::array<uint8_t, 32> in_order(int size) {
  std::array<uint8_t, 32> numbers;
  const auto end = numbers.begin() + size;
  std::iota(numbers.begin(), end, 0);
  if (cta->launch.order == Order::kReverse) std::reverse(numbers.begin(), end);
  if (cta->launch.order == Order::kShuffled) std::shuffle(numbers.begin(), end, cta->random);
  return numbers;
}

// Lets each lane run to its next wait, and the warp go on as long as lanes meet.
void run_warp(int warp) {
  Fiber* lanes = &cta->fibers[32 * warp];
  const uint32_t& generation = cta->warps[warp].generation;
  for (int i = 0; i < 64; i++) {
    const uint32_t before = generation;
    for (int lane : in_order(32))
      if (lanes[lane].can_run()) resume(32 * warp + lane);
    if (generation == before) return;
  }
}

void run_cta(const Launch& launch, int index) {
  const int num_warps = launch.num_threads / 32;
  Cta self{launch,
           std::vector<Fiber>(launch.num_threads),
           std::vector<Warp>(num_warps),
           launch.num_threads,
           {},
           {},
           {},
           std::mt19937(launch.seed + index),
           {}};
  cta = &self;
  if (emulated_fault.cta == static_cast<uint32_t>(index))
    std::this_thread::sleep_for(std::chrono::milliseconds(emulated_fault.queued_ms));
  blockIdx = {static_cast<unsigned>(index), 0, 0};
  std::memset(mpk::smem, 0xff, sizeof(mpk::smem));
  while (self.num_running != 0) {
    const auto order = in_order(num_warps);
    for (int i = 0; i < num_warps; i++) run_warp(order[i]);
    for (size_t n = self.in_flight.size(), i = 0; i < (n + 1) / 2; i++)
      if (self.random() % 4 != 0) land(self.random() % self.in_flight.size());
    for (size_t n = self.stores.size(), i = 0; i < (n + 1) / 2; i++) land_store();
    sched_yield();
  }
  land_stores();
  if (!self.in_flight.empty()) abort();  // copies to the shared memory of an exited CTA
}

}  // namespace

void yield() {
  Fiber& f = cta->fibers[threadIdx.x];
  if (_setjmp(f.here) == 0) _longjmp(cta->scheduler, 1);
}

// Waits until the others have gone on from generation `left`.
void await(const uint32_t& generation, uint32_t left) {
  if (generation != left) return;
  Fiber& f = cta->fibers[threadIdx.x];
  f.generation = &generation;
  f.left = left;
  yield();
  f.generation = nullptr;
}

void warp_collect(const void* value, size_t bytes) {
  Warp& warp = cta->warps[threadIdx.x / 32];
  Fiber& f = cta->fibers[threadIdx.x];
  const uint32_t mine = warp.generation;
  if (bytes != 0) std::memcpy(warp.values[mine & 1][threadIdx.x % 32], value, bytes);
  f.collected = mine;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    warp.generation++;
  }
  await(warp.generation, mine);
}

const void* warp_value(int lane) {
  return cta->warps[threadIdx.x / 32].values[cta->fibers[threadIdx.x].collected & 1][lane];
}

bool barrier(int number, int threads, bool value) {
  auto& b = cta->barriers[number];
  const uint32_t mine = b.generation;
  b.any |= value;
  if (++b.arrived == (threads == 0 ? cta->launch.num_threads : threads)) {
    b.result = b.any;
    b.any = false;
    b.arrived = 0;
    b.generation++;
  }
  await(b.generation, mine);
  return b.result;
}

void barrier_init(uint64_t* bar, uint32_t count) {
  *bar = 0;
  bits(bar)->count = bits(bar)->pending = count;
}
void barrier_arrive(uint64_t* bar, uint32_t expected_bytes) {
  if (bits(bar)->pending == 0) abort();
  bits(bar)->bytes += expected_bytes;
  bits(bar)->pending--;
  settle(bar);
}
bool barrier_test(uint64_t* bar, uint32_t parity) { return bits(bar)->phase != parity; }

void copy_async(void* dst, const void* src, uint32_t bytes, uint64_t* bar) {
  if (bytes == 0 || bytes % 16) abort();
  require_aligned(src);
  require_aligned(dst);
  const uint8_t* from = static_cast<const uint8_t*>(src);
  cta->in_flight.push_back({dst, src, {from, from + bytes}, bar});
  std::memset(dst, 0xff, bytes);
}
void copy_thread(void* dst, const void* src, uint32_t bytes) {
  require_aligned(src);
  require_aligned(dst);
  const uint8_t* from = static_cast<const uint8_t*>(src);
  cta->fibers[threadIdx.x].copies.push_back({dst, src, {from, from + bytes}, nullptr});
  std::memset(dst, 0xff, bytes);
}
void commit_copies() { cta->fibers[threadIdx.x].groups.push_back(cta->fibers[threadIdx.x].copies.size()); }
void await_copies(size_t groups) {
  auto& fiber = cta->fibers[threadIdx.x];
  while (fiber.groups.size() > groups) {
    const auto end = static_cast<ptrdiff_t>(fiber.groups.front());
    for (auto copy = fiber.copies.begin(); copy != fiber.copies.begin() + end; copy++)
      std::memcpy(copy->dst, copy->data.data(), copy->data.size());
    fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + end);
    fiber.groups.erase(fiber.groups.begin());
    for (size_t& group : fiber.groups) group -= static_cast<size_t>(end);
  }
}
void arrive_after_copies(uint64_t* bar) {
  for (const Copy& copy : cta->fibers[threadIdx.x].copies) std::memcpy(copy.dst, copy.data.data(), copy.data.size());
  cta->fibers[threadIdx.x].copies.clear();
  barrier_arrive(bar, 0);
}

void start_product(float* sums, int count, std::function<void()> multiply) {
  auto& products = cta->fibers[threadIdx.x].products;
  Product made{sums, {}, std::move(multiply)};
  if (std::none_of(products.begin(), products.end(), [&](const Product& p) { return p.sums == sums; })) {
    made.before.assign(sums, sums + count);
    std::fill_n(sums, count, std::nanf(""));
  }
  products.push_back(std::move(made));
}
void commit_products() {
  auto& fiber = cta->fibers[threadIdx.x];
  fiber.product_groups.push_back(fiber.products.size());
}
void await_products(size_t groups) {
  auto& fiber = cta->fibers[threadIdx.x];
  while (fiber.product_groups.size() > groups) {
    const size_t end = fiber.product_groups.front();
    for (size_t i = 0; i < end; i++) {
      Product& product = fiber.products[i];
      std::copy(product.before.begin(), product.before.end(), product.sums);
      product.multiply();
    }
    fiber.products.erase(fiber.products.begin(), fiber.products.begin() + static_cast<ptrdiff_t>(end));
    fiber.product_groups.erase(fiber.product_groups.begin());
    for (size_t& group : fiber.product_groups) group -= end;
  }
}

void store_late(uint64_t* p, uint64_t v) { cta->stores.push_back({p, v}); }
void land_stores() {
  for (const Store& s : cta->stores) __atomic_store_n(s.to, s.value, __ATOMIC_RELAXED);
  cta->stores.clear();
}

bool at_fault(const void* p) {
  if (!is_faulty(p)) return false;
  if (emulated_fault.is_late == 0) return true;
  while (!is_aborted()) std::this_thread::yield();
  return false;
}

}  // namespace emulator

uint64_t mpk::ptx::global_time_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

uint64_t mpk::ptx::watched_time_ns() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return 1'000'000'000ull * time.tv_sec + time.tv_nsec;
}

// Launches a kernel of the table. `block`: LaunchParams and the pointers behind it, as on the device.
extern "C" EMULATOR_EXPORT void emulate(int kernel, const void* block, int num_ctas, int num_threads, int order,
                                        uint32_t seed) {
  const emulator::Launch launch{emulator::kernels[kernel], block, num_threads, emulator::Order(order), seed};
  std::vector<std::thread> ctas;
  for (int i = 0; i < num_ctas; i++) ctas.emplace_back(emulator::run_cta, std::cref(launch), i);
  for (std::thread& t : ctas) t.join();
}
