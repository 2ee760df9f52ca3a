// Sizes and order of linears with several rows of x, see linear_rows.cuh.
#pragma once

#include "torch_mpk/device/tasks/linear_shape.cuh"
#include "torch_mpk/device/warpgroup.cuh"

namespace mpk::linear {

template <class V>
concept RowsSizes = requires {
  typename V::T;
  // Rows of x; K.
  requires Constants<int, V::kBatch, V::kSize>;
  // Segments: linears one after the other in row space. Parts: linears whose row n is computed side by side.
  requires Constants<int, V::kSegments, V::kParts>;
  // The rows and columns of a box. A tile is V::kBoxRows rows of every part.
  requires Constants<int, V::kBoxRows, V::kChunkSize>;
  requires Constants<uint32_t, V::kNumTiles>;
  // Tiles of one mainloop; tiles whose sums the epilogue has in shared memory at a time, a box of each warpgroup where
  // it has fewer; split_k, the workers that share tiles (see finish_shared).
  requires Constants<int, V::kMainloopTiles, V::kEpilogueTiles, V::kSplit>;
  // Whether x is staged, through row tasks if there are any: all of x, or the worker's columns where workers share
  // tiles. Otherwise rows are kPitchX elements apart and x comes in stages; with a map, stages are boxes.
  requires Constants<bool, V::kStaged, V::kRowTasks, V::kBoxesOfX> && Constants<int, V::kPitchX>;
  // Chains and extras may fetch their first operands before the phase's events.
  requires Constants<bool, V::kEarly>;
  // Whether warpgroups multiply boxes, of one block of 64 columns or several. The columns of a stage, and its rows of
  // x, which are those that the tensor cores take.
  requires Constants<bool, V::kByWarpgroups> && Constants<int, V::kStageColumns, V::kXRows>;
  // Whether a norm follows, or x lacks its norm's factors of rows. See linear_rows_norm.cuh.
  requires Constants<bool, V::kEndsWithNorm, V::kScalesRows>;
};

// The place for sums of squares of the results' rows, and their number for each row.
template <class V>
concept LeavesRowSums = Constants<int, V::kRowSums> && requires(const Job& job) {
  { V::row_sums(job) } -> Same<float*>;
  V::fetch_factor(job, 0u);  // prefetches it to L2, and those behind
};
// The sums of squares of x's rows.
template <class V>
concept FindsRowSums = Constants<int, V::kSumsOfX> && requires(const Job& job) {
  { V::kEps } -> Same<const float&>;
  { V::sums_of_x(job) } -> Same<float*>;
};

template <class V, class C>
concept RowsVariant =
    RowsSizes<V> && Results<V, C> && (V::kSplit == 1 || SplitsK<V>) && (!V::kEndsWithNorm || LeavesRowSums<V>) &&
    (!V::kScalesRows || FindsRowSums<V>) && requires(const Job& job, int i) {
      { V::first_tile(i) } -> Same<uint32_t>;  // of segment i
      { V::num_rows(i) } -> Same<uint32_t>;
      { V::x(job) } -> Same<const typename Choose<V::kStaged, uint16_t, typename V::T>::Type*>;  // staged x is polled
      { V::map_of_x(job) } -> Same<const void*>;
    };

// Bits of a weight: a format of quantised ones says it, others are of x's type.
template <class V>
constexpr int weight_bits() {
  if constexpr (requires { V::kWeightBits; }) {
    return V::kWeightBits;
  } else {
    return 8 * element_bytes<V>();
  }
}

// The most stages of x that are in shared memory at a time, where a variant says so itself.
template <class V>
constexpr int held_stages() {
  if constexpr (requires { V::kHeldStages; }) {
    return V::kHeldStages;
  } else {
    return V::kByWarpgroups ? stages_held(V::kStageColumns) : kStages;
  }
}

// Whether a box has V::kBoxRows rows of every part, one part behind the other, where a variant says so.
template <class V>
constexpr bool joins_parts() {
  if constexpr (requires { V::kJoinsParts; }) {
    return V::kJoinsParts;
  } else {
    return false;
  }
}

// Whether stages have sums of x's columns beside them: see four_bit_warpgroups.cuh.
template <class V>
constexpr bool has_sums_of_x() {
  return requires(const Job& job) { V::x_sums(job); };
}
// The columns of such a sum: those of a line that share a scale.
template <class V>
constexpr int sum_columns() {
  if constexpr (requires { V::kScaleColumns; }) {
    return V::kScaleColumns > 0 && V::kScaleColumns < V::kChunkSize ? V::kScaleColumns : V::kChunkSize;
  } else {
    return V::kChunkSize;
  }
}

// Constants derived from a variant.
template <RowsSizes V>
struct RowsShape {
  using T = typename V::T;
  static constexpr int kColumns = (V::kXRows + 7) / 8;  // fragments of sums in a block
  // One or two for a warp. A warpgroup has all blocks of a box.
  static constexpr int kBoxesOfBlock = V::kByWarpgroups || V::kBoxRows > kWarpRows ? 1 : kWarpRows / V::kBoxRows;
  static constexpr bool kJoinsParts = joins_parts<V>();
  static constexpr int kBoxesOfTile = kJoinsParts ? 1 : V::kParts;
  static constexpr int kRowsOfBox = V::kBoxRows * (V::kParts / kBoxesOfTile);
  static constexpr int kBlocksOfBox = V::kByWarpgroups ? (kRowsOfBox + kWarpRows - 1) / kWarpRows : 1;
  static constexpr int kBoxBytes = kRowsOfBox * V::kChunkSize * weight_bits<V>() / 8;
  static constexpr int kChunks = (V::kSize + V::kChunkSize - 1) / V::kChunkSize / V::kSplit;    // of a worker
  static constexpr int kWarps = V::kStaged ? kConsumerWarps : kConsumerWarps - kProducerWarps;  // that multiply
  static constexpr int kMaxBoxes = V::kMainloopTiles * kBoxesOfTile;
  static constexpr int kMaxBlocks = (kMaxBoxes * kBlocksOfBox + kBoxesOfBlock - 1) / kBoxesOfBlock;
  // Warpgroups that take turns at the chunks of all boxes, where these cannot be shared out equally.
  static constexpr int kTurns = V::kByWarpgroups && (kMaxBoxes == 1 || kJoinsParts) ? kWarpgroups : 1;
  static constexpr int kHeld = V::kByWarpgroups ? (kMaxBoxes * kTurns + kWarpgroups - 1) / kWarpgroups
                                                : (kMaxBlocks + kWarps - 1) / kWarps;  // blocks of a warp
  // A worker's stages of x, and the chunks of a stage.
  static constexpr int kChunksOfStage = V::kStageColumns / V::kChunkSize, kNumStages = kChunks / kChunksOfStage;
  static_assert(kChunks % kChunksOfStage == 0);
  static constexpr int kStagesHeld = held_stages<V>();
  // Blocks that a warp multiplies together, so that it reads x once for them: where that, and not memory, is the limit,
  // and there are registers for them, as there are not while weights of 4 bits are converted.
  static constexpr int kTogether = V::kBatch > 16 && kHeld == 2 && weight_bits<V>() > (V::kBatch > 32 ? 8 : 4) ? 2 : 1;
  // Rows of x side by side begin in other banks, but in a box, which is swizzled, and has 64 columns of all rows after
  // the other.
  static constexpr int kPitch =
      V::kBoxesOfX ? kBoxRowBytes : (V::kStaged ? V::kSize / V::kSplit : V::kChunkSize) * int(sizeof(T)) + 16;
  static_assert(!V::kBoxesOfX || V::kXRows % 8 == 0, "blocks of 64 columns would be swizzled differently");
  static constexpr int kBlockPitch = V::kBoxesOfX ? V::kXRows * kBoxRowBytes : kBoxRowBytes;  // to the next 64 columns
  static constexpr int kBytesOfX = V::kXRows * V::kStageColumns * element_bytes<V>();         // of a box
  static constexpr int kBlocksOfStage = V::kStageColumns * element_bytes<V>() / kBoxRowBytes;
  static constexpr int kStageBytes =
      V::kBoxesOfX ? (kBytesOfX + kBoxAlignment - 1) / kBoxAlignment * kBoxAlignment : V::kBatch * kPitch;
  // Sums of a block in shared memory, [row of x][row of weights], free of bank conflicts.
  static constexpr int kBlockFloats = 8 * kColumns * kSumPitch;
  static constexpr int kSumBlocks = V::kByWarpgroups ? kTurns * kMaxBlocks : kMaxBlocks > kWarps ? kMaxBlocks : kWarps;
  static constexpr int kXBytes = V::kStaged ? kStageBytes : kStagesHeld * kStageBytes;
  static constexpr bool kHasSubtiles = V::kEpilogueTiles < V::kMainloopTiles;
  static_assert(!kHasSubtiles || (V::kByWarpgroups && V::kEpilogueTiles * V::kParts == kWarpgroups && V::kSplit == 1 &&
                                  !V::kEndsWithNorm));
  static constexpr int kSumBytes = (kHasSubtiles ? kWarpgroups * kBlocksOfBox : kSumBlocks) * kBlockFloats * 4;
  // Sums stand behind staged x, and otherwise take the place of its stages.
  static constexpr int kSumsOffset = V::kStaged ? (kStageBytes + 127) / 128 * 128 : 0;
  // The factors of rows stand behind stages and sums; or the sums of the columns of each stage, block after block.
  static constexpr int kFactorsOffset = kXBytes > kSumBytes ? kXBytes : kSumBytes;
  static constexpr int kStageSums = has_sums_of_x<V>() ? V::kStageColumns / sum_columns<V>() * V::kXRows : 0;
  static constexpr int kFactorBytes = (V::kScalesRows ? V::kBatch : kStagesHeld * kStageSums) * 4;
  // Aligning boxes, and the sums in their place, takes up to kBoxAlignment bytes more.
  static constexpr int kStagedBytes =
      V::kStaged ? kSumsOffset + kSumBytes : kFactorsOffset + kFactorBytes + (V::kBoxesOfX ? kBoxAlignment : 0);
};

// The order of a worker's stages of x; without warpgroups a stage is a chunk of K. L2 serves boxes that all workers
// read at the same time together. Where warps read x, each worker begins with another chunk.
template <class V>
struct Chunks {
  using S = RowsShape<V>;
  uint32_t begin, first;

