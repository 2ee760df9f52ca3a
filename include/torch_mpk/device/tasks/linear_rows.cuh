// linear with several rows of x, on tensor cores: y[r, n] = sum over k of x[r, k] * weight[n, k].
//
// The weights come through the ring in boxes of V::kBoxRows rows by V::kChunkSize columns, each by one copy of the
// copy engine, which knows the matrix by a map. A worker works on all of its rows at once, K outermost: its warps hold
// the sums in registers, and of x only the columns at hand are needed. Two boxes of 8 rows, or one of 16, are the first
// factor of the products (a block), and eight rows of x the second. Where a worker has fewer blocks than warps, several
// warps take turns at the chunks of a block, and their sums are added in order.
//
// x stands in shared memory whole, where it fits or comes through row tasks; otherwise the group's last warps bring it
// in windows of a chunk's columns, ahead of the others: by the copy engine, as a box, unless it may begin anywhere.
//
// Where x is what a worker reads most of, V::kSplit workers have the same tiles, each an equal part of the columns: so
// each needs that part of x alone. Their sums meet in the workspace.
#pragma once

#include "torch_mpk/device/tagged.cuh"
#include "torch_mpk/device/tasks/linear.cuh"
#include "torch_mpk/device/warpgroup.cuh"

namespace mpk::linear {

template <class V>
concept RowsSizes = requires {
  typename V::T;
  // Rows of x; K.
  requires Constants<int, V::kBatch, V::kSize>;
  // Linears one after the other in row space, or linears whose row n is computed side by side.
  requires Constants<int, V::kSegments, V::kParts>;
  // Of a box. A tile is V::kBoxRows rows of every part.
  requires Constants<int, V::kBoxRows, V::kChunkSize>;
  requires Constants<uint32_t, V::kNumTiles>;
  // Tiles that a worker takes at a time; workers that share them, see finish_shared.
  requires Constants<int, V::kPassTiles, V::kSplit>;
  // x stands in shared memory whole, after row tasks; otherwise it is kPitchX elements from row to row, and comes in
  // windows, or has a map, by which windows are boxes.
  requires Constants<bool, V::kStaged, V::kRowTasks, V::kBoxesOfX> && Constants<int, V::kPitchX>;
  // What chains and extras fetch first is known before the phase's events.
  requires Constants<bool, V::kEarly>;
  // Warpgroups multiply the boxes, each of one block of 64 columns. Columns of a window, and the rows it has of x:
  // those that the tensor cores take.
  requires Constants<bool, V::kByWarpgroups> && Constants<int, V::kWindowSize, V::kXRows>;
};

template <class V, class C>
concept RowsVariant = RowsSizes<V> && Results<V, C> && (V::kSplit == 1 || Meets<V>) && requires(const Job& job, int i) {
  { V::first_tile(i) } -> Same<uint32_t>;  // of segment i
  { V::num_rows(i) } -> Same<uint32_t>;
  { V::x(job) } -> Same<const typename V::T*>;
  { V::map_of_x(job) } -> Same<const void*>;
};

// What follows from a variant.
template <RowsSizes V>
struct RowsShape {
  using T = typename V::T;
  static constexpr int kColumns = (V::kXRows + 7) / 8;  // fragments of sums that a block has
  // One or two, where a warp has a block; a warpgroup has the blocks of a box, each by one of its warps.
  static constexpr int kBoxesOfBlock = V::kByWarpgroups ? 1 : kWarpRows / V::kBoxRows;
  static constexpr int kBlocksOfBox = V::kByWarpgroups ? (V::kBoxRows + kWarpRows - 1) / kWarpRows : 1;
  static constexpr int kBoxBytes = V::kBoxRows * V::kChunkSize * int(sizeof(T));
  static constexpr int kChunks = (V::kSize + V::kChunkSize - 1) / V::kChunkSize / V::kSplit;    // of a worker
  static constexpr int kWarps = V::kStaged ? kConsumerWarps : kConsumerWarps - kBringingWarps;  // that multiply
  static constexpr int kMaxBoxes = V::kPassTiles * V::kParts;
  static constexpr int kMaxBlocks = (kMaxBoxes * kBlocksOfBox + kBoxesOfBlock - 1) / kBoxesOfBlock;
  static constexpr int kHeld = V::kByWarpgroups ? (kMaxBoxes + kWarpgroups - 1) / kWarpgroups
                                                : (kMaxBlocks + kWarps - 1) / kWarps;  // blocks of a warp
  // Windows of x of a worker, and chunks of each.
  static constexpr int kChunksOfWindow = V::kWindowSize / V::kChunkSize, kNumWindows = kChunks / kChunksOfWindow;
  static_assert(kChunks % kChunksOfWindow == 0);
  // Blocks that a warp multiplies together, so that it reads x once for them: where that, and not memory, is the limit.
  static constexpr int kTogether = V::kBatch > 16 && kHeld == 2 ? 2 : 1;
  // Rows of x side by side begin in other banks, but in a box, which is swizzled, and has 64 columns of all rows after
  // the other.
  static constexpr int kPitch =
      V::kBoxesOfX ? kBoxRowBytes : (V::kStaged ? V::kSize : V::kChunkSize) * int(sizeof(T)) + 16;
  static constexpr int kBlockPitch = V::kBoxesOfX ? V::kXRows * kBoxRowBytes : kBoxRowBytes;  // to the next 64 columns
  static constexpr int kBytesOfX = V::kXRows * V::kWindowSize * int(sizeof(T));               // of a box
  static constexpr int kWindowBytes =
      V::kBoxesOfX ? (kBytesOfX + kBoxAlignment - 1) / kBoxAlignment * kBoxAlignment : V::kBatch * kPitch;
  // Sums of a block in shared memory, [row of x][row of weights], without conflicts of banks.
  static constexpr int kBlockFloats = 8 * kColumns * kSumPitch;
  static constexpr int kSumBlocks = V::kByWarpgroups      ? (kMaxBoxes == 1 ? kWarpgroups : 1) * kMaxBlocks
                                    : kMaxBlocks > kWarps ? kMaxBlocks
                                                          : kWarps;
  static constexpr int kSumBytes = kSumBlocks * kBlockFloats * 4;
  // Sums follow x where it is whole, and take the windows' place otherwise.
  static constexpr int kSumsOffset = V::kStaged ? (kWindowBytes + 127) / 128 * 128 : 0;
  static constexpr int kXBytes = V::kStaged ? kWindowBytes : kWindows * kWindowBytes;
  // Boxes, and so the sums in their place, begin up to kBoxAlignment bytes behind what is staged.
  static constexpr int kStagedBytes =
      V::kStaged ? kSumsOffset + kSumBytes
                 : (kXBytes > kSumBytes ? kXBytes : kSumBytes) + (V::kBoxesOfX ? kBoxAlignment : 0);
};

// In which order a worker takes its windows of x; one is a chunk of K, but where warpgroups multiply.
template <class V>
struct Chunks {
  using S = RowsShape<V>;
  uint32_t begin, first;

