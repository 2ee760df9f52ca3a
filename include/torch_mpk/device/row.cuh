// Groups of threads that share a row, and jobs of rows.
//
// A row task is a class Task<V, Group>. V has its sizes, attributes and operands: see RowTask. The order of elements
// follows a thread's rank, so results do not depend on the kind of group. Generated code puts the tasks of a row into a
// class Chain<Group>: see RowChain.
#pragma once

#include "torch_mpk/device/concepts.cuh"
#include "torch_mpk/device/consumer.cuh"
#include "torch_mpk/device/pointwise.cuh"

namespace mpk {

// Sums over `lanes` neighbouring lanes. All lanes of the warp call it.
template <int lanes = 32>
MPK_DEVICE float warp_sum(float v) {
#pragma unroll
  for (int o = lanes / 2; o > 0; o /= 2) v += __shfl_xor_sync(~0u, v, o);
  return v;
}

// Sums over this lane and those before it.
MPK_DEVICE uint32_t warp_sum_so_far(uint32_t v, uint32_t lane) {
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const uint32_t before = __shfl_up_sync(~0u, v, o);
    if (lane >= o) v += before;
  }
  return v;
}

MPK_DEVICE float warp_max(float v) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}

template <class C>
struct WarpThreads {
  static constexpr int kSize = 32;
  C& c;
  int rank;
  MPK_DEVICE explicit WarpThreads(C& c) : c(c), rank(c.lane) {}

  MPK_DEVICE float sum(float v) { return warp_sum(v); }
  MPK_DEVICE void sync() { __syncwarp(); }
};

// Neighbouring lanes of a warp. Each group has a row of its own, and all groups keep step.
template <class C, int lanes>
struct LaneGroup {
  static constexpr int kSize = lanes;
  C& c;
  int number, rank;
  MPK_DEVICE explicit LaneGroup(C& c) : c(c), number(c.lane / lanes), rank(c.lane % lanes) {}

  MPK_DEVICE float sum(float v) { return warp_sum<lanes>(v); }
  MPK_DEVICE void sync() { __syncwarp(); }
};

// Adds the warps' values in Shared::partials, in their order.
MPK_DEVICE float sum_partials(const float* partials) {
  float total = 0;
#pragma unroll
  for (int w = 0; w < kConsumerWarps; w += 4) {
    const float4 next = *reinterpret_cast<const float4*>(partials + w);
    const float each[4] = {next.x, next.y, next.z, next.w};
#pragma unroll
    for (int i = 0; i < 4 && w + i < kConsumerWarps; i++) total += each[i];
  }
  return total;
}

// All consumer threads of the CTA.
template <class C>
struct CtaThreads {
  static constexpr int kSize = kConsumerThreads;
  C& c;
  int rank;
  int flip = 0;
  MPK_DEVICE explicit CtaThreads(C& c) : c(c), rank(c.rank) {}

  // Two places in turn, so that a sum takes one barrier.
  MPK_DEVICE float* partials() {
    flip ^= 1;
    return c.shared.partials[flip];
  }
  MPK_DEVICE float sum(float v) {
    float* of_warps = partials();
    v = warp_sum(v);
    if (c.lane == 0) of_warps[c.warp] = v;
    sync();
    return sum_partials(of_warps);
  }
  MPK_DEVICE void sync() { c.sync(); }
  MPK_DEVICE void settle(bool ok) { c.alive = ok; }
};

// For neighbouring warps of a group: their barrier, and their sum of v. `partials` has a place for each warp of the
// CTA.
template <int warps>
MPK_DEVICE void sync_group() {
  constexpr int kFirstBarrier = 2;  // 0: the CTA's; 1: the consumers'
  ptx::barrier<32 * warps>(kFirstBarrier + ptx::thread_index() / (32 * warps));
}
template <int warps>
MPK_DEVICE float sum_over(float v, float* partials) {
  const int warp = ptx::thread_index() / 32;
  v = warp_sum(v);
  if (ptx::thread_index() % 32 == 0) partials[warp] = v;
  sync_group<warps>();
  float total = 0;
#pragma unroll
  for (int w = 0; w < warps; w++) total += partials[warp / warps * warps + w];
  return total;
}

// `warps` neighbouring warps. Each group has a row of its own. Warps left over have the number of a group too many.
template <class C, int warps>
struct WarpGroup {
  static constexpr int kSize = 32 * warps;
  static_assert(warps > 1);
  C& c;
  int number, rank;
  int flip = 0;
  MPK_DEVICE explicit WarpGroup(C& c) : c(c), number(c.warp / warps), rank(c.rank % kSize) {}

