// quantized_linear on tensor cores: weights come in boxes as in linear_rows.cuh, two bytes as one 16-bit element, and
// become float16 in registers. x stands in shared memory as float16, too: the e4m3 numbers that it is quantised to, or
// its own numbers over a power of two. Both factors are exact, so sums of a group of columns, in fp32, are those of the
// format, and take the scales of these columns. A zero point is added to them times the sum of these columns of x.
//
// With weights of 4 bits x stays as it is, unless it is quantised, and weights become numbers of its type above a power
// of two. That power times the sum of these columns of x is taken from the sums.
#pragma once

#include "torch_mpk/device/tasks/linear_rows.cuh"
#include "torch_mpk/device/tasks/quantized_weights.cuh"
#include "torch_mpk/device/tasks/quantized_x.cuh"

namespace mpk::linear {

template <class V, class C>
concept QuantizedRowsVariant = RowsVariant<V, C> && QuantizedSizes<V> && HasScales<V> && sizeof(typename V::T) == 2 &&
                               Constants<int, V::kWorkerTiles>;  // the most tiles of a worker

template <class V>
struct QuantizedShape : XSteps<V> {
  using S = RowsShape<V>;
  using XSteps<V>::kStep, XSteps<V>::kGroup, XSteps<V>::kFactorRows, XSteps<V>::kStepFloats, XSteps<V>::kScalesRowsOfX;
  using XSteps<V>::kKeepsX;
  static constexpr int kLine = 128 * 8 / V::kWeightBits;  // columns of 128 bytes of a box's row
  static_assert(V::kSize % kLine == 0 && V::kChunkSize % kLine == 0 && V::kSplit == 1 && !V::kByWarpgroups);
  static constexpr int kSteps = V::kSize / kStep, kChunkSteps = V::kChunkSize / kStep;
  // Behind rows and sums stand these steps, all or those of each stage; scales of rows, if x comes in stages; and
  // scales of weights, [box of the worker][of its row][row, if each has its own].
  static constexpr int kFactorSteps = V::kStaged ? kSteps : S::kStagesHeld * kChunkSteps;
  static constexpr int kFactorsOffset = (S::kStagedBytes + 127) / 128 * 128;
  static constexpr int kRowScalesOffset = kFactorsOffset + kFactorSteps * kStepFloats * 4;
  static constexpr int kRowScalesBytes = V::kStaged || !kScalesRowsOfX ? 0 : kFactorRows * 4;
  static constexpr int kScalesOffset = (kRowScalesOffset + kRowScalesBytes + 127) / 128 * 128;
  static constexpr int scale_rows() {
    if constexpr (V::kScalesByRow) {
      return 0;
    } else {
      return V::kRowsHaveScales ? V::kBoxRows : 1;
    }
  }
  static constexpr int scale_bytes() {
    if constexpr (V::kScalesByRow) {
      return 0;
    } else {
      return sizeof(BlockScale<V>);
    }
  }
  static constexpr int kScaleRows = scale_rows();
  static constexpr int kScalesOfBox =
      V::kScalesByRow ? 0 : (V::kSize + V::kScaleColumns - 1) / V::kScaleColumns * kScaleRows;
  static constexpr int kStagedBytes = kScalesOffset + V::kWorkerTiles * V::kParts * kScalesOfBox * scale_bytes();
};

// Converts an x that is staged as a whole.
template <class V, class C>
MPK_DEVICE void convert_x(C& c, const Job& job, uint8_t* x, float* factors) {
  using Q = QuantizedShape<V>;
  constexpr int kAtOnce = 2;
  if constexpr (Q::kKeepsX) {
    constexpr int kColumns = RowsShape<V>::kColumns;
#pragma unroll 1
    for (int i = c.warp; i < Q::kSteps * kColumns; i += kConsumerWarps) {
      const int step = i / kColumns;
      KeptX<V>::prepare_step(x + step * 256, RowsShape<V>::kPitch, i % kColumns, c.lane,
                             factors + step * Q::kStepFloats);
    }
  } else if constexpr (Q::kScalesRowsOfX) {
#pragma unroll 1
    for (int r = c.warp; r < V::kBatch; r += kConsumerWarps) {
      uint8_t* row = x + r * RowsShape<V>::kPitch;
      const XScale scale = scale_of_row<V>(job, row, c.lane);
      convert_steps<V, kAtOnce>(
          0, Q::kSteps, 2 * kAtOnce, c.lane,
          [&](int step) { return XStep{row + step * 256, factors + step * Q::kStepFloats + r}; },
          [&](int, const float (&)[8]) { return scale; });
    }
  } else {
    convert_steps<V, kAtOnce>(
        c.warp * 2 * kAtOnce, V::kBatch * Q::kSteps, kConsumerWarps * 2 * kAtOnce, c.lane,
        [&](int number) {
          const int r = number / Q::kSteps, step = number - r * Q::kSteps;
          return XStep{x + r * RowsShape<V>::kPitch + step * 256, factors + step * Q::kStepFloats + r};
        },
        [&](int, const float (&v)[8]) { return scale_of_step<V>(v); });
  }
}

// The rows of x that a producer warp copies and prepares: every kProducerWarps'th, or every eight of these, whose sums
// are found together.
template <class V>
struct OwnRows {
  static constexpr int kTogether = XSteps<V>::kKeepsX ? 8 : 1;
  int first;

