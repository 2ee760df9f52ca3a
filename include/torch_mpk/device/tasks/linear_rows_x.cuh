// How several rows of x are staged for a linear, see linear_rows.cuh.
#pragma once

#include "torch_mpk/device/tasks/linear_rows_norm.cuh"

namespace mpk::linear {

// The producer warps copy x's columns, chunk after chunk, each warp a few rows. False when the launch was aborted.
template <class V, class C>
MPK_DEVICE bool load_stages(C& c, const Job& job, uint8_t* stages) {
  using S = RowsShape<V>;
  using T = typename V::T;
  constexpr int kVec = kVecSize<T>;
  const Chunks<V> chunks(c.worker(job));
#pragma unroll 1
  for (uint32_t turn = 0; turn < S::kChunks; turn++) {
    const int chunk = chunks.at(turn);
    const StageState<V> place(c.stage + turn);
    uint64_t* full = &c.stages().full[place.barrier()];
    if (!place.await_free(c)) return false;
    const int accesses = min(V::kChunkSize, V::kSize - chunk * V::kChunkSize) / kVec;  // 16-byte accesses of a row
    const T* x = V::x(job) + chunk * V::kChunkSize;
    const bool is_aligned = reinterpret_cast<uint64_t>(x) % kAccessBytes == 0;  // a call's tensor may begin anywhere
    const int first = c.warp - S::kWarps;
    const T* from = x + first * V::kPitchX;
    uint8_t* to = stages + place.offset() + first * S::kPitch;
    if (is_aligned) {
      // A lone warp takes several cycles for each instruction, so there are few.
      const T* access = from + c.lane * kVec;
      uint8_t* copied = to + c.lane * 16;
#pragma unroll
      for (int row = 0; row < V::kBatch; row += kProducerWarps) {
        if (first + row < V::kBatch)
#pragma unroll
          for (int p = 0; p < V::kChunkSize / kVec; p += 32)
            if (p + c.lane < accesses) ptx::copy_async_16(copied + row * S::kPitch + p * 16, access + p * kVec);
        access += kProducerWarps * V::kPitchX;
      }
    } else {
      for (int row = first; row < V::kBatch; row += kProducerWarps) {
        for (int e = c.lane; e < accesses * kVec; e += 32) reinterpret_cast<T*>(to)[e] = from[e];
        from += kProducerWarps * V::kPitchX;
        to += kProducerWarps * S::kPitch;
      }
    }
    if (is_aligned)
      ptx::copy_async_arrive(full);
    else
      ptx::mbar_arrive(full);
  }
  return true;
}

// The same as boxes. The first producer warp starts the copies, and arrives for all producer warps. It stays until they
// have landed, since they must not land in the shared memory of a CTA that has exited. The others find the factors of
// rows.
template <class V, class C>
MPK_DEVICE bool load_boxes(C& c, const Job& job, uint8_t* stages) {
  using S = RowsShape<V>;
  if (c.warp != S::kWarps) {
    if constexpr (V::kScalesRows)
      find_factors<V, kProducerWarps - 1>(job, c.warp - S::kWarps - 1, c.lane,
                                          reinterpret_cast<float*>(stages + S::kFactorsOffset));
    return true;
  }
  const void* map = V::map_of_x(job);
  const Chunks<V> chunks(c.worker(job));
  ptx::fence_proxy_async();  // other threads' writes to memory, and to the stages' place
  uint32_t turn = 0;
#pragma unroll 1
  for (; turn < S::kNumStages; turn++) {
    const StageState<V> place(c.stage + turn);
    uint64_t* full = &c.stages().full[place.barrier()];
    if (!__all_sync(~0u, place.await_free(c))) break;
    if (c.lane == 0) {
      const uint32_t number = chunks.at(turn);
      ptx::mbar_arrive_expect(full, S::kBytesOfX + S::kStageSums * 4);
      ptx::box_load(stages + place.offset(), map, 0, number * S::kBlocksOfStage, full, ptx::kEvictNormal);
      if constexpr (S::kStageSums > 0)
        ptx::bulk_load(sums_of_stage<V>(stages, place.offset()), V::x_sums(job) + number * S::kStageSums,
                       S::kStageSums * 4, full, ptx::kEvictNormal);
    } else {
      ptx::mbar_arrive(full);
    }
#pragma unroll
    for (int i = 1; i < kProducerWarps; i++) ptx::mbar_arrive(full);
  }
#pragma unroll 1
  for (uint32_t number = c.stage + (turn > kStages ? turn - kStages : 0); number < c.stage + turn; number++)
    while (!ptx::mbar_test(&c.stages().full[number % kStages], number / kStages & 1)) {
    }
  return turn == S::kNumStages;
}

// Stages the worker's columns of a polled x. Each thread has some accesses of all rows in flight at a time.
template <class V, class C>
MPK_DEVICE bool stage_columns(C& c, const Job& job, uint8_t* x) {
  static_assert(!V::kRowTasks);
  constexpr int kVec = kVecSize<typename V::T>, kOfRow = V::kSize / V::kSplit / kVec, kAccesses = V::kBatch * kOfRow;
  constexpr int kAtOnce = 8, kInAll = (kAccesses + kConsumerThreads - 1) / kConsumerThreads;
  constexpr int kSteps = kInAll < kAtOnce ? kInAll : kAtOnce;
  const uint4* from = reinterpret_cast<const uint4*>(V::x(job)) + c.worker(job) % V::kSplit * kOfRow;
  if (!c.await()) return false;
#pragma unroll 1
  for (int first = c.warp * 32 + c.lane; first < kAccesses; first += kSteps * kConsumerThreads) {
    uint4 polled[kSteps];
    const auto place = [&](int s) { return first + s * kConsumerThreads; };
    const auto access = [&](int s) {
      const int row = place(s) / kOfRow;
      return place(s) < kAccesses ? from + row * (V::kPitchX / kVec) + (place(s) - row * kOfRow) : nullptr;
    };
    if (!poll_each<kSteps>(polled, access, c.shared.watchdog, c.phase)) {
      c.failed = true;
      break;
    }
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const int row = place(s) / kOfRow;
      if (place(s) < kAccesses)
        *reinterpret_cast<uint4*>(x + row * RowsShape<V>::kPitch + (place(s) - row * kOfRow) * 16) = polled[s];
    }
  }
  return true;
}