  MPK_DEVICE float* partials() {
    flip ^= 1;
    return c.shared.partials[flip];
  }
  MPK_DEVICE float sum(float v) { return sum_over<warps>(v, partials()); }
  MPK_DEVICE void sync() { sync_group<warps>(); }
  MPK_DEVICE void settle(bool ok) { c.failed |= !ok; }
};

// Every thread of a group constructs it with the job's operands, whose loads it may start, and applies it to a row in
// shared memory, in place.
template <class Task, class Group, class T>
concept RowTask = requires(Task task, Group& group, const Job& job, uint32_t row, T* data) {
  Task(group, job, row);
  task.apply(group, data);  // the row is complete on entry; no barrier at the end
};

// `Row`: one uint32_t or several, which a chain is constructed with besides the job.
template <class Chain, class Group, class T, class... Row>
concept RowChain = requires(Chain chain, Group& group, const Job& job, uint32_t row, T* data, Row... rows) {
  Chain(group, job, rows...);          // constructs the tasks
  chain.fetch(group, job, row, data);  // loads the row from memory to `data`
  chain.apply(group, job, row, data);  // the tasks
  chain.stage(group, job, row, data);  // fetch, then apply
};

// Elements in a lane's access, for rows of a warp or of fewer lanes: as few as give the lane one access, at most 16
// bytes.
template <class T>
constexpr int lane_width(int size, int lanes = 32) {
  int width = 1;
  while (width < kVecSize<T> && lanes * width < size) width *= 2;
  return width;
}

// Whether each warp has rows of its own, or the whole CTA works on each row. All jobs use the same rule, for equal
// bits.
constexpr bool rows_by_warp(int row_bytes, int64_t num_rows) {
  return row_bytes <= 512 || (row_bytes <= kLongestWarpRow && num_rows >= 4);
}

// Elements in a thread's access to a row of N that begins at 16 bytes. Short rows keep a whole warp busy, or the lanes
// that share one.
template <class T, int N, class Group>
inline constexpr int kRowWidth = N <= 4 * (Group::kSize < 32 ? Group::kSize : 32) ? 4 : kVecSize<T>;

// Copies a row of N elements between memory and shared memory. The same thread of a group always has the same elements.
template <class T, int N, bool vectorized, class Group>
MPK_DEVICE void copy_row(const Group& group, T* dst, const T* src) {
  if constexpr (vectorized) {
    using Access = Vec<T, kRowWidth<T, N, Group>>;
    constexpr int kAccesses = N / kRowWidth<T, N, Group>, kAtOnce = 8;
    if constexpr (kAccesses > 2 * Group::kSize) {  // accesses in flight together
      for (int first = group.rank; first < kAccesses; first += kAtOnce * Group::kSize) {
        Access accesses[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++)
          if (const int at = first + i * Group::kSize; at < kAccesses)
            accesses[i] = reinterpret_cast<const Access*>(src)[at];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++)
          if (const int at = first + i * Group::kSize; at < kAccesses) reinterpret_cast<Access*>(dst)[at] = accesses[i];
      }
      return;
    }
    for (int i = group.rank; i < N / kRowWidth<T, N, Group>; i += Group::kSize)
      reinterpret_cast<Access*>(dst)[i] = reinterpret_cast<const Access*>(src)[i];
  } else {
    for (int i = group.rank; i < N; i += Group::kSize) dst[i] = src[i];
  }
}

template <class V>
inline constexpr int kRowPitch = (V::kSize * int(sizeof(typename V::T)) + 15) / 16 * 16;
template <class V>
inline constexpr bool kByWarp = rows_by_warp(kRowPitch<V>, V::kRows);
template <class V>  // of shared memory
inline constexpr int kLaneRowPitch = V::kAtOnce > 1 ? kRowPitch<V> + kLaneRowPad : kRowPitch<V>;
template <class V>  // of shared memory
inline constexpr int kRowStagedBytes = kByWarp<V> ? kConsumerWarps * V::kAtOnce * kLaneRowPitch<V> : kRowPitch<V>;

template <class Chain, class Group, class T>
MPK_DEVICE void run_chain(Group& group, const Job& job, uint32_t row, T* data) {
  Chain chain(group, job, row);
  chain.stage(group, job, row, data);
}

// Jobs with an epilogue for their rows. V: kWidth, Common; common(job) loads what all elements need, and finish(job,
// row, column, elements, common) takes kWidth neighbouring elements of a row.
template <class V>
concept HasEpilogue = Constants<int, V::kWidth>;

