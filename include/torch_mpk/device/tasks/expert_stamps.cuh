// How many pairs chose each expert, for timelines of profiled kernels, see abi/control.h.
#pragma once

#include "torch_mpk/device/stamps.cuh"
#include "torch_mpk/device/tasks/expert_rows.cuh"

namespace mpk::experts {

// Called behind the job, whose time it adds little to: ids are in L1. Each warp of the launch counts for some experts.
template <class V, class C>
MPK_DEVICE void note_pairs(C& c, const Job& job) {
  using Kernel = typename C::Config;
  const int64_t* ids = V::ids(job);
  uint32_t* all = reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(c.params.control) + Kernel::kPairsOffset);
  uint32_t* pairs = all + (c.epoch % kLaunchesKept * Kernel::kNumPhases + c.phase) * Kernel::kMostExperts;
  constexpr int kStep = Kernel::kNumWorkers * kConsumerWarps;
  const int thread = ptx::thread_index(), lane = thread % 32;
#pragma unroll 1
  for (int expert = thread / 32 * Kernel::kNumWorkers + blockIdx.x; expert < V::kExperts; expert += kStep) {
    uint32_t count = 0;
    for (int first = 0; first < V::kPairs; first += 32) {
      const int pair = first + lane;
      count += __popc(__ballot_sync(~0u, pair < V::kPairs && expert_of<V>(ids, pair) == expert));
    }
    if (lane == 0) pairs[expert] = count;
  }
}

}  // namespace mpk::experts