  MPK_DEVICE explicit Chunks(uint32_t worker)
      : begin(worker % V::kSplit * S::kNumWindows), first(worker / V::kSplit % S::kChunks / S::kChunksOfWindow) {}
  MPK_DEVICE uint32_t at(uint32_t turn) const { return begin + chunk_at(turn, first, S::kNumWindows); }
};

// How the warps share out the blocks of a pass: each has `held` of them, or `sharers` of them take turns at one. All
// are few, so divisions, which take longer than what they are for, are comparisons.
template <class V>
struct Shares {
  using S = RowsShape<V>;
  static constexpr uint32_t kMostSharers = V::kByWarpgroups         ? (S::kMaxBoxes == 1 ? kWarpgroups : 1)
                                           : S::kWarps < S::kChunks ? S::kWarps
                                                                    : S::kChunks;
  uint32_t blocks, sharers = 1, held = 1, warps;  // warps: those that have work, or of a sharer's turn

  // Of the boxes of so many tiles.
  MPK_DEVICE explicit Shares(uint32_t tiles)
      : blocks((tiles * V::kParts * S::kBlocksOfBox + S::kBoxesOfBlock - 1) / S::kBoxesOfBlock), warps(blocks) {
    if (V::kByWarpgroups) {
      sharers = kMostSharers;
    } else if (S::kMaxBlocks <= S::kWarps || blocks <= S::kWarps) {
      sharers = times<2, kMostSharers>(blocks, S::kWarps) + 1;
    } else {
      held = (blocks + S::kWarps - 1) / S::kWarps;
#pragma unroll
      for (uint32_t h = 2; h <= S::kHeld; h++)
        if (held == h) warps = (blocks + h - 1) / h;
    }
  }
  // Whose turn it is that a warp has; none's, if it is not less than `sharers`.
  MPK_DEVICE uint32_t turn(uint32_t warp) const { return times<1, kMostSharers>(warps, warp); }
  // Number `i` of those that warp `first` of a turn holds. Those multiplied together come one after the other: a warp
  // that waited for one far behind would keep the slots between from being filled.
  template <int together>
  MPK_DEVICE uint32_t block(uint32_t first, uint32_t i) const {
    return together == 1 ? first + i * warps : first * held + i;
  }