  MPK_DEVICE int count() const {
    const int units = (V::kBatch + kTogether - 1) / kTogether;
    return max((units - first + kProducerWarps - 1) / kProducerWarps, 0) * kTogether;
  }
  MPK_DEVICE int row(int i) const { return (first + i / kTogether * kProducerWarps) * kTogether + i % kTogether; }
};

// Starts to copy a stage's rows.
template <class V>
MPK_DEVICE void copy_stage(const Job& job, const OwnRows<V>& rows, uint8_t* stage, int chunk, int lane) {
  using T = typename V::T;
  constexpr int kVec = kVecSize<T>;
  const int columns = min(V::kChunkSize, V::kSize - chunk * V::kChunkSize);
  const T* x = V::x(job) + chunk * V::kChunkSize;
  const bool is_aligned = reinterpret_cast<uint64_t>(x) % kAccessBytes == 0;  // a call's tensor may begin anywhere
#pragma unroll 1
  for (int i = 0; i < rows.count() && rows.row(i) < V::kBatch; i++) {
    const T* from = x + rows.row(i) * V::kPitchX;
    uint8_t* to = stage + rows.row(i) * RowsShape<V>::kPitch;
    if (is_aligned) {
      for (int p = lane; p < columns / kVec; p += 32) ptx::copy_async_16(to + p * 16, from + p * kVec);
    } else {
      for (int e = lane; e < columns; e += 32) reinterpret_cast<T*>(to)[e] = from[e];
    }
  }
}

// Converts a stage's rows, or finds their sums.
template <class V>
MPK_DEVICE void prepare_stage(const OwnRows<V>& rows, uint8_t* stage, float* factors, const float* row_scales,
                              int steps, int lane) {
  using S = RowsShape<V>;
  using Q = QuantizedShape<V>;
  if constexpr (Q::kKeepsX) {
#pragma unroll 1
    for (int n = rows.first; n < S::kColumns; n += kProducerWarps)
      for (int step = 0; step < steps; step++)
        KeptX<V>::prepare_step(stage + step * 256, S::kPitch, n, lane, factors + step * Q::kStepFloats);
  } else {
    constexpr int kAtOnce = 2;
    convert_steps<V, kAtOnce>(
        0, rows.count() * steps, 2 * kAtOnce, lane,
        [&](int number) {
          const int r = rows.row(number / steps), step = number % steps;
          return XStep{stage + r * S::kPitch + step * 256, factors + step * Q::kStepFloats + r};
        },
        [&](int number, const float (&v)[8]) {
          if constexpr (Q::kScalesRowsOfX) {
            const float scale = row_scales[rows.row(number / steps)];
            return XScale{scale, 1 / scale};
          } else {
            return scale_of_step<V>(v);
          }
        });
  }
}

// The producer warps copy stages of x: each copies some rows two stages ahead, and prepares them once they have landed.
// False when the launch was aborted.
template <class V, class C>
MPK_DEVICE bool load_prepared(C& c, const Job& job, uint8_t* stages, float* factors, const float* row_scales) {
  using S = RowsShape<V>;
  using Q = QuantizedShape<V>;
  constexpr int kAhead = 2;
  const Chunks<V> chunks(c.worker(job));
  const OwnRows<V> rows{c.warp - S::kWarps};
#pragma unroll 1
  for (uint32_t turn = 0; turn < S::kChunks + kAhead; turn++) {
    if (turn < S::kChunks) {
      const StageState<V> place(c.stage + turn);
      if (!__all_sync(~0u, place.await_free(c))) return false;
      copy_stage<V>(job, rows, stages + place.offset(), chunks.at(turn), c.lane);
    }
    ptx::commit_copies();
    if (turn < kAhead) continue;
    ptx::await_copies<kAhead>();
    __syncwarp();
    const StageState<V> place(c.stage + turn - kAhead);
    const int columns = min(V::kChunkSize, V::kSize - chunks.at(turn - kAhead) * V::kChunkSize);
    float* own = factors + place.number % S::kStagesHeld * (Q::kChunkSteps * Q::kStepFloats);
    prepare_stage<V>(rows, stages + place.offset(), own, row_scales, columns / Q::kStep, c.lane);
    ptx::mbar_arrive(&c.stages().full[place.barrier()]);
  }
  return true;
}

// The scales of a worker's boxes, of which a thread loads every kConsumerThreads'th.
template <class V, bool there = !V::kScalesByRow>
struct BoxScales {
  using Q = QuantizedShape<V>;
  using Block = BlockScale<V>;
  static constexpr int kMost = V::kWorkerTiles * V::kParts * Q::kScalesOfBox;
  // Where rows have scales of their own, these are too many for registers.
  static constexpr int kMine = (kMost + kConsumerThreads - 1) / kConsumerThreads;
  static constexpr int kHeld = V::kRowsHaveScales ? 0 : kMine < 8 ? kMine : 8;
  Block held[kHeld > 0 ? kHeld : 1];

