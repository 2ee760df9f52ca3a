// How a worker goes through linears with several rows of x, see linear_rows.cuh.
#pragma once

#include "torch_mpk/device/tasks/linear_shape.cuh"
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
  // Tiles that a worker takes at a time, and of which it has the sums in shared memory at a time, where these are
  // fewer a box of each warpgroup; workers that share them, see finish_shared.
  requires Constants<int, V::kPassTiles, V::kTurnTiles, V::kSplit>;
  // x stands in shared memory, after row tasks: whole, or, where workers share tiles, the worker's columns. Otherwise
  // it is kPitchX elements from row to row, and comes in windows, or has a map, by which windows are boxes.
  requires Constants<bool, V::kStaged, V::kRowTasks, V::kBoxesOfX> && Constants<int, V::kPitchX>;
  // What chains and extras fetch first is known before the phase's events.
  requires Constants<bool, V::kEarly>;
  // Warpgroups multiply the boxes, each of one block of 64 columns or of several. Columns of a window, and the rows it
  // has of x: those that the tensor cores take.
  requires Constants<bool, V::kByWarpgroups> && Constants<int, V::kWindowSize, V::kXRows>;
  // A norm's rows are what the job makes; or what x is, but for a factor for each row. See linear_rows_norm.cuh.
  requires Constants<bool, V::kEndsWithNorm, V::kScalesRows>;
};

// Where sums of squares of the rows are left, so many of each.
template <class V>
concept LeavesRowSums = Constants<int, V::kRowSums> && requires(const Job& job) {
  { V::row_sums(job) } -> Same<float*>;
  V::fetch_factor(job, 0u);  // to L2, with those behind
};
// And where those of x's rows are.
template <class V>
concept FindsRowSums = Constants<int, V::kSumsOfX> && requires(const Job& job) {
  { V::kEps } -> Same<const float&>;
  { V::sums_of_x(job) } -> Same<float*>;
};

template <class V, class C>
concept RowsVariant =
    RowsSizes<V> && Results<V, C> && (V::kSplit == 1 || Meets<V>) && (!V::kEndsWithNorm || LeavesRowSums<V>) &&
    (!V::kScalesRows || FindsRowSums<V>) && requires(const Job& job, int i) {
      { V::first_tile(i) } -> Same<uint32_t>;  // of segment i
      { V::num_rows(i) } -> Same<uint32_t>;
      { V::x(job) } -> Same<const typename Choose<V::kStaged, uint16_t, typename V::T>::Type*>;  // staged: polled
      { V::map_of_x(job) } -> Same<const void*>;
    };

// Bytes of a weight: quantised ones have one, others are of x's type.
template <class V>
constexpr int weight_bytes() {
  if constexpr (requires { V::kIsE4M3; }) {
    return 1;
  } else {
    return sizeof(typename V::T);
  }
}

