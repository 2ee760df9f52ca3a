// How fast one GPU streams memory when nothing else is asked of it: the yardstick of every decode step.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a benchmarks/ceiling.cu -o ceiling && ./ceiling
//
// One CTA per multiprocessor, one thread each, bulk copies from global memory through a ring in shared memory. The data
// is not looked at. Also measured: the time from every CTA signalling an event to every CTA having seen it, which
// bounds how quickly dependent phases can follow each other. Prints one line of JSON.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kCopyBytes = 8 << 10;
constexpr int kNumSlots = 24;  // 192 KiB in flight per multiprocessor
constexpr size_t kStreamBytes = size_t{8} << 30;
constexpr int kNumRounds = 1000;
constexpr int kNumRuns = 15;

void check(cudaError_t error, int line) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "ceiling.cu:%d: %s\n", line, cudaGetErrorString(error));
  exit(1);
}
#define CHECK(call) check(call, __LINE__)

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void wait_parity(uint32_t mbarrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(mbarrier), "r"(parity)
                 : "memory");
  }
}

__global__ void stream_memory(const uint8_t* source, int64_t num_copies) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ uint64_t full[kNumSlots];
  for (auto& mbarrier : full) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&mbarrier)));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  const int64_t begin = num_copies * blockIdx.x / gridDim.x;
  const int64_t count = num_copies * (blockIdx.x + 1) / gridDim.x - begin;
  // A slot is filled again as soon as its last copy has landed, so every slot always has one in flight.
  for (int64_t i = 0; i < count + kNumSlots; i++) {
    const int slot = static_cast<int>(i % kNumSlots);
    const uint32_t mbarrier = shared_address(full + slot);
    if (i >= kNumSlots && i - kNumSlots < count) wait_parity(mbarrier, (i / kNumSlots - 1) & 1);
    if (i >= count) continue;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(kCopyBytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(ring + slot * kCopyBytes)),
                 "l"(source + (begin + i) * kCopyBytes), "r"(kCopyBytes), "r"(mbarrier)
                 : "memory");
  }
}

__global__ void round_trips(unsigned* events) {
  for (int round = 0; round < kNumRounds; round++) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(events + round) : "memory");
    unsigned seen = 0;
    while (seen < gridDim.x)
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(events + round) : "memory");
  }
}

template <typename Launch>
float median_ms(Launch launch) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times(kNumRuns);
  for (int run = -3; run < kNumRuns; run++) {  // the first few warm up
    CHECK(cudaEventRecord(begin));
    CHECK(launch());
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    if (run >= 0) CHECK(cudaEventElapsedTime(&times[run], begin, end));
  }
  std::sort(times.begin(), times.end());
  return times[kNumRuns / 2];
}

}  // namespace

int main() {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  const int num_ctas = device.multiProcessorCount;

  uint8_t* source;
  CHECK(cudaMalloc(&source, kStreamBytes));
  CHECK(cudaMemset(source, 0x5a, kStreamBytes));
  const int ring_bytes = kCopyBytes * kNumSlots;
  CHECK(cudaFuncSetAttribute(stream_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, ring_bytes));
  const float stream_ms = median_ms([&] {
    stream_memory<<<num_ctas, 1, ring_bytes>>>(source, kStreamBytes / kCopyBytes);
    return cudaGetLastError();
  });

  unsigned* events;
  CHECK(cudaMalloc(&events, kNumRounds * sizeof(unsigned)));
  void* arguments[] = {&events};
  const float rounds_ms = median_ms([&] {
    CHECK(cudaMemsetAsync(events, 0, kNumRounds * sizeof(unsigned)));
    return cudaLaunchCooperativeKernel(reinterpret_cast<void*>(round_trips), num_ctas, 1, arguments, 0, nullptr);
  });
  printf("{\"tb_per_s\": %.4f, \"event_round_trip_us\": %.3f}\n", kStreamBytes / stream_ms / 1e9,
         rounds_ms * 1e3 / kNumRounds);
}