  // Calls `use` with the place of block i: which weight's, its row, and its column of blocks.
  template <class Use>
  MPK_DEVICE static void find_block(Span tiles, int i, Use use) {
    const uint32_t box = i / Q::kScalesOfBox, tile = tiles.begin + box / V::kParts;
    if (tile >= tiles.end) return;
    const int segment = segment_of<V>(tile), which = V::kParts > 1 ? box % V::kParts : segment;
    const uint32_t n = (tile - V::first_tile(segment)) * V::kBoxRows + i % Q::kScaleRows;
    use(which, min(n, V::num_rows(segment) - 1), i % Q::kScalesOfBox / Q::kScaleRows);
  }
  MPK_DEVICE static Block load(const Job& job, Span tiles, int i) {
    Block block{};
    find_block(tiles, i,
               [&](int which, uint32_t n, int column) { block = load_block_scale<V>(job, which, n, column); });
    return block;
  }
  // Before anything is awaited: to registers as many as they hold, the others to L2.
  MPK_DEVICE BoxScales(const Job& job, Span tiles, int rank) {
    for (int i = rank + kHeld * kConsumerThreads; i < kMost; i += kConsumerThreads)
      find_block(tiles, i, [&](int which, uint32_t n, int column) { fetch_block_scale<V>(job, which, n, column); });
#pragma unroll
    for (int i = 0; i < kHeld; i++)
      held[i] = rank + i * kConsumerThreads < kMost ? load(job, tiles, rank + i * kConsumerThreads) : Block{};
  }
  MPK_DEVICE void store(const Job& job, Span tiles, int rank, uint8_t* staged) const {
    Block* blocks = reinterpret_cast<Block*>(staged + Q::kScalesOffset);
#pragma unroll
    for (int i = 0; i < kHeld; i++)
      if (rank + i * kConsumerThreads < kMost) blocks[rank + i * kConsumerThreads] = held[i];
    store_others(job, tiles, rank + kHeld * kConsumerThreads, blocks);
  }