// Stages rows of x through the row tasks in front of the linear, each row by a warp or by several.
template <class V, class C, class Group>
MPK_DEVICE bool stage_whole(C& c, const Job& job, Group group, int first, int step, uint8_t* x) {
  using Chain = typename V::template Chain<Group>;
  using T = typename V::T;
  if (!V::kEarly && !c.await()) return false;
  if (first >= V::kBatch) return c.await();
  // Workers begin with different rows, since all read the same rows at the same time.
  const auto row = [](int i) { return (i + blockIdx.x) % V::kBatch; };
  Chain chain(group, job, row(first));
  if (V::kEarly && !c.await()) return false;
  for (int i = first;;) {
    const uint32_t r = row(i);
    chain.stage(group, job, r, reinterpret_cast<T*>(x + r * RowsShape<V>::kPitch));
    if ((i += step) >= V::kBatch) return true;
    chain = Chain(group, job, row(i));
  }
}

// Stages all rows of x.
template <class V, class C>
MPK_DEVICE bool stage_all(C& c, const Job& job, uint8_t* x) {
  constexpr int kWarps = warps_of_row(V::kBatch, kConsumerWarps);
  if constexpr (kWarps == 1) {
    return stage_whole<V>(c, job, WarpThreads<C>(c), c.warp, kConsumerWarps, x);
  } else {
    const WarpGroup<C, kWarps> group(c);
    return stage_whole<V>(c, job, group, group.number, V::kBatch, x);
  }
}

}  // namespace mpk::linear
