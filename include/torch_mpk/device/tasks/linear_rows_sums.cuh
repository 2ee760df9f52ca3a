// The mainloop of linears with several rows of x, and the sums that it leaves in shared memory, see linear_rows.cuh.
#pragma once

#include "torch_mpk/device/tasks/linear_rows_x.cuh"

namespace mpk::linear {

// Writes a block's sums from a warp's registers to shared memory, see RowsShape::kBlockFloats. Tensor cores leave four
// of each eight rows of x in a lane.
template <class V>
MPK_DEVICE void store_block(float* block, const float* sums, int lane) {
  float* mine = block + lane / 4 + lane % 4 * 2 * kSumPitch;
#pragma unroll
  for (int n = 0; n < RowsShape<V>::kColumns; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) mine[(8 * n + i % 2) * kSumPitch + i / 2 * 8] = sums[4 * n + i];
}

// ---- by warps

// Multiplies a chunk of some blocks. `upper` and `lower`: rows 0 to 7 and 8 to 15 of a block, 128 bytes from row to
// row, and box_rows rows from 64 columns to the next. They are in the copy engine's swizzle, which xors bits 4 to 6 of
// an address with the row. `x`: the chunk's columns of row 0, S::kPitch bytes from row to row.
template <class V, int blocks>
MPK_DEVICE void multiply_blocks(SumFragment (*sums)[RowsShape<V>::kColumns], const uint8_t* const (&upper)[blocks],
                                const uint8_t* const (&lower)[blocks], const uint8_t* x, int blocks_of_64, int lane) {
  using S = RowsShape<V>;
  using T = typename V::T;
  constexpr int kColumns = S::kColumns;
  // Four matrices of x are loaded at a time: two columns of sums, or, if there is one, two steps along K.
  constexpr int kPair = kColumns == 1 ? 1 : 2, kSteps = 2 / kPair, kMatrices = 4 / kPair;
  constexpr int kLast = (kColumns - 1) / kPair * kPair;
  const uint32_t row = lane % 8, matrix = lane / 8, access = matrix % kMatrices;
  // A lane's first 16 bytes. With swizzled rows, xor gives the address 32 i bytes further along the row.
  ptx::SharedAddress weights[blocks];
#pragma unroll
  for (int j = 0; j < blocks; j++)
    weights[j] = ptx::smem_addr(matrix % 2 == 0 ? upper[j] : lower[j]) + row * 128 + (matrix / 2 ^ row) * 16;
  const auto place_of_x = [&](uint32_t r) {
    return ptx::smem_addr(x) + r * S::kPitch + (V::kBoxesOfX ? r % 8 ^ access : access) * 16;
  };
  const uint32_t first = 8 * (matrix / kMatrices) + row, last = 8 * kLast + first;
  // Missing rows repeat the last one. Their products are not used.
  ptx::SharedAddress first_x = place_of_x(kLast == 0 ? min(first, uint32_t(V::kBatch - 1)) : first);
  ptx::SharedAddress last_x = place_of_x(min(last, uint32_t(V::kBatch - 1)));
  constexpr bool kHasAll = V::kBatch % (8 * kPair) == 0;
  // Each product adds to the sums of the product kChains before it, if registers suffice.
  constexpr int kChains = blocks > 1 || kColumns > 4 ? 1 : kColumns == 1 ? 4 : 2;
  SumFragment apart[kChains > 1 ? kChains - 1 : 1][kColumns] = {};
  struct Factors {
    ptx::Quad weights[kSteps][blocks], x[(kColumns + kPair - 1) / kPair];
  };
  // Loads 16 columns, or 32, at number i of the current 64.
  const auto load = [&](Factors& to, int i) {
#pragma unroll
    for (int k = 0; k < kSteps; k++)
#pragma unroll
      for (int j = 0; j < blocks; j++) to.weights[k][j] = ptx::load_matrices(weights[j] ^ 32 * (i + k));
#pragma unroll
    for (int n = 0; n < kColumns; n += kPair) {
      const auto at = [&](ptx::SharedAddress place) { return V::kBoxesOfX ? place ^ 32 * i : place + 32 * i; };
      to.x[n / kPair] = ptx::load_matrices(n == kLast && !kHasAll ? at(last_x) : at(first_x) + 8 * n * S::kPitch);
    }
  };
  // Dependent products stand apart. The compiler keeps this order.
  const auto multiply = [&](const Factors& by, int i) {
#pragma unroll
    for (int k = 0; k < kSteps; k++)
#pragma unroll
      for (int j = 0; j < blocks; j++)
#pragma unroll
        for (int n = 0; n < kColumns; n++) {
          const uint32_t* pair = by.x[n / kPair].v + n % kPair * kMatrices + 2 * k;
          const int chain = (i + k) % kChains;
          ptx::mma<T>(chain > 0 ? apart[chain > 0 ? chain - 1 : 0][n] : sums[j][n], by.weights[k][j],
                      {pair[0], pair[1]});
        }
  };
  const auto advance = [&](int count) {
#pragma unroll
    for (int j = 0; j < blocks; j++) weights[j] += count * (V::kBoxRows * 128);
    first_x += count * S::kBlockPitch;
    last_x += count * S::kBlockPitch;
  };
  // Where registers suffice, the next factors are loaded while these are multiplied. With up to eight long rows of x
  // that is slower, see docs/experiments.md.
  constexpr bool kIsLong = V::kBatch * V::kSize * int(sizeof(T)) > 48 * 1024;
  constexpr bool kAhead = S::kHeld * kColumns <= 8 && !(kColumns == 1 && kIsLong);
  Factors now;
  if constexpr (kAhead) load(now, 0);
#pragma unroll(!kAhead && kColumns <= 2 ? 2 : 1)
  for (int b = 1; b <= blocks_of_64; b++) {
#pragma unroll(kAhead ? 4 : 2)
    for (int i = 0; i < 4; i += kSteps) {
      if constexpr (kAhead) {
        Factors next;
        if (i + kSteps == 4) advance(b < blocks_of_64);
        load(next, (i + kSteps) % 4);
        multiply(now, i);
        now = next;
      } else {
        load(now, i);
        multiply(now, i);
      }
    }
    if constexpr (!kAhead) advance(1);
  }
  if constexpr (kChains > 1) {
#pragma unroll
    for (int chain = 1; chain < kChains; chain++)
#pragma unroll
      for (int n = 0; n < kColumns; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[0][n][i] += apart[chain - 1][n][i];
  }
}

// Multiplies a chunk's boxes as they are.
template <class V>
struct Products {
  // The producer warps' part: stages x. False when the launch was aborted.
  template <class C>
  MPK_DEVICE bool produce(C& c, const Job& job, uint8_t* stages) const {
    if constexpr (V::kBoxesOfX)
      return load_boxes<V>(c, job, stages);
    else
      return load_stages<V>(c, job, stages);
  }
  // `chunk`: its number; `block`: the number of the first block.
  template <int count>
  MPK_DEVICE void add(SumFragment (*sums)[RowsShape<V>::kColumns], const uint8_t* const (&upper)[count],
                      const uint8_t* const (&lower)[count], const uint8_t* x, uint32_t chunk, uint32_t /*block*/,
                      int lane) const {
    const int blocks_of_64 = min(V::kChunkSize, V::kSize - int(chunk) * V::kChunkSize) / 64;
    multiply_blocks<V, count>(sums, upper, lower, x, blocks_of_64, lane);
  }
};

// Multiplies chunk `chunk` of `count` blocks from number `block` on. A chunk has `boxes` boxes, and the first of them
// is ring entry `first`. False when the launch was aborted.
template <class V, int count, class C, class Products>
MPK_DEVICE bool take_blocks(C& c, const Products& products, SumFragment (*sums)[RowsShape<V>::kColumns], uint32_t first,
                            uint32_t block, uint32_t boxes, const uint8_t* x, uint32_t chunk) {
  using S = RowsShape<V>;
  const uint8_t *upper[count], *lower[count];
  const auto has_lower = [&](int j) { return S::kBoxesOfBlock == 2 && (block + j) * 2 + 1 < boxes; };
#pragma unroll
  for (int j = 0; j < count; j++) {
    const uint32_t entry = first + (block + j) * S::kBoxesOfBlock;
    if (!c.ring.wait(entry, c.phase) || (has_lower(j) && !c.ring.wait(entry + 1, c.phase))) return false;
    upper[j] = c.ring.slot(entry);
    lower[j] = has_lower(j) ? c.ring.slot(entry + 1) : upper[j] + (S::kBoxesOfBlock == 1 ? 8 * 128 : 0);
  }
  products.template add<count>(sums, upper, lower, x, chunk, block, c.lane);
#pragma unroll
  for (int j = 0; j < count; j++) {
    const uint32_t entry = first + (block + j) * S::kBoxesOfBlock;
    c.ring.release(entry);
    if (has_lower(j)) c.ring.release(entry + 1);
  }
  return true;
}

// One pass over the worker's part of K: sums some tiles, from ring entry c.entry on, and writes the sums to shared
// memory.
template <class V, class C, class Products>
MPK_DEVICE bool sum_boxes(C& c, const Job& job, uint32_t tiles, const Shares<V>& shares, uint8_t* staged,
                          const Products& products) {
  using S = RowsShape<V>;
  using T = typename V::T;
  const uint32_t boxes = tiles * V::kParts;
  const uint32_t warp = c.warp, turn = shares.turn(warp), first = warp - turn * shares.warps;
  const Chunks<V> chunks(c.worker(job));
  const bool is_producer = !V::kStaged && warp >= S::kWarps;
  const bool has_work = !is_producer && turn < shares.sharers;
  SumFragment sums[S::kHeld][S::kColumns] = {};
  if (is_producer) {
    if constexpr (!V::kStaged) c.failed |= !products.produce(c, job, staged);
  } else if (has_work || !V::kStaged) {
    uint32_t next = turn;  // the warp's next chunk
#pragma unroll 1
    for (uint32_t at = 0; at < S::kChunks; at++) {
      const bool mine = has_work && at == next;
      if (V::kStaged && !mine) continue;
      const uint32_t chunk = chunks.at(at);
      const StageState<V> stage(c.stage + at);
      const uint8_t* x = staged + (V::kStaged ? chunks.offset(chunk) : stage.offset());
      if (!V::kStaged) {
        if (!stage.await(c)) {
          c.failed = true;
          break;
        }
        c.stamp_first(&PhaseStamps::staged);
      }
      if (mine) {
        next += shares.sharers;
        const uint32_t entry = c.entry + at * boxes;
        if constexpr (S::kTogether == 2) {
          const uint32_t block = shares.template block<2>(first, 0);
          c.failed = !(shares.held == 2 && block + 1 < shares.blocks
                           ? take_blocks<V, 2>(c, products, sums, entry, block, boxes, x, chunk)
                           : take_blocks<V, 1>(c, products, sums, entry, block, boxes, x, chunk));
        } else {
#pragma unroll
          for (int h = 0; h < S::kHeld && !c.failed; h++) {
            const uint32_t block = shares.template block<1>(first, h);
            if (block >= shares.blocks) break;
            c.failed = !take_blocks<V, 1>(c, products, sums + h, entry, block, boxes, x, chunk);
          }
        }
        if (c.failed) break;
      }
      if constexpr (!V::kStaged) c.stages().release(stage.barrier(), c.lane);
    }
  }
  c.entry += S::kChunks * boxes;
  if constexpr (!V::kStaged) {
    c.stage += S::kChunks;
    if (!c.sync()) return false;  // the stages are no longer read
  }
  if (has_work) {
    float* to = reinterpret_cast<float*>(staged + S::kSumsOffset);
#pragma unroll
    for (int h = 0; h < S::kHeld; h++) {
      const uint32_t block = shares.template block<S::kTogether>(first, h);
      if (h >= shares.held || block >= shares.blocks) break;
      store_block<V>(to + (turn * shares.blocks + block) * S::kBlockFloats, sums[h][0], c.lane);
    }
  }
  return c.sync();
}

// ---- by warpgroups

// A warpgroup's mainloop. It multiplies every kWarpgroups'th box of a chunk's `boxes` from number `group` on, or, if
// there is one box, every kWarpgroups'th chunk. Rows of x are the first factor, since it has 64 rows, and rows of
// weights the second. A warp whose wait aborts goes on with whatever stands in the ring, since the other warps of its
// warpgroup cannot multiply without it.
template <class V, class C>
MPK_DEVICE void multiply_by_warpgroup(C& c, WarpgroupSums<V::kBoxRows> (&sums)[RowsShape<V>::kHeld], uint32_t boxes,
                                      uint32_t group, const uint8_t* stages) {
  using S = RowsShape<V>;
  constexpr bool kTakesTurns = S::kTurns > 1;
  constexpr int kBlocks = V::kChunkSize / kBoxColumns;  // of a chunk
  uint32_t entry = 0;                                   // the entry being multiplied, from the second on
  bool is_first = true;
#pragma unroll 1
  for (uint32_t turn = 0; turn < S::kNumStages; turn++) {
    const StageState<V> stage(c.stage + turn);
    if (!c.failed) c.failed = !stage.await(c);
    c.stamp_first(&PhaseStamps::staged);
#pragma unroll 1
    for (uint32_t i = kTakesTurns ? (group + turn * S::kChunksOfStage) % kWarpgroups : 0; i < S::kChunksOfStage;
         i += kTakesTurns ? kWarpgroups : 1) {
      const uint32_t chunk = turn * S::kChunksOfStage + i;
#pragma unroll
      for (int h = 0; h < S::kHeld; h++) {
        const uint32_t box = kTakesTurns ? 0 : group + h * kWarpgroups, next = c.entry + chunk * boxes + box;
        if (box >= boxes) break;
        if (!c.failed && !c.ring.has(next)) {
          // A call may use registers that products in flight would write.
#pragma unroll
          for (int other = 0; other < S::kHeld; other++) ptx::await_sums(sums[other]);
          c.failed = !c.ring.wait_longer(next, c.phase);
        }
        const uint8_t *x = stages + stage.offset(), *weights = c.ring.slot(next);
        ptx::begin_products();
#pragma unroll
        for (int block = 0; block < kBlocks; block++)
          mpk::multiply_blocks<typename V::T, V::kBoxRows>(
              sums[h], ptx::uniform_swizzled(x + (i * kBlocks + block) * S::kBlockPitch),
              ptx::uniform_swizzled(weights + block * (V::kBoxRows * kBoxRowBytes)));
        ptx::commit_products();
        ptx::await_products<1>();
        if (!is_first) c.ring.release_share(entry);
        is_first = false;
        entry = next;
      }
    }
    ptx::await_products<0>();
    c.stages().release(stage.barrier(), c.lane);
  }
#pragma unroll
  for (int h = 0; h < S::kHeld; h++) ptx::await_sums(sums[h]);
  if (!is_first) c.ring.release_share(entry);
}

// One pass over the worker's part of K: sums a warpgroup's boxes.
template <class V, class C>
MPK_DEVICE bool sum_by_warpgroups(C& c, const Job& job, uint32_t boxes, uint8_t* staged,
                                  WarpgroupSums<V::kBoxRows> (&sums)[RowsShape<V>::kHeld]) {
  using S = RowsShape<V>;
  static_assert(V::kBoxesOfX && S::kWarps == kWarpgroups * kWarpgroupWarps && V::kXRows == kWarpgroupRows);
  if (c.warp >= S::kWarps)
    c.failed |= !load_boxes<V>(c, job, staged);
  else
    multiply_by_warpgroup<V>(c, sums, boxes, c.warp / kWarpgroupWarps, staged);
  c.entry += S::kChunks * boxes;
  c.stage += S::kNumStages;
  return c.sync();  // the stages are no longer read
}

// Writes a box's sums from a warpgroup's registers to shared memory, block by block.
template <class V>
MPK_DEVICE void store_box(float* blocks, const WarpgroupSums<V::kBoxRows>& sums, uint32_t warp, int lane) {
  float* mine = blocks + (warp * kWarpRows + lane / 4) * kSumPitch + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < V::kBoxRows / 8; j++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      *reinterpret_cast<float2*>(mine + j / 2 * RowsShape<V>::kBlockFloats + 8 * i * kSumPitch + j % 2 * 8) = {
          sums[4 * j + 2 * i], sums[4 * j + 2 * i + 1]};
}

// Writes the sums of the boxes from number `first` on; each warpgroup has at most `held` of them.
template <class V, int first, int held, class C>
MPK_DEVICE bool store_boxes(C& c, const WarpgroupSums<V::kBoxRows> (&sums)[RowsShape<V>::kHeld], uint32_t boxes,
                            uint8_t* staged) {
  using S = RowsShape<V>;
  if (c.warp < S::kWarps) {
    float* to = reinterpret_cast<float*>(staged + S::kSumsOffset);
#pragma unroll
    for (int h = 0; h < held; h++) {
      const uint32_t box = c.warp / kWarpgroupWarps + h * kWarpgroups;  // or the turn of the chunks
      if (S::kMaxBoxes > 1 && first + box >= boxes) break;
      store_box<V>(to + box * S::kBlocksOfBox * S::kBlockFloats, sums[first / kWarpgroups + h],
                   c.warp % kWarpgroupWarps, c.lane);
    }
  }
  return c.sync();
}

}  // namespace mpk::linear