  // Some are loaded together.
  MPK_DEVICE static void store_others(const Job& job, Span tiles, int first, Block* blocks) {
    constexpr int kTogether = 2;
#pragma unroll 1
    for (; first < kMost; first += kTogether * kConsumerThreads) {
      GivenScale<V> given[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; u++)
        find_block(tiles, min(first + u * kConsumerThreads, kMost - 1),
                   [&](int which, uint32_t n, int column) { given[u] = load_given_scale<V>(job, which, n, column); });
#pragma unroll
      for (int u = 0; u < kTogether; u++)
        if (const int i = first + u * kConsumerThreads; i < kMost)
          find_block(tiles, i, [&](int which, uint32_t n, int) {
            blocks[i] = block_scale<V>(to_float(given[u].scale), given[u], which, n);
          });
    }
  }

  // The scales and offsets for a group's sums in a block's upper and lower rows; a lane has one of each. `scales`: of
  // the boxes of a pass, of which `box` is the block's first.
  MPK_DEVICE static void find(float (&scale)[2], float (&offset)[2], const uint8_t* scales, uint32_t box, int group,
                              int lane) {
    const Block* upper = reinterpret_cast<const Block*>(scales) + box * Q::kScalesOfBox +
                         group / (V::kScaleColumns / Q::kGroup) * Q::kScaleRows;
    constexpr int kToLower = Q::S::kBoxesOfBlock == 2 ? Q::kScalesOfBox : V::kRowsHaveScales ? 8 : 0;
    if (V::kRowsHaveScales) upper += lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const Block block = upper[i * kToLower];
      scale[i] = to_float(block.scale), offset[i] = block.offset();
    }
  }
};
// Where V::finish applies them.
template <class V>
struct BoxScales<V, false> {
  MPK_DEVICE BoxScales(const Job&, Span, int) {}
  MPK_DEVICE void store(const Job&, Span, int, uint8_t*) const {}
  MPK_DEVICE static void find(float (&scale)[2], float (&offset)[2], const uint8_t*, uint32_t, int, int) {
    scale[0] = scale[1] = 1, offset[0] = offset[1] = 0;
  }
};

// Multiplies a chunk's boxes, see Products. `scales`: of the boxes of a pass.
template <class V>
struct QuantizedProducts {
  using S = RowsShape<V>;
  using Q = QuantizedShape<V>;
  uint8_t* staged;
  const uint8_t* scales;

  template <class C>
  MPK_DEVICE bool produce(C& c, const Job& job, uint8_t* stages) const {
    return load_prepared<V>(c, job, stages, reinterpret_cast<float*>(staged + Q::kFactorsOffset),
                            reinterpret_cast<const float*>(staged + Q::kRowScalesOffset));
  }