// Jobs with tiles of what each row has become. tiles(job, row, data, first, step, lane): a warp computes every `step`th
// of the row's tiles from `first` on.
template <class V>
concept HasTiles = Constants<bool, V::kHasTiles>;

struct Nothing {};
template <class V>
MPK_DEVICE auto common_of(const Job& job) {
  if constexpr (HasEpilogue<V>)
    return V::common(job);
  else
    return Nothing{};
}

// Runs the epilogue of a row that is complete in shared memory.
template <class V, class Group, class Common>
MPK_DEVICE void finish_row(const Group& group, const Job& job, uint32_t row, const typename V::T* data,
                           const Common& common) {
  if constexpr (HasEpilogue<V>)
    for (int i = group.rank * V::kWidth; i < V::kSize; i += Group::kSize * V::kWidth)
      V::finish(job, row, i, *reinterpret_cast<const Vec<typename V::T, V::kWidth>*>(data + i), common);
}

// Each warp takes several rows at a time, neighbours in memory. Lanes without a row repeat the last one, to keep step.
template <class V, class C>
MPK_DEVICE void run_rows_by_lanes(C& c, const Job& job) {
  using T = typename V::T;
  using Group = LaneGroup<C, 32 / V::kAtOnce>;
  Group group(c);
  T* data = reinterpret_cast<T*>(c.staged() + (c.warp * V::kAtOnce + group.number) * kLaneRowPitch<V>);
  const auto common = common_of<V>(job);
  const uint32_t warp = c.worker(job) + c.warp * C::Config::kNumWorkers;
  for (uint32_t first = warp * V::kAtOnce; first < V::kRows;
       first += kConsumerWarps * C::Config::kNumWorkers * V::kAtOnce) {
    const uint32_t row = first + group.number;
    run_chain<typename V::template Chain<Group>>(group, job, min(row, uint32_t(V::kRows - 1)), data);
    group.sync();
    if constexpr (HasEpilogue<V>) {
      if (row < V::kRows) finish_row<V>(group, job, row, data, common);
      group.sync();
    }
    if constexpr (HasTiles<V>) {  // the whole warp takes its rows one by one
      const T* rows = reinterpret_cast<const T*>(c.staged() + c.warp * V::kAtOnce * kLaneRowPitch<V>);
      for (uint32_t i = 0; i < V::kAtOnce && first + i < V::kRows; i++)
        V::tiles(job, first + i, rows + i * (kLaneRowPitch<V> / sizeof(T)), 0, 1, c.lane);
      group.sync();
    }
  }
}

// A job of row tasks, and its epilogue or tiles. V: T, kRows, kAtOnce, kSize; Chain<Group>, which also stores the row
// where others need it; HasEpilogue or HasTiles.
template <class V, class C>
MPK_DEVICE void run_rows(C& c, const Job& job) {
  using T = typename V::T;
  if (!c.await()) return;
  const uint32_t worker = c.worker(job);
  if constexpr (V::kAtOnce > 1) {
    run_rows_by_lanes<V>(c, job);
  } else if constexpr (kByWarp<V>) {
    WarpThreads<C> group(c);
    T* data = reinterpret_cast<T*>(c.staged() + c.warp * kRowPitch<V>);
    const auto common = common_of<V>(job);
    for (uint32_t row = worker + c.warp * C::Config::kNumWorkers; row < V::kRows;
         row += kConsumerWarps * C::Config::kNumWorkers) {
      run_chain<typename V::template Chain<WarpThreads<C>>>(group, job, row, data);
      group.sync();
      if constexpr (HasEpilogue<V>) {
        finish_row<V>(group, job, row, data, common);
        group.sync();
      }
      if constexpr (HasTiles<V>) {
        V::tiles(job, row, data, 0, 1, c.lane);
        group.sync();
      }
    }
  } else {
    CtaThreads<C> group(c);
    T* data = reinterpret_cast<T*>(c.staged());
    const auto common = common_of<V>(job);
    for (uint32_t row = worker; row < V::kRows; row += C::Config::kNumWorkers) {
      run_chain<typename V::template Chain<CtaThreads<C>>>(group, job, row, data);
      if (!c.sync()) return;
      if constexpr (HasEpilogue<V>) {
        finish_row<V>(group, job, row, data, common);
        if (!c.sync()) return;
      }
      if constexpr (HasTiles<V>) {
        c.call([&] {
          V::tiles(job, row, data, c.warp, kConsumerWarps, c.lane);
          return c.sync();
        });
        if (!c.alive) return;
      }
    }
  }
}

}  // namespace mpk