// What follows from a variant.
template <RowsSizes V>
struct RowsShape {
  using T = typename V::T;
  static constexpr int kColumns = (V::kXRows + 7) / 8;  // fragments of sums that a block has
  // One or two, where a warp has a block; a warpgroup has the blocks of a box.
  static constexpr int kBoxesOfBlock = V::kByWarpgroups ? 1 : kWarpRows / V::kBoxRows;
  static constexpr int kBlocksOfBox = V::kByWarpgroups ? (V::kBoxRows + kWarpRows - 1) / kWarpRows : 1;
  static constexpr int kBoxBytes = V::kBoxRows * V::kChunkSize * weight_bytes<V>();
  static constexpr int kChunks = (V::kSize + V::kChunkSize - 1) / V::kChunkSize / V::kSplit;    // of a worker
  static constexpr int kWarps = V::kStaged ? kConsumerWarps : kConsumerWarps - kBringingWarps;  // that multiply
  static constexpr int kMaxBoxes = V::kPassTiles * V::kParts;
  static constexpr int kMaxBlocks = (kMaxBoxes * kBlocksOfBox + kBoxesOfBlock - 1) / kBoxesOfBlock;
  static constexpr int kHeld = V::kByWarpgroups ? (kMaxBoxes + kWarpgroups - 1) / kWarpgroups
                                                : (kMaxBlocks + kWarps - 1) / kWarps;  // blocks of a warp
  // Windows of x of a worker, and chunks of each.
  static constexpr int kChunksOfWindow = V::kWindowSize / V::kChunkSize, kNumWindows = kChunks / kChunksOfWindow;
  static_assert(kChunks % kChunksOfWindow == 0);
  static constexpr int kWindowsHeld = V::kByWarpgroups ? windows_held(V::kWindowSize) : kWindows;
  // Blocks that a warp multiplies together, so that it reads x once for them: where that, and not memory, is the limit.
  static constexpr int kTogether = V::kBatch > 16 && kHeld == 2 ? 2 : 1;
  // Rows of x side by side begin in other banks, but in a box, which is swizzled, and has 64 columns of all rows after
  // the other.
  static constexpr int kPitch =
      V::kBoxesOfX ? kBoxRowBytes : (V::kStaged ? V::kSize / V::kSplit : V::kChunkSize) * int(sizeof(T)) + 16;
  static_assert(!V::kBoxesOfX || V::kXRows % 8 == 0, "blocks of 64 columns would be swizzled differently");
  static constexpr int kBlockPitch = V::kBoxesOfX ? V::kXRows * kBoxRowBytes : kBoxRowBytes;  // to the next 64 columns
  static constexpr int kBytesOfX = V::kXRows * V::kWindowSize * int(sizeof(T));               // of a box
  static constexpr int kWindowBytes =
      V::kBoxesOfX ? (kBytesOfX + kBoxAlignment - 1) / kBoxAlignment * kBoxAlignment : V::kBatch * kPitch;
  // Sums of a block in shared memory, [row of x][row of weights], without conflicts of banks.
  static constexpr int kBlockFloats = 8 * kColumns * kSumPitch;
  static constexpr int kSumBlocks = V::kByWarpgroups      ? (kMaxBoxes == 1 ? kWarpgroups : 1) * kMaxBlocks
                                    : kMaxBlocks > kWarps ? kMaxBlocks
                                                          : kWarps;
  static constexpr int kXBytes = V::kStaged ? kWindowBytes : kWindowsHeld * kWindowBytes;
  static constexpr bool kInTurns = V::kTurnTiles < V::kPassTiles;
  static_assert(!kInTurns ||
                (V::kByWarpgroups && V::kTurnTiles * V::kParts == kWarpgroups && V::kSplit == 1 && !V::kEndsWithNorm));
  static constexpr int kSumBytes = (kInTurns ? kWarpgroups * kBlocksOfBox : kSumBlocks) * kBlockFloats * 4;
  // Sums follow x where it is whole, and take the windows' place otherwise.
  static constexpr int kSumsOffset = V::kStaged ? (kWindowBytes + 127) / 128 * 128 : 0;
  // Behind windows and sums, the factors of rows.
  static constexpr int kFactorsOffset = kXBytes > kSumBytes ? kXBytes : kSumBytes;
  static constexpr int kFactorBytes = V::kScalesRows ? V::kBatch * 4 : 0;
  // Boxes, and so the sums in their place, begin up to kBoxAlignment bytes behind what is staged.
  static constexpr int kStagedBytes =
      V::kStaged ? kSumsOffset + kSumBytes : kFactorsOffset + kFactorBytes + (V::kBoxesOfX ? kBoxAlignment : 0);
};

// In which order a worker takes its windows of x; one is a chunk of K, but where warpgroups multiply. Boxes that all
// workers read at the same time L2 serves together; of what warps read each worker begins with another chunk.
template <class V>
struct Chunks {
  using S = RowsShape<V>;
  uint32_t begin, first;

  MPK_DEVICE explicit Chunks(uint32_t worker)
      : begin(worker % V::kSplit * S::kNumWindows), first(V::kBoxesOfX ? 0 : worker / V::kSplit % S::kChunks) {}
  // Where the columns of chunk `chunk` stand, in bytes, of x that stands in shared memory.
  MPK_DEVICE uint32_t offset(uint32_t chunk) const { return (chunk - begin) * (V::kChunkSize * sizeof(typename V::T)); }
  MPK_DEVICE uint32_t at(uint32_t turn) const { return begin + chunk_at(turn, first, S::kNumWindows); }
};

// A window, which have numbers through the launch: where it stands, and its barriers. Waits are false when the launch
// was given up.
template <class V>
struct WindowPlace {
  using S = RowsShape<V>;
  uint32_t number;

  MPK_DEVICE explicit WindowPlace(uint32_t number) : number(number) {}
  MPK_DEVICE uint32_t barrier() const { return number % kWindows; }
  MPK_DEVICE uint32_t parity() const { return number / kWindows & 1; }
  MPK_DEVICE uint32_t offset() const { return number % S::kWindowsHeld * S::kWindowBytes; }
  template <class C>
  MPK_DEVICE bool await(C& c) const {
    return await_window(c, c.windows().full, number, Waiting::kFullSlot);
  }
  // Until those that work on the window before it in its place are done.
  template <class C>
  MPK_DEVICE bool await_free(C& c) const {
    const WindowPlace before(number - S::kWindowsHeld);
    return number < S::kWindowsHeld ||
           wait_barrier(c.shared.watchdog, &c.windows().empty[before.barrier()], before.parity(), c.phase,
                        WarpRole::kConsumer, Waiting::kFreeSlot, barrier(), number);
  }
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

}  // namespace mpk::linear