  template <int count>
  MPK_DEVICE void add(SumFragment (*sums)[S::kColumns], const uint8_t* const (&upper)[count],
                      const uint8_t* const (&lower)[count], const uint8_t* x, uint32_t chunk, uint32_t block,
                      int lane) const {
    constexpr int kColumns = S::kColumns, kGroups = Q::kStep / Q::kGroup, kSlices = Q::kGroup / 32;  // of 32 columns
    BlockWeights<V, count, Q::kKeepsX> weights(upper, lower, lane);
    using Number = typename Choose<Q::kKeepsX, typename V::T, __half>::Type;
    const int first = chunk * Q::kChunkSteps, steps = min(Q::kChunkSteps, Q::kSteps - first);
    const int kept = V::kStaged ? first : static_cast<int>(x - staged) / S::kStageBytes * Q::kChunkSteps;
    const float* of_x =
        reinterpret_cast<const float*>(staged + Q::kFactorsOffset) + kept * Q::kStepFloats + lane % 4 * 2;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
#pragma unroll
      for (int group = 0; group < kGroups; group++) {
        SumFragment products[count][kColumns] = {};
        const auto multiply = [&](int i, int is_odd) {
          ptx::Pair columns[kColumns][2];
#pragma unroll
          for (int n = 0; n < kColumns; n++) load_x(x, step * 4 + i, n, lane, columns[n]);
#pragma unroll
          for (int j = 0; j < count; j++) {
            ptx::Quad rows[2];
            weights.load(i, is_odd, j, rows);
#pragma unroll
            for (int k = 0; k < 2; k++)
#pragma unroll
              for (int n = 0; n < kColumns; n++) ptx::mma<Number>(products[j][n], rows[k], columns[n][k]);
          }
        };
        if constexpr (V::kWeightBits == 4 && kSlices > 2) {  // unrolled, they would take more registers than there are
#pragma unroll 1
          for (int i = group * kSlices; i < (group + 1) * kSlices; i += 2) multiply(i, 0), multiply(i + 1, 1);
        } else {
#pragma unroll
          for (int i = 0; i < kSlices; i++) multiply(group * kSlices + i, (kSlices == 1 ? group : i) % 2);
        }
#pragma unroll
        for (int j = 0; j < count; j++)
          add_scaled(sums[j], products[j], of_x, group, block + j, (first + step) * kGroups + group, lane);
      }
      weights.advance(step);
      of_x += Q::kStepFloats;
    }
  }

 private:
  // 32 columns of eight rows of x, for two products. Missing rows repeat the last: their products go nowhere.
  MPK_DEVICE static void load_x(const uint8_t* x, int i, int n, int lane, ptx::Pair (&columns)[2]) {
    if constexpr (Q::kKeepsX) {
      KeptX<V>::load(x, S::kPitch, i, n, lane, columns);
    } else {
      const uint32_t row = min(8 * n + lane % 8, V::kBatch - 1);
      const ptx::Quad both = ptx::load_matrices(ptx::smem_addr(x) + row * S::kPitch + lane / 8 * 16 + i * 64);
      columns[0] = {both.v[0], both.v[1]}, columns[1] = {both.v[2], both.v[3]};
    }
  }

  // A group's products, to the sums of a block. `of_x`: what stands of x's step, in which the group has number `part`.
  MPK_DEVICE void add_scaled(SumFragment (&sums)[S::kColumns], const SumFragment (&products)[S::kColumns],
                             const float* of_x, int part, uint32_t block, int group, int lane) const {
    float scale[2], offset[2];
    BoxScales<V>::find(scale, offset, scales, block * S::kBoxesOfBlock, group, lane);
    if constexpr (Q::kKeepsX)
      for (int i = 0; i < 2; i++) offset[i] = fmaf(-FourBits<typename V::T>::kAbove, scale[i], offset[i]);
#pragma unroll
    for (int n = 0; n < S::kColumns; n++) {
      const float2 factors = Q::kKeepsX ? float2{1, 1} : *reinterpret_cast<const float2*>(of_x + 8 * n);
      if constexpr (V::kZero == kNoZero && !Q::kKeepsX) {
#pragma unroll
        for (int i = 0; i < 4; i++)
          sums[n][i] = fmaf(products[n][i], (i % 2 == 0 ? factors.x : factors.y) * scale[i / 2], sums[n][i]);
      } else {
        const float2 of_group = *reinterpret_cast<const float2*>(of_x + Q::kFirstSums + part * Q::kFactorRows + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float added = (i % 2 == 0 ? of_group.x : of_group.y) * offset[i / 2];
          sums[n][i] = fmaf(fmaf(products[n][i], scale[i / 2], added), i % 2 == 0 ? factors.x : factors.y, sums[n][i]);
        }
      }
    }
  }
};