 private:
  // How many of the numbers from `first` to `last` times n are at most `limit`.
  template <uint32_t first, uint32_t last>
  MPK_DEVICE static uint32_t times(uint32_t n, uint32_t limit) {
    uint32_t count = 0;
#pragma unroll
    for (uint32_t i = first; i <= last; i++) count += i * n <= limit;
    return count;
  }
};

// Adds the products of a chunk of some blocks. `upper` and `lower`: rows 0 to 7 and 8 to 15 of a block, 128 bytes from
// row to row and box_rows rows from 64 columns to the next, in the copy engine's swizzle, in which bits 4 to 6 of an
// address are those of the row, added without carry. `x`: the chunk's columns of row 0, S::kPitch bytes from row to
// row.
template <class V, int blocks>
MPK_DEVICE void multiply_blocks(SumFragment (*sums)[RowsShape<V>::kColumns], const uint8_t* const (&upper)[blocks],
                                const uint8_t* const (&lower)[blocks], const uint8_t* x, int blocks_of_64, int lane) {
  using S = RowsShape<V>;
  using T = typename V::T;
  constexpr int kColumns = S::kColumns;
  // Of x four matrices are loaded at once: two columns of sums, or, where there is one, two steps along K.
  constexpr int kPair = kColumns == 1 ? 1 : 2, kSteps = 2 / kPair, kMatrices = 4 / kPair;
  constexpr int kLast = (kColumns - 1) / kPair * kPair;
  const uint32_t row = lane % 8, matrix = lane / 8, piece = matrix % kMatrices;
  // A lane's first 16 bytes; where they are swizzled, those 32 i bytes further along the row have another address
  // but for no carry.
  ptx::SharedAddress weights[blocks];
#pragma unroll
  for (int j = 0; j < blocks; j++)
    weights[j] = ptx::smem_addr(matrix % 2 == 0 ? upper[j] : lower[j]) + row * 128 + (matrix / 2 ^ row) * 16;
  const auto place_of_x = [&](uint32_t r) {
    return ptx::smem_addr(x) + r * S::kPitch + (V::kBoxesOfX ? r % 8 ^ piece : piece) * 16;
  };
  const uint32_t first = 8 * (matrix / kMatrices) + row, last = 8 * kLast + first;
  // Rows that there are not repeat the last: their products go nowhere.
  ptx::SharedAddress first_x = place_of_x(kLast == 0 ? min(first, uint32_t(V::kBatch - 1)) : first);
  ptx::SharedAddress last_x = place_of_x(min(last, uint32_t(V::kBatch - 1)));
  constexpr bool kHasAll = V::kBatch % (8 * kPair) == 0;
  // A product takes the sums of the one two or four before it, where there are registers for so many chains.
  constexpr int kChains = blocks > 1 || kColumns > 4 ? 1 : kColumns == 1 ? 4 : 2;
  SumFragment apart[kChains > 1 ? kChains - 1 : 1][kColumns] = {};
  struct Factors {
    ptx::Quad weights[kSteps][blocks], x[(kColumns + kPair - 1) / kPair];
  };
  // Of 16 columns, or of 32, from number i on of the 64 at hand.
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
  // Products that take each other's sums stand apart: the compiler leaves them in this order.
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
  // Where there are registers for them, the next factors are on their way while these are multiplied; but with up to
  // eight long rows of x that is slower, see docs/experiments.md.
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

// Brings x's columns, chunk after chunk: what the group's last warps do, each a few rows. False when the launch was
// given up.
template <class V, class C>
MPK_DEVICE bool bring_windows(C& c, const Job& job, uint8_t* windows) {
  using S = RowsShape<V>;
  using T = typename V::T;
  constexpr int kVec = kVecSize<T>;
  const Chunks<V> chunks(c.worker(job));
#pragma unroll 1
  for (uint32_t turn = 0; turn < S::kChunks; turn++) {
    const int chunk = chunks.at(turn);
    const uint32_t number = c.window + turn, place = number % kWindows;
    uint64_t* full = &c.windows().full[place];
    if (number >= kWindows && !wait_barrier(c.shared.watchdog, &c.windows().empty[place], (number / kWindows - 1) & 1,
                                            c.phase, WarpRole::kConsumer, Waiting::kFreeSlot, place, number))
      return false;
    const int pieces = min(V::kChunkSize, V::kSize - chunk * V::kChunkSize) / kVec;  // of a row, of 16 bytes
    const T* x = V::x(job) + chunk * V::kChunkSize;
    const bool is_aligned = reinterpret_cast<uint64_t>(x) % kAccessBytes == 0;  // a call's tensor may begin anywhere
    const int first = c.warp - S::kWarps;
    const T* from = x + first * V::kPitchX;
    uint8_t* to = windows + place * S::kWindowBytes + first * S::kPitch;
    if (is_aligned) {
      // A lone warp takes some cycles for each instruction, so there are few of them.
      const T* piece = from + c.lane * kVec;
      uint8_t* copied = to + c.lane * 16;
#pragma unroll
      for (int row = 0; row < V::kBatch; row += kBringingWarps) {
        if (first + row < V::kBatch)
#pragma unroll
          for (int p = 0; p < V::kChunkSize / kVec; p += 32)
            if (p + c.lane < pieces) ptx::copy_async_16(copied + row * S::kPitch + p * 16, piece + p * kVec);
        piece += kBringingWarps * V::kPitchX;
      }
    } else {
      for (int row = first; row < V::kBatch; row += kBringingWarps) {
        for (int e = c.lane; e < pieces * kVec; e += 32) reinterpret_cast<T*>(to)[e] = from[e];
        from += kBringingWarps * V::kPitchX;
        to += kBringingWarps * S::kPitch;
      }
    }
    if (is_aligned)
      ptx::copy_async_arrive(full);
    else
      ptx::mbar_arrive(full);
  }
  return true;
}

// The same as boxes: the first of these warps has the copy engine bring them, and arrives for all. It stays until they
// have landed, which must not be in the shared memory of a CTA that has exited.
template <class V, class C>
MPK_DEVICE bool bring_boxes(C& c, const Job& job, uint8_t* windows) {
  using S = RowsShape<V>;
  if (c.warp != S::kWarps) return true;
  const void* map = V::map_of_x(job);
  const Chunks<V> chunks(c.worker(job));
  ptx::fence_proxy_async();  // what others have written, in memory and in the windows' place
  uint32_t turn = 0;
#pragma unroll 1
  for (; turn < S::kNumWindows; turn++) {
    const uint32_t number = c.window + turn, place = number % kWindows;
    uint64_t* full = &c.windows().full[place];
    if (number >= kWindows &&
        !__all_sync(~0u, wait_barrier(c.shared.watchdog, &c.windows().empty[place], (number / kWindows - 1) & 1,
                                      c.phase, WarpRole::kConsumer, Waiting::kFreeSlot, place, number)))
      break;
    if (c.lane == 0) {
      ptx::mbar_arrive_expect(full, S::kBytesOfX);
      ptx::box_load(windows + place * S::kWindowBytes, map, 0, chunks.at(turn) * (V::kWindowSize / kBoxColumns), full,
                    ptx::kEvictNormal);
    } else {
      ptx::mbar_arrive(full);
    }
#pragma unroll
    for (int i = 1; i < kBringingWarps; i++) ptx::mbar_arrive(full);
  }
#pragma unroll 1
  for (uint32_t number = c.window + (turn > kWindows ? turn - kWindows : 0); number < c.window + turn; number++)
    while (!ptx::mbar_test(&c.windows().full[number % kWindows], number / kWindows & 1)) {
    }
  return turn == S::kNumWindows;
}

// Rows of x into shared memory, through the row tasks in front of the linear: each by a warp or by several.
template <class V, class C, class Group>
MPK_DEVICE bool stage_whole(C& c, const Job& job, Group group, int first, int step, uint8_t* x) {
  using Chain = typename V::template Chain<Group>;
  using T = typename V::T;
  if (!V::kEarly && !c.await()) return false;
  if (first >= V::kBatch) return c.await();
  // Workers begin with different rows, since all read the same ones at the same time.
  const auto row = [](int i) { return (i + blockIdx.x) % V::kBatch; };
  Chain chain(group, job, row(first));
  if (V::kEarly && !c.await()) return false;
  for (int i = first;;) {
    const uint32_t r = row(i);
    chain.bring(group, job, r, reinterpret_cast<T*>(x + r * RowsShape<V>::kPitch));
    if ((i += step) >= V::kBatch) return true;
    chain = Chain(group, job, row(i));
  }
}

// Adds the products of a chunk of `count` blocks, from number `block` on of a chunk's `boxes` boxes, of which the first
// is ring entry `first`. False when the launch was given up.
template <class V, int count, class C>
MPK_DEVICE bool take_blocks(C& c, SumFragment (*sums)[RowsShape<V>::kColumns], uint32_t first, uint32_t block,
                            uint32_t boxes, const uint8_t* x, int blocks_of_64) {
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
  multiply_blocks<V, count>(sums, upper, lower, x, blocks_of_64, c.lane);
#pragma unroll
  for (int j = 0; j < count; j++) {
    const uint32_t entry = first + (block + j) * S::kBoxesOfBlock;
    c.ring.release(entry);
    if (has_lower(j)) c.ring.release(entry + 1);
  }
  return true;
}

// One pass over the worker's part of K: the sums of some tiles, from ring entry c.entry on, into shared memory.
template <class V, class C>
MPK_DEVICE bool sum_boxes(C& c, const Job& job, uint32_t tiles, const Shares<V>& shares, uint8_t* staged) {
  using S = RowsShape<V>;
  using T = typename V::T;
  const uint32_t boxes = tiles * V::kParts;
  const uint32_t warp = c.warp, turn = shares.turn(warp), first = warp - turn * shares.warps;
  const Chunks<V> chunks(c.worker(job));
  const bool brings = !V::kStaged && warp >= S::kWarps;
  const bool has_work = !brings && turn < shares.sharers;
  SumFragment sums[S::kHeld][S::kColumns] = {};
  if (brings) {
    if constexpr (V::kBoxesOfX)
      c.failed |= !bring_boxes<V>(c, job, staged);
    else
      c.failed |= !bring_windows<V>(c, job, staged);
  } else if (has_work || !V::kStaged) {
    uint32_t next = turn;  // the warp's next chunk
#pragma unroll 1
    for (uint32_t at = 0; at < S::kChunks; at++) {
      const bool mine = has_work && at == next;
      if (V::kStaged && !mine) continue;
      const uint32_t chunk = chunks.at(at);
      const uint32_t number = c.window + at, place = number % kWindows;
      const uint8_t* x = staged + (V::kStaged ? chunk * (V::kChunkSize * int(sizeof(T))) : place * S::kWindowBytes);
      if (!V::kStaged && !ptx::mbar_peek(&c.windows().full[place], number / kWindows & 1) &&
          !wait_barrier(c.shared.watchdog, &c.windows().full[place], number / kWindows & 1, c.phase,
                        WarpRole::kConsumer, Waiting::kFullSlot, place, number)) {
        c.failed = true;
        break;
      }
      if (mine) {
        next += shares.sharers;
        const int blocks_of_64 = min(V::kChunkSize, V::kSize - int(chunk) * V::kChunkSize) / 64;
        const uint32_t entry = c.entry + at * boxes;
        if constexpr (S::kTogether == 2) {
          const uint32_t block = shares.template block<2>(first, 0);
          c.failed = !(shares.held == 2 && block + 1 < shares.blocks
                           ? take_blocks<V, 2>(c, sums, entry, block, boxes, x, blocks_of_64)
                           : take_blocks<V, 1>(c, sums, entry, block, boxes, x, blocks_of_64));
        } else {
#pragma unroll
          for (int h = 0; h < S::kHeld && !c.failed; h++) {
            const uint32_t block = shares.template block<1>(first, h);
            if (block >= shares.blocks) break;
            c.failed = !take_blocks<V, 1>(c, sums + h, entry, block, boxes, x, blocks_of_64);
          }
        }
        if (c.failed) break;
      }
      if constexpr (!V::kStaged) {
        __syncwarp();
        if (c.lane == 0) ptx::mbar_arrive(&c.windows().empty[place]);
      }
    }
  }
  c.entry += S::kChunks * boxes;
  if constexpr (!V::kStaged) {
    c.window += S::kChunks;
    if (!c.sync()) return false;  // the windows are no longer read
  }
  if (has_work) {
    float* to = reinterpret_cast<float*>(staged + S::kSumsOffset);
#pragma unroll
    for (int h = 0; h < S::kHeld; h++) {
      const uint32_t block = shares.template block<S::kTogether>(first, h);
      if (h >= shares.held || block >= shares.blocks) break;
      float* mine = to + (turn * shares.blocks + block) * S::kBlockFloats + c.lane / 4 + c.lane % 4 * 2 * kSumPitch;
#pragma unroll
      for (int n = 0; n < S::kColumns; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) mine[(8 * n + i % 2) * kSumPitch + i / 2 * 8] = sums[h][n][i];
    }
  }
  return c.sync();
}

// ---- by warpgroups

// The products of a warpgroup: of a chunk's `boxes` boxes every kWarpgroups'th from number `first` on, or, where there
// is one, of every kWarpgroups'th chunk. A warp that gives up a wait goes on with whatever stands in the ring, since
// the others of its warpgroup cannot multiply without it.
template <class V, class C>
MPK_DEVICE void multiply_together(C& c, WarpgroupSums<V::kXRows> (&sums)[RowsShape<V>::kHeld], uint32_t boxes,
                                  uint32_t first, const uint8_t* windows) {
  using S = RowsShape<V>;
  constexpr bool kTakesTurns = S::kMaxBoxes == 1;
  uint32_t entry = 0;  // the one that is multiplied, from the second on
  bool is_first = true;
#pragma unroll 1
  for (uint32_t turn = 0; turn < S::kNumWindows; turn++) {
    const uint32_t number = c.window + turn, place = number % kWindows;
    if (!c.failed && !ptx::mbar_peek(&c.windows().full[place], number / kWindows & 1))
      c.failed = !wait_barrier(c.shared.watchdog, &c.windows().full[place], number / kWindows & 1, c.phase,
                               WarpRole::kConsumer, Waiting::kFullSlot, place, number);
    const uint8_t* x = windows + place * S::kWindowBytes;
#pragma unroll 1
    for (uint32_t i = kTakesTurns ? (first + turn * S::kChunksOfWindow) % kWarpgroups : 0; i < S::kChunksOfWindow;
         i += kTakesTurns ? kWarpgroups : 1) {
      const uint32_t chunk = turn * S::kChunksOfWindow + i;
#pragma unroll
      for (int h = 0; h < S::kHeld; h++) {
        const uint32_t box = kTakesTurns ? 0 : first + h * kWarpgroups, next = c.entry + chunk * boxes + box;
        if (box >= boxes) break;
        if (!c.failed && !c.ring.has(next)) {
          // A call: it may use registers that products under way would write.
#pragma unroll
          for (int i = 0; i < S::kHeld; i++) ptx::await_sums(sums[i]);
          c.failed = !c.ring.wait_longer(next, c.phase);
        }
        ptx::begin_products();
        mpk::multiply_blocks<typename V::T, V::kXRows>(sums[h], c.ring.slot(next), x + i * S::kBlockPitch);
        ptx::commit_products();
        ptx::await_products<1>();
        if (!is_first) c.ring.release_share(entry);
        is_first = false;
        entry = next;
      }
    }
    ptx::await_products<0>();
    __syncwarp();
    if (c.lane == 0) ptx::mbar_arrive(&c.windows().empty[place]);
  }
#pragma unroll
  for (int h = 0; h < S::kHeld; h++) ptx::await_sums(sums[h]);
  if (!is_first) c.ring.release_share(entry);
}

// One pass over the worker's part of K, see sum_boxes.
template <class V, class C>
MPK_DEVICE bool sum_together(C& c, const Job& job, uint32_t boxes, uint8_t* staged) {
  using S = RowsShape<V>;
  constexpr bool kTakesTurns = S::kMaxBoxes == 1;
  static_assert(V::kBoxesOfX && S::kWarps == kWarpgroups * kWarpgroupWarps && V::kChunkSize == kBoxColumns);
  WarpgroupSums<V::kXRows> sums[S::kHeld] = {};
  const uint32_t group = c.warp / kWarpgroupWarps, of_box = c.warp % kWarpgroupWarps;
  const bool brings = c.warp >= S::kWarps;
  if (brings)
    c.failed |= !bring_boxes<V>(c, job, staged);
  else
    multiply_together<V>(c, sums, boxes, group, staged);
  c.entry += S::kChunks * boxes;
  c.window += S::kNumWindows;
  if (!c.sync()) return false;  // the windows are no longer read
  if (!brings && of_box < S::kBlocksOfBox) {
    float* to = reinterpret_cast<float*>(staged + S::kSumsOffset) + c.lane / 4 + c.lane % 4 * 2 * kSumPitch;
#pragma unroll
    for (int h = 0; h < S::kHeld; h++) {
      const uint32_t box = group + h * kWarpgroups;  // or the turn
      if (!kTakesTurns && box >= boxes) break;
      float* mine = to + (box * S::kBlocksOfBox + of_box) * S::kBlockFloats;
#pragma unroll
      for (int n = 0; n < S::kColumns; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) mine[(8 * n + i % 2) * kSumPitch + i / 2 * 8] = sums[h][4 * n + i];
    }
  }
  return c.sync();
}

// A result of a pass: row `r` of x with row `n` of a segment. Warps take a strip of 32 rows of weights with a row of x
// at a time: number c.warp, c.warp + kConsumerWarps, ..., all rows of x with a strip, then those with the next.
template <class V>
struct RowsResult {
  uint32_t local, r;  // local: the row of weights in the pass
  uint32_t n = 0;
  int segment = 0;
  bool is_there = false;

  MPK_DEVICE RowsResult(Span tiles, uint32_t number, uint32_t lane)
      : RowsResult(tiles, number % V::kBatch, number / V::kBatch, lane) {}
  MPK_DEVICE RowsResult(Span tiles, uint32_t r, uint32_t strip, uint32_t lane) : local(strip * 32 + lane), r(r) {
    if (local >= (tiles.end - tiles.begin) * V::kBoxRows) return;
    const uint32_t tile = tiles.begin + local / V::kBoxRows;
    segment = segment_of<V>(tile);
    n = (tile - V::first_tile(segment)) * V::kBoxRows + local % V::kBoxRows;
    is_there = n < V::num_rows(segment);
  }
  MPK_DEVICE typename V::Extra preload(const Job& job) const {
    if (!is_there) return {};
    return V::preload(job, segment, r, n);
  }
};

// The sums of a pass's tiles, as the worker's warps have left them.
template <class V>
struct PassSums {
  using S = RowsShape<V>;
  Shares<V> shares;
  const float* from;

  MPK_DEVICE PassSums(const Shares<V>& shares, const uint8_t* staged)
      : shares(shares), from(reinterpret_cast<const float*>(staged + S::kSumsOffset)) {}

  // Of row `r` of x with row `local` of a part of the weights.
  MPK_DEVICE float at(uint32_t r, uint32_t local, int part) const {
    const uint32_t box = local / V::kBoxRows * V::kParts + part, row = local % V::kBoxRows;
    const uint32_t block = box * S::kBlocksOfBox / S::kBoxesOfBlock + row / kWarpRows;
    const float* sum =
        from + block * S::kBlockFloats + r * kSumPitch + box % S::kBoxesOfBlock * V::kBoxRows + row % kWarpRows;
    float each[Shares<V>::kMostSharers], total = 0;  // read together
#pragma unroll
    for (uint32_t turn = 0; turn < Shares<V>::kMostSharers; turn++)
      each[turn] = turn < shares.sharers ? sum[turn * shares.blocks * S::kBlockFloats] : 0;
#pragma unroll
    for (float one : each) total += one;
    return total;
  }
};

// What the sums of a pass's tiles become. `extra`: of the thread's first result.
template <class V, class C>
MPK_DEVICE void finish_tiles(C& c, const Job& job, Span tiles, const PassSums<V>& sums, typename V::Extra extra) {
  const uint32_t strips = ((tiles.end - tiles.begin) * V::kBoxRows + 31) / 32;
#pragma unroll 1
  for (uint32_t number = c.warp; number < strips * V::kBatch; number += kConsumerWarps) {
    const RowsResult<V> result(tiles, number, c.lane);
    if (number != c.warp) extra = result.preload(job);
    if (!result.is_there) continue;
    float results[V::kParts];
#pragma unroll
    for (int p = 0; p < V::kParts; p++) results[p] = sums.at(result.r, result.local, p);
    V::finish(c, job, result.segment, result.r, result.n, results, extra);
  }
}

// Where workers share tiles each finishes those rows of x whose number modulo V::kSplit is its part's, and sends its
// sums of the other rows to those that finish them: as tagged words, of two rows of x each. Four such rows are a quad,
// two words that a warp sends, or polls, of 32 rows of weights (a strip) at a time.
template <class V>
struct Meeting {
  static_assert(V::kParts == 1 && V::kBatch % (4 * V::kSplit) == 0);
  static constexpr uint32_t kQuads = V::kBatch / 4, kOthers = V::kSplit - 1;
  uint8_t* partials;  // of the first of these workers
  uint32_t part, rows, strips, tag;

  template <class C>
  MPK_DEVICE Meeting(const C& c, const Job& job, Span tiles)
      : part(c.worker(job) % V::kSplit), rows((tiles.end - tiles.begin) * V::kBoxRows), strips((rows + 31) / 32) {
    partials = V::partials(job) + uint64_t(c.worker(job) - part) * V::kPartialBytes;
    tag = tag_of(c);
  }
  // Quad `quad` is of the part that its number modulo kSplit says; its rows of x.
  MPK_DEVICE static uint32_t row(uint32_t quad, int i) {
    return quad % V::kSplit + (quad / V::kSplit * 4 + i) * V::kSplit;
  }
  // A lane's two words of a quad and strip, as a part has sent them; 32 words from the first to the second.
  MPK_DEVICE ulonglong2* words(uint32_t from, uint32_t quad, uint32_t strip, uint32_t lane) const {
    return reinterpret_cast<ulonglong2*>(partials + from * V::kPartialBytes) + (quad * strips + strip) * 64 + lane;
  }
};

template <class V, class C>
MPK_DEVICE void send_sums(C& c, const Meeting<V>& meeting, const PassSums<V>& sums) {
#pragma unroll 1
  for (uint32_t number = c.warp; number < meeting.kQuads * meeting.strips; number += kConsumerWarps) {
    const uint32_t quad = number % meeting.kQuads, strip = number / meeting.kQuads, local = strip * 32 + c.lane;
    if (quad % V::kSplit == meeting.part || local >= meeting.rows) continue;
    ulonglong2* to = meeting.words(meeting.part, quad, strip, c.lane);
    const auto sum = [&](int i) { return sums.at(meeting.row(quad, i), local, 0); };
#pragma unroll
    for (int i = 0; i < 2; i++) ptx::store_relaxed_gpu(to + 32 * i, tagged(sum(2 * i), sum(2 * i + 1), meeting.tag));
  }
}

// What the others have sent of a quad and strip, all of it in flight together. False when the launch was given up.
template <class V, class C>
MPK_DEVICE bool receive_sums(C& c, const Meeting<V>& meeting, uint32_t quad, uint32_t strip,
                             ulonglong2 (&words)[V::kSplit - 1][2]) {
  const bool is_there = strip * 32 + c.lane < meeting.rows;
  uint64_t since = 0;
  for (uint32_t polls = 1;; polls++) {
#pragma unroll
    for (uint32_t o = 0; o < meeting.kOthers; o++) {
      const ulonglong2* from = meeting.words(o < meeting.part ? o : o + 1, quad, strip, c.lane);
#pragma unroll
      for (int i = 0; i < 2; i++)
        words[o][i] = is_there ? ptx::load_relaxed_gpu(from + 32 * i) : tagged(0u, 0u, meeting.tag);
    }
    uint32_t missing = 0;
#pragma unroll
    for (uint32_t o = 0; o < meeting.kOthers; o++)
#pragma unroll
      for (int i = 0; i < 2; i++) missing |= differing(words[o][i], meeting.tag);
    if (missing == 0) return true;
    if ((polls & 4095) == 0 && (since = keep_polling(c.shared.watchdog, c.phase, since)) == 0) return false;
  }
}

// finish_tiles where workers share them. Sums are added in the order of the parts.
template <class V, class C>
MPK_DEVICE void finish_shared(C& c, const Job& job, Span tiles, const PassSums<V>& sums) {
  const Meeting<V> meeting(c, job, tiles);
  send_sums(c, meeting, sums);
  constexpr uint32_t kMine = Meeting<V>::kQuads / V::kSplit;
#pragma unroll 1
  for (uint32_t number = c.warp; number < kMine * meeting.strips; number += kConsumerWarps) {
    const uint32_t quad = number % kMine * V::kSplit + meeting.part, strip = number / kMine;
    const auto result_of = [&](int i) { return RowsResult<V>(tiles, meeting.row(quad, i), strip, c.lane); };
    typename V::Extra extras[4];
#pragma unroll
    for (int i = 0; i < 4; i++) extras[i] = result_of(i).preload(job);
    ulonglong2 words[meeting.kOthers][2];
    if (!receive_sums(c, meeting, quad, strip, words)) {
      c.failed = true;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const RowsResult<V> result = result_of(i);
      if (!result.is_there) continue;
      const float mine = sums.at(result.r, result.local, 0);
      float results[1] = {meeting.part == 0 ? mine : 0.0f};
#pragma unroll
      for (uint32_t o = 0; o < meeting.kOthers; o++) {
        results[0] += float_of(i % 2 == 0 ? words[o][i / 2].x : words[o][i / 2].y);
        if (o + 1 == meeting.part) results[0] += mine;
      }
      V::finish(c, job, result.segment, result.r, result.n, results, extras[i]);
    }
  }
}

template <class V, class C>
MPK_DEVICE void compute_rows(C& c, const Job& job) {
  static_assert(RowsVariant<V, C>);
  using S = RowsShape<V>;
  static_assert(S::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  static_assert(S::kBoxBytes <= C::Config::kSlotBytes);
  static_assert(V::kSplit == 1 || C::Config::kNumWorkers / V::kSplit * V::kPassTiles >= V::kNumTiles,
                "sums of another pass would take the place of those that are polled");
  constexpr int kUnaligned = C::Config::kStagedOffset % kBoxAlignment;
  uint8_t* staged = c.staged() + (V::kBoxesOfX && kUnaligned != 0 ? kBoxAlignment - kUnaligned : 0);
  const Span tiles = shared_span(V::kNumTiles, c.worker(job), V::kSplit, C::Config::kNumWorkers);
  const auto pass_from = [&](uint32_t tile) { return Span{tile, min(tiles.end, tile + V::kPassTiles)}; };
  const auto preload = [&](Span pass) { return RowsResult<V>(pass, c.warp, c.lane).preload(job); };
  typename V::Extra extra{};
  constexpr bool kPreloads = V::kHasExtra && V::kSplit == 1;
  if constexpr (V::kEarly && kPreloads) extra = preload(pass_from(tiles.begin));
  if constexpr (!V::kStaged) {
    if (!c.await()) return;
  } else {
    constexpr int kWarps = warps_of_row(V::kBatch, kConsumerWarps);
    bool ok;
    if constexpr (kWarps == 1) {
      ok = stage_whole<V>(c, job, WarpThreads<C>(c), c.warp, kConsumerWarps, staged);
    } else {
      const WarpGroup<C, kWarps> group(c);
      ok = stage_whole<V>(c, job, group, group.number, V::kBatch, staged);
    }
    if (!ok || !c.sync()) return;
    c.stamp(&PhaseStamps::staged);
  }
#pragma unroll 1
  for (uint32_t first = tiles.begin; first < tiles.end; first += V::kPassTiles) {
    const Span pass = pass_from(first);
    if constexpr (kPreloads)
      if (!V::kEarly || first != tiles.begin) extra = preload(pass);
    const Shares<V> shares(pass.end - pass.begin);
    if constexpr (V::kByWarpgroups) {
      if (!sum_together<V>(c, job, (pass.end - pass.begin) * V::kParts, staged)) return;
    } else {
      if (!sum_boxes<V>(c, job, pass.end - pass.begin, shares, staged)) return;
    }
    const PassSums<V> sums(shares, staged);
    if constexpr (V::kSplit > 1)
      finish_shared<V>(c, job, pass, sums);
    else
      finish_tiles<V>(c, job, pass, sums, extra);
    if (pass.end < tiles.end && !c.sync()) return;
  }
}

}  // namespace mpk::linear