  MPK_DEVICE explicit Chunks(uint32_t worker)
      : begin(worker % V::kSplit * S::kNumStages), first(V::kBoxesOfX ? 0 : worker / V::kSplit % S::kChunks) {}
  // The offset in bytes of a chunk's columns in staged x.
  MPK_DEVICE uint32_t offset(uint32_t chunk) const { return (chunk - begin) * (V::kChunkSize * sizeof(typename V::T)); }
  MPK_DEVICE uint32_t at(uint32_t turn) const { return begin + chunk_at(turn, first, S::kNumStages); }
};

// A stage by its number in the launch: its place and barriers. Waits are false when the launch was aborted.
template <class V>
struct StageState {
  using S = RowsShape<V>;
  uint32_t number;

  MPK_DEVICE explicit StageState(uint32_t number) : number(number) {}
  MPK_DEVICE uint32_t barrier() const { return number % kStages; }
  MPK_DEVICE uint32_t parity() const { return number / kStages & 1; }
  MPK_DEVICE uint32_t offset() const { return number % S::kStagesHeld * S::kStageBytes; }
  template <class C>
  MPK_DEVICE bool await(C& c) const {
    return await_stage(c, c.stages().full, number, Waiting::kFullSlot);
  }
  // Waits until the stage that was in this place before has been read.
  template <class C>
  MPK_DEVICE bool await_free(C& c) const {
    const StageState before(number - S::kStagesHeld);
    return number < S::kStagesHeld ||
           wait_barrier(c.shared.watchdog, &c.stages().empty[before.barrier()], before.parity(), c.phase,
                        WarpRole::kConsumer, Waiting::kFreeSlot, barrier(), number);
  }
};

// The sums of a stage's columns, [block of columns][row of x]; `offset`: of the stage's place.
template <class V>
MPK_DEVICE float* sums_of_stage(const uint8_t* stages, uint32_t offset) {
  using S = RowsShape<V>;
  float* all = reinterpret_cast<float*>(const_cast<uint8_t*>(stages) + S::kFactorsOffset);
  return all + offset / S::kStageBytes * S::kStageSums;
}

// How warps share the blocks of a pass: each warp has `held` blocks, or `sharers` warps take turns at a block. Numbers
// are small, so comparisons replace divisions, which would take longer than the work they place.
template <class V>
struct Shares {
  using S = RowsShape<V>;
  static constexpr uint32_t kMostSharers = V::kByWarpgroups         ? S::kTurns
                                           : S::kWarps < S::kChunks ? S::kWarps
                                                                    : S::kChunks;
  uint32_t blocks, sharers = 1, held = 1, warps;  // warps with work, or of one sharer's turn

  // For the boxes of `tiles` tiles.
  MPK_DEVICE explicit Shares(uint32_t tiles)
      : blocks((tiles * S::kBoxesOfTile * S::kBlocksOfBox + S::kBoxesOfBlock - 1) / S::kBoxesOfBlock), warps(blocks) {
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
  // The turn that a warp has; none if it is not below `sharers`.
  MPK_DEVICE uint32_t turn(uint32_t warp) const { return times<1, kMostSharers>(warps, warp); }
  // The i-th block of warp `first` of a turn. Blocks that are multiplied together are neighbours: a warp that waited
  // for a distant one would block the slots in between.
  template <int together>
  MPK_DEVICE uint32_t block(uint32_t first, uint32_t i) const {
    return together == 1 ? first + i * warps : first * held + i;
  }

 private:
  // Counts the i in [first, last] with i * n <= limit.
  template <uint32_t first, uint32_t last>
  MPK_DEVICE static uint32_t times(uint32_t n, uint32_t limit) {
    uint32_t count = 0;
#pragma unroll
    for (uint32_t i = first; i <= last; i++) count += i * n <= limit;
    return count;
  }
};

}  // namespace mpk::linear