// Stages x, or what its stages need beforehand.
template <class V, class C>
MPK_DEVICE bool stage_x(C& c, const Job& job, uint8_t* staged) {
  using Q = QuantizedShape<V>;
  if constexpr (!V::kStaged) {
    if (!c.await()) return false;
    if constexpr (Q::kScalesRowsOfX) {
      float* row_scales = reinterpret_cast<float*>(staged + Q::kRowScalesOffset);
      for (int r = c.warp; r < V::kBatch; r += kConsumerWarps) {
        const XScale scale = scale_of_row<V>(job, reinterpret_cast<const uint8_t*>(V::x(job) + r * V::kPitchX), c.lane);
        if (c.lane == 0) row_scales[r] = scale.scale;
      }
    }
    return true;
  } else {
    return stage_all<V>(c, job, staged);
  }
}

template <class V, class C>
MPK_DEVICE bool stage_quantized(C& c, const Job& job, Span tiles, uint8_t* staged) {
  using Q = QuantizedShape<V>;
  const BoxScales<V> scales(job, tiles, c.rank);
  if (!stage_x<V>(c, job, staged)) return false;
  scales.store(job, tiles, c.rank, staged);
  if (!c.sync()) return false;
  if constexpr (V::kStaged) {
    convert_x<V>(c, job, staged, reinterpret_cast<float*>(staged + Q::kFactorsOffset));
    return c.sync();
  }
  return true;
}

template <class V, class C>
MPK_DEVICE void compute_quantized_rows(C& c, const Job& job) {
  static_assert(QuantizedRowsVariant<V, C>);
  using S = RowsShape<V>;
  using Q = QuantizedShape<V>;
  static_assert(Q::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  static_assert(S::kBoxBytes <= C::Config::kSlotBytes);
  static_assert(V::kWorkerTiles * C::Config::kNumWorkers >= V::kNumTiles);
  uint8_t* staged = c.staged();
  const Span tiles = shared_span(V::kNumTiles, c.worker(job), 1, C::Config::kNumWorkers);
  const auto preload = [&](Span pass) { return RowsResult<V>(pass, c.warp, c.lane).preload(job); };
  const auto pass_from = [&](uint32_t tile) { return Span{tile, min(tiles.end, tile + V::kMainloopTiles)}; };
  typename V::Extra extra{};
  if constexpr (V::kEarly && V::kHasExtra) extra = preload(pass_from(tiles.begin));
  if (!stage_quantized<V>(c, job, tiles, staged)) return;
  if constexpr (V::kStaged) c.stamp(&PhaseStamps::staged);
#pragma unroll 1
  for (uint32_t first = tiles.begin; first < tiles.end; first += V::kMainloopTiles) {
    const Span pass = pass_from(first);
    if constexpr (V::kHasExtra)
      if (!V::kEarly || first != tiles.begin) extra = preload(pass);
    const Shares<V> shares(pass.end - pass.begin);
    const uint32_t box = (first - tiles.begin) * V::kParts;
    const QuantizedProducts<V> products{staged, staged + Q::kScalesOffset + box * Q::kScalesOfBox * Q::scale_bytes()};
    if (!sum_boxes<V>(c, job, pass.end - pass.begin, shares, staged, products)) return;
    finish_tiles<V>(c, job, pass, PassSums<V>(shares, staged), RowSums<V>(c, job, 0), extra);
    if (pass.end < tiles.end && !c.sync()) return;
  }
}

}  // namespace mpk::linear
