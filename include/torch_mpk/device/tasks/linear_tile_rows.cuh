// Row tasks behind linears with many rows of x, such as norms and rotations of a prompt's heads. A warp has 16 rows of
// x of a tile in registers, with whole rows of the tasks, each in four lanes. It writes half of them at a time to
// shared memory, where the same lanes run the tasks as a job of row tasks does (row.cuh).
#pragma once

#include "torch_mpk/device/row.cuh"
#include "torch_mpk/device/warpgroup.cuh"

namespace mpk::linear {

// The row tasks of a linear's rows. R: kSize, of a row; kOfX, rows of a row of x; a chain of tasks whose row is in
// place; and the store of the finished row.
template <class R>
concept RowsBehind = HasEpilogue<R> && Constants<int, R::kSize, R::kOfX>;
template <class R>
concept HasBias = requires(const Job& job, uint32_t n) {
  { R::bias(job, n) } -> Same<Vec<typename R::T, 2>>;  // of columns n and n + 1, n even
};

// Finishes a warp's rows of x from number x_row on, columns begin to end. `sums`: as from a warpgroup's products.
// `strip`: the warp's, of kStripBytes.
template <RowsBehind R, int kBatch, int kSums, class C>
MPK_DEVICE void finish_rows_behind(C& c, const Job& job, int x_row, uint32_t begin, uint32_t end,
                                   const float (&sums)[kSums], uint8_t* strip) {
  using T = typename R::T;
  using Group = LaneGroup<C, 4>;
  constexpr int kHalf = kWarpRows / 2, kBytes = row_behind_bytes(R::kSize * int(sizeof(T)));  // rows; what they take
  constexpr int kPairs = R::kSize / 8, kAllPairs = kSums / 2;  // of a lane: of a row; all
  static_assert(kBytes <= kStripBytes && R::kSize % 8 == 0 && kAllPairs % (2 * kPairs) == 0, "rows are not whole");
  if (begin >= end) return;
  Group group(c);
  // In the order of their use, rounded at once, since sums take twice the registers.
  uint32_t pairs[kAllPairs];
#pragma unroll
  for (int p = 0; p < kAllPairs; p++) {
    const int turn = p / kPairs, column = turn / 2 * R::kSize + p % kPairs * 8;
    const float* pair = sums + column / 2 + turn % 2 * 2;
    const uint32_t n = min(begin + column, end - 8) + 2 * group.rank;
    float values[] = {pair[0], pair[1]};
    if constexpr (HasBias<R>) {
      const Vec<T, 2> bias = R::bias(job, n);
#pragma unroll
      for (int i = 0; i < 2; i++) values[i] += to_float(bias.v[i]);
    }
    const Vec<T, 2> rounded = round_to<T>(values);
    pairs[p] = reinterpret_cast<const uint32_t&>(rounded);
  }
  uint8_t* shown = strip + group.number * (kBytes / kHalf);
  const typename R::Common common = R::common(job);
  const int turns = 2 * ((end - begin) / R::kSize);
#pragma unroll 1
  for (int turn = 0; turn < turns; turn++) {
    const int r = x_row + turn % 2 * kHalf + group.number;
    const uint32_t row = min(r, kBatch - 1) * R::kOfX + begin / R::kSize + turn / 2;
    typename R::template Chain<Group> chain(group, job, row);
#pragma unroll
    for (int j = 0; j < kPairs; j++) reinterpret_cast<uint32_t*>(shown)[4 * j + group.rank] = pairs[j];
#pragma unroll
    for (int p = 0; p < kAllPairs - kPairs; p++) pairs[p] = pairs[p + kPairs];
    group.sync();
    T* data = reinterpret_cast<T*>(shown);
    chain.apply(group, job, row, data);
    group.sync();
    if (r < kBatch) finish_row<R>(group, job, row, data, common);
    group.sync();
  }
}

}  // namespace mpk::linear
