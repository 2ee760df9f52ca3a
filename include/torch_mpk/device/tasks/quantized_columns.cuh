// quantized_linear with few rows of x, on tensor cores: each warp takes columns of its own, 128 bytes of each row of
// weights at a time (a line). So a warp makes an x of its columns alone, without a barrier, and all warps have work,
// however few rows a worker has.
//
// Weights come in boxes of V::kBoxRows rows by one line or several, that fill a slot of the ring; all of some rows'
// boxes before those of the next rows, which reads memory row by row. A row of boxes is dealt out to warps in turns. A
// warp has its sums in registers, and leaves them in shared memory, where the sums of all warps are added.
//
// Weights are multiplied as in quantized_rows.cuh.
#pragma once

#include "torch_mpk/device/tasks/linear_rows.cuh"
#include "torch_mpk/device/tasks/quantized_weights.cuh"
#include "torch_mpk/device/tasks/quantized_x.cuh"

namespace mpk::linear {

template <class V, class C>
concept QuantizedColumnsVariant = RowsVariant<V, C> && QuantizedSizes<V> && HasScales<V> &&
                                  sizeof(typename V::T) == 2 && Constants<int, V::kWorkerTiles>;

template <class V>
struct ColumnsShape : XSteps<V> {
  using XSteps<V>::kStep, XSteps<V>::kStepFloats, XSteps<V>::kFactorRows, XSteps<V>::kScalesRowsOfX;
  using XSteps<V>::kKeepsX;
  static constexpr int kLine = 128 * 8 / V::kWeightBits, kSteps = kLine / kStep;
  static_assert(V::kChunkSize % kLine == 0 && V::kSize % V::kChunkSize == 0 && V::kBoxRows % 8 == 0);
  static_assert(XSteps<V>::kGroup == kStep && kKeepsX == (V::kWeightBits == 4));
  static constexpr int kLines = V::kSize / kLine, kLinesOfBox = V::kChunkSize / kLine, kLanes = V::kLanes;
  static constexpr int kEntries = kLines / kLinesOfBox;  // of the ring, for all lines of a box's rows
  static_assert(kLanes <= kEntries && kLanes <= kConsumerWarps);
  static constexpr int kBlocks = (V::kBoxRows + kWarpRows - 1) / kWarpRows;  // of a box
  static constexpr int kBoxes = V::kMainloopTiles * V::kParts, kColumns = (V::kBatch + 7) / 8;
  static constexpr int kPitch = (V::kStaged ? V::kSize : kLine) * 2 + 16;  // other banks for the next row
  // All of x, or two lines of each warp; what belongs to their steps, and the scales of whole rows; each warp's sums,
  // [box][block][row of x][row of weights].
  static constexpr int kXBytes = (V::kStaged ? 1 : 2 * kLanes) * V::kBatch * kPitch;
  static constexpr int kFactorsOffset = (kXBytes + 127) / 128 * 128;
  static constexpr int kStepsHeld = V::kStaged ? V::kSize / kStep : 2 * kLanes * kSteps;
  static constexpr int kRowScales = kScalesRowsOfX ? kFactorRows : 0;
  static constexpr int kFactorBytes = (kStepsHeld * kStepFloats + kRowScales) * 4;
  static constexpr int kSumsOffset = (kFactorsOffset + kFactorBytes + 127) / 128 * 128;
  static constexpr int kBlockFloats = V::kBatch * kSumPitch, kWarpFloats = kBoxes * kBlocks * kBlockFloats;
  static constexpr int kStagedBytes = kSumsOffset + kLanes * kWarpFloats * 4;
  static_assert(V::kStaged || kKeepsX || (V::kWorkerTiles == 1 && V::kParts == 1), "x would be converted for each box");
};

// The scales of a box's line, by step and by block, or by row if rows have their own. Each lane loads some of them,
// before the box has come, and lanes exchange them.
template <class V>
struct LineScales {
  using Q = ColumnsShape<V>;
  using Block = BlockScale<V>;
  static constexpr int kColumns = V::kScaleColumns < Q::kLine ? Q::kLine / V::kScaleColumns : 1;
  static constexpr int kRows = V::kRowsHaveScales ? V::kBoxRows : Q::kBlocks, kOfLane = (kRows + 31) / 32;
  static constexpr int kWords = (sizeof(Block) + 3) / 4;
  struct Words {
    uint32_t words[kWords];
    MPK_DEVICE Block& block() { return reinterpret_cast<Block&>(words); }
  };
  GivenScale<V> given[kColumns][kOfLane];
  Words mine[kColumns][kOfLane];  // the same, as they are exchanged

  // Calls `use` with the places of those of a lane: which weight's, its row, the column, and the number.
  template <class Use>
  MPK_DEVICE static void find_places(Span pass, uint32_t box, uint32_t line, int lane, Use use) {
    const uint32_t tile = pass.begin + box / V::kParts;
    const int segment = segment_of<V>(tile), which = V::kParts > 1 ? box % V::kParts : segment;
    const uint32_t first = (tile - V::first_tile(segment)) * V::kBoxRows, last = V::num_rows(segment) - 1;
#pragma unroll
    for (int i = 0; i < kOfLane; i++) {
      const uint32_t row = min(lane + 32 * i, kRows - 1), n = first + row * (V::kRowsHaveScales ? 1 : kWarpRows);
#pragma unroll
      for (int column = 0; column < kColumns; column++)
        use(which, min(n, last), line * Q::kLine / V::kScaleColumns + column, column, i);
    }
  }
  MPK_DEVICE void load(const Job& job, Span pass, uint32_t box, uint32_t line, int lane) {
    find_places(pass, box, line, lane, [&](int which, uint32_t n, uint32_t at, int column, int i) {
      given[column][i] = load_given_scale<V>(job, which, n, at);
    });
  }
  MPK_DEVICE void convert(Span pass, uint32_t box, uint32_t line, int lane) {
    find_places(pass, box, line, lane, [&](int which, uint32_t n, uint32_t, int column, int i) {
      mine[column][i].block() = block_scale<V>(to_float(given[column][i].scale), given[column][i], which, n);
    });
  }
  // The scale and the offset of half `i` of a block's rows, of which a lane has one.
  MPK_DEVICE void find(float& scale, float& offset, int step, int j, int i, int lane) const {
    const int row = V::kRowsHaveScales ? j * kWarpRows + i * 8 : j, column = kColumns == 1 ? 0 : step;
    Words found;
#pragma unroll
    for (int w = 0; w < kWords; w++)
      found.words[w] =
          __shfl_sync(~0u, mine[column][row / 32 % kOfLane].words[w], row % 32 + (V::kRowsHaveScales ? lane / 4 : 0));
    scale = to_float(found.block().scale), offset = found.block().offset();
  }
};
template <class V>
  requires V::kScalesByRow
struct LineScales<V> {
  MPK_DEVICE void load(const Job&, Span, uint32_t, uint32_t, int) {}
  MPK_DEVICE void convert(Span, uint32_t, uint32_t, int) {}
  MPK_DEVICE void find(float& scale, float& offset, int, int, int, int) const { scale = 1, offset = 0; }
};

// A warp's line of x: its first row in shared memory, the next rows kPitch bytes behind; and what belongs to its steps,
// kStepFloats for each: factors of rows, and sums of columns. Where x is kept, there are sums alone.
struct LineOfX {
  uint8_t* rows;
  float* factors;
};

// A line of a box, as lanes hold it: 32 bytes of the rows of each block at a time.
template <class V>
struct LineOfWeights {
  using Q = ColumnsShape<V>;
  ptx::Quad bytes[Q::kBlocks][4];

  MPK_DEVICE LineOfWeights(const uint8_t* box, int lane) {
    const uint32_t row = lane % 8, matrix = lane / 8;
    const ptx::SharedAddress line = ptx::smem_addr(box) + row * 128 + (matrix / 2 ^ row) * 16;
#pragma unroll
    for (int j = 0; j < Q::kBlocks; j++) {
      const uint32_t lower = j * kWarpRows + 8 < V::kBoxRows ? 8 * 128 : 0;  // or what nobody uses
#pragma unroll
      for (int i = 0; i < 4; i++)
        bytes[j][i] = ptx::load_matrices((line + j * kWarpRows * 128 + matrix % 2 * lower) ^ 32 * i);
    }
  }
};

// Products of a step. Where there are registers, they have two sums each, which keeps chains of dependent products
// short.
template <class V>
struct StepProducts {
  using Q = ColumnsShape<V>;
  static constexpr int kChains = Q::kColumns == 1 ? 2 : 1;
  SumFragment v[kChains][Q::kBlocks][Q::kColumns] = {};

  template <class T>
  MPK_DEVICE void add(int number, int j, int n, ptx::Quad weights, ptx::Pair x) {
    ptx::mma<T>(v[number % kChains][j][n], weights, x);
  }
  MPK_DEVICE float at(int j, int n, int i) const {
    return kChains == 1 ? v[0][j][n][i] : v[0][j][n][i] + v[kChains - 1][j][n][i];
  }
};

template <class V>
using BoxSums = SumFragment[ColumnsShape<V>::kBlocks][ColumnsShape<V>::kColumns];

// Multiplies lines of 8 bits.
template <class V>
struct ByteLines {
  using Q = ColumnsShape<V>;

  MPK_DEVICE static void multiply(BoxSums<V>& sums, const LineOfWeights<V>& weights, const LineOfX& x,
                                  const LineScales<V>& scales, int lane) {
    StepProducts<V> products;
    const uint32_t row = lane % 8, matrix = lane / 8;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      ptx::Quad columns[Q::kColumns];
#pragma unroll
      for (int n = 0; n < Q::kColumns; n++)  // missing rows repeat the last
        columns[n] = ptx::load_matrices(ptx::smem_addr(x.rows) + min(8 * n + row, uint32_t(V::kBatch - 1)) * Q::kPitch +
                                        matrix * 16 + i * 64);
#pragma unroll
      for (int j = 0; j < Q::kBlocks; j++) {
        ptx::Quad halves[2];
#pragma unroll
        for (int m = 0; m < 4; m++)
          to_halves<V>(weights.bytes[j][i].v[m], halves[m / 2].v[m % 2], halves[m / 2].v[m % 2 + 2]);
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
          for (int n = 0; n < Q::kColumns; n++)
            products.template add<__half>(k, j, n, halves[k], {columns[n].v[2 * k], columns[n].v[2 * k + 1]});
      }
    }
    const float* of_x = x.factors + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < Q::kBlocks; j++) {
      float scale[2], offset[2];
#pragma unroll
      for (int i = 0; i < 2; i++) scales.find(scale[i], offset[i], 0, j, i, lane);
#pragma unroll
      for (int n = 0; n < Q::kColumns; n++) {
        const float2 factors = *reinterpret_cast<const float2*>(of_x + 8 * n);
        float2 group{};
        if constexpr (V::kZero != kNoZero) group = *reinterpret_cast<const float2*>(of_x + Q::kFirstSums + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float sum = products.at(j, n, i) * scale[i / 2];
          if constexpr (V::kZero != kNoZero) sum = fmaf(i % 2 == 0 ? group.x : group.y, offset[i / 2], sum);
          sums[j][n][i] = fmaf(sum, i % 2 == 0 ? factors.x : factors.y, sums[j][n][i]);
        }
      }
    }
  }

  // Converts the rows of a line. `row_scales`: of x, if whole rows have scales.
  MPK_DEVICE static void prepare(const LineOfX& x, const float* row_scales, int lane) {
    constexpr int kAtOnce = V::kBatch > 4 ? 4 : V::kBatch > 2 ? 2 : 1;
    convert_steps<V, kAtOnce>(
        0, V::kBatch, 2 * kAtOnce, lane, [&](int r) { return XStep{x.rows + r * Q::kPitch, x.factors + r}; },
        [&](int r, const float (&v)[8]) {
          if constexpr (Q::kScalesRowsOfX) {
            return XScale{row_scales[r], 1 / row_scales[r]};
          } else {
            return scale_of_step<V>(v);
          }
        });
  }
};

// The same for lines of 4 bits, of two steps.
template <class V>
struct HalfByteLines {
  using Q = ColumnsShape<V>;
  using T = typename V::T;
  using Bits = FourBits<T>;

  MPK_DEVICE static void multiply(BoxSums<V>& sums, const LineOfWeights<V>& weights, const LineOfX& x,
                                  const LineScales<V>& scales, int lane) {
#pragma unroll
    for (int step = 0; step < Q::kSteps; step++) {
      StepProducts<V> products;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        ptx::Pair columns[Q::kColumns][2];
#pragma unroll
        for (int n = 0; n < Q::kColumns; n++) KeptX<V>::load(x.rows, Q::kPitch, step * 4 + i, n, lane, columns[n]);
#pragma unroll
        for (int j = 0; j < Q::kBlocks; j++) {
          const uint32_t* words = weights.bytes[j][step * 2 + i / 2].v + i % 2 * 2;
          uint32_t above[4], below[4];
          Bits::template widen<V>(words[0], above), Bits::template widen<V>(words[1], below);
#pragma unroll
          for (int k = 0; k < 2; k++)
#pragma unroll
            for (int n = 0; n < Q::kColumns; n++)
              products.template add<T>(k, j, n, {above[2 * k], below[2 * k], above[2 * k + 1], below[2 * k + 1]},
                                       columns[n][k]);
        }
      }
      const float* of_x = x.factors + step * Q::kStepFloats + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < Q::kBlocks; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float scale, offset;
          scales.find(scale, offset, step, j, i, lane);
          offset = fmaf(-Bits::kAbove, scale, offset);
#pragma unroll
          for (int n = 0; n < Q::kColumns; n++) {
            const float2 columns = *reinterpret_cast<const float2*>(of_x + 8 * n);
            sums[j][n][2 * i] += fmaf(products.at(j, n, 2 * i), scale, columns.x * offset);
            sums[j][n][2 * i + 1] += fmaf(products.at(j, n, 2 * i + 1), scale, columns.y * offset);
          }
        }
    }
  }

  MPK_DEVICE static void prepare(const LineOfX& x, const float* /*row_scales*/, int lane) {
#pragma unroll
    for (int step = 0; step < Q::kSteps; step++)
#pragma unroll
      for (int n = 0; n < Q::kColumns; n++)
        KeptX<V>::prepare_step(x.rows + step * 256, Q::kPitch, n, lane, x.factors + step * Q::kStepFloats);
  }
};

template <class V>
using Lines = typename Choose<ColumnsShape<V>::kKeepsX, HalfByteLines<V>, ByteLines<V>>::Type;

// x's lines, as a warp comes to them. Where x is not staged as a whole, a warp copies its next line meanwhile.
template <class V>
struct LinesOfX {
  using Q = ColumnsShape<V>;
  using T = typename V::T;
  uint8_t* staged;
  int warp, lane;

  MPK_DEVICE float* factors() const { return reinterpret_cast<float*>(staged + Q::kFactorsOffset); }
  MPK_DEVICE float* row_scales() const { return factors() + Q::kStepsHeld * Q::kStepFloats; }
  // The place of a line that has number `turn` of the warp's.
  MPK_DEVICE LineOfX place(uint32_t line, uint32_t turn) const {
    const uint32_t at = V::kStaged ? line : warp * 2 + turn % 2;
    return {staged + at * (V::kStaged ? Q::kLine * 2 : V::kBatch * Q::kPitch),
            factors() + at * Q::kSteps * Q::kStepFloats};
  }

  // Starts to copy a line, if there is one.
  MPK_DEVICE void fetch(const Job& job, uint32_t line, uint32_t turn) const {
    if constexpr (!V::kStaged) {
      constexpr int kAccesses = Q::kLine / kVecSize<T>;
      const T* from = V::x(job) + line * Q::kLine;
      uint8_t* to = place(line, turn).rows;
      if (line < Q::kLines)
        for (int p = lane; p < V::kBatch * kAccesses; p += 32) {
          const int r = p / kAccesses, access = p % kAccesses;
          ptx::copy_async_16(to + r * Q::kPitch + access * 16, from + r * V::kPitchX + access * kVecSize<T>);
        }
      ptx::commit_copies();
    }
  }
  // Awaits and prepares a line. `next`: the warp's next one.
  MPK_DEVICE LineOfX take(const Job& job, uint32_t line, uint32_t turn, uint32_t next) const {
    const LineOfX x = place(line, turn);
    if constexpr (!V::kStaged) {
      fetch(job, next, turn + 1);
      ptx::await_copies<1>();
      __syncwarp();
    }
    Lines<V>::prepare(x, row_scales(), lane);
    __syncwarp();
    return x;
  }
};

// Stages x, or awaits it, and finds the scales of whole rows.
template <class V, class C>
MPK_DEVICE bool stage_lines(C& c, const Job& job, const LinesOfX<V>& lines) {
  using Q = ColumnsShape<V>;
  if constexpr (V::kStaged) {
    if (!stage_all<V>(c, job, lines.staged) || !c.sync()) return false;
  } else {
    if (!c.await()) return false;
  }
  if constexpr (Q::kScalesRowsOfX) {
    for (int r = c.warp; r < V::kBatch; r += kConsumerWarps) {
      const uint8_t* row;
      if constexpr (V::kStaged)
        row = lines.staged + r * Q::kPitch;
      else
        row = reinterpret_cast<const uint8_t*>(V::x(job) + r * V::kPitchX);
      const XScale scale = scale_of_row<V>(job, row, c.lane);
      if (c.lane == 0) lines.row_scales()[r] = scale.scale;
    }
    return c.sync();
  }
  return true;
}

// The sums of a pass, as warps left them in shared memory. Missing results are zero.
template <class V>
struct ColumnSums {
  using Q = ColumnsShape<V>;
  const float* from;

  MPK_DEVICE float at(uint32_t r, uint32_t local, int part) const {
    const uint32_t box = local / V::kBoxRows * V::kParts + part, row = local % V::kBoxRows;
    const float* sum = from + (box * Q::kBlocks + row / kWarpRows) * Q::kBlockFloats + r * kSumPitch + row % kWarpRows;
    float each[Q::kLanes], total = 0;  // read together
#pragma unroll
    for (int warp = 0; warp < Q::kLanes; warp++) each[warp] = sum[warp * Q::kWarpFloats];
#pragma unroll
    for (float one : each) total += one;
    return total;
  }
  MPK_DEVICE float scaled(uint32_t /*r*/, float total) const { return total; }
};

// Leaves a box's sums in the warp's place.
template <class V>
MPK_DEVICE void store_sums(float* box, const BoxSums<V>& sums, int lane) {
  using Q = ColumnsShape<V>;
#pragma unroll
  for (int j = 0; j < Q::kBlocks; j++)
#pragma unroll
    for (int n = 0; n < Q::kColumns; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = 8 * n + lane % 4 * 2 + i % 2;
        if (V::kBatch % 8 == 0 || r < V::kBatch)
          box[j * Q::kBlockFloats + r * kSumPitch + lane / 4 + i / 2 * 8] = sums[j][n][i];
      }
}

// Sums a warp's lines of a pass, whose first ring entry is c.entry. `scales`: of its first line.
template <class V, class C>
MPK_DEVICE void sum_lines(C& c, const Job& job, Span pass, const LinesOfX<V>& lines, LineScales<V> scales,
                          bool is_first, float* left) {
  using Q = ColumnsShape<V>;
  const uint32_t boxes = (pass.end - pass.begin) * V::kParts;
  const uint32_t first = c.warp * Q::kLinesOfBox;
  lines.fetch(job, first, 0);
  uint32_t turn = 0;
#pragma unroll 1
  for (uint32_t box = 0; box < boxes; box++) {
    BoxSums<V> sums = {};
#pragma unroll 1
    for (uint32_t line = first, following; line < Q::kLines; line = following, turn++) {
      const uint32_t of_box = line % Q::kLinesOfBox;
      const bool ends_box = of_box + 1 == Q::kLinesOfBox;
      following = line + 1 + (ends_box ? (Q::kLanes - 1) * Q::kLinesOfBox : 0);
      const bool is_last = following >= Q::kLines;
      const uint32_t next = !is_last ? following : box + 1 < boxes ? first : Q::kLines;
      const bool is_prepared = V::kStaged && (!is_first || box > 0);
      const LineOfX x = is_prepared ? lines.place(line, turn) : lines.take(job, line, turn, next);
      const uint32_t entry = c.entry + box * Q::kEntries + line / Q::kLinesOfBox;
      if (of_box == 0 && !c.ring.wait(entry, c.phase)) {
        c.failed = true;
        return;
      }
      const LineOfWeights<V> weights(c.ring.slot(entry) + of_box * V::kBoxRows * 128, c.lane);
      if (ends_box) c.ring.release(entry);
      LineScales<V> now = scales;
      now.convert(pass, box, line, c.lane);
      if (next < Q::kLines) scales.load(job, pass, box + is_last, next, c.lane);
      Lines<V>::multiply(sums, weights, x, now, c.lane);
    }
    store_sums<V>(left + box * Q::kBlocks * Q::kBlockFloats, sums, c.lane);
  }
}

template <class V, class C>
MPK_DEVICE void compute_quantized_columns(C& c, const Job& job) {
  static_assert(QuantizedColumnsVariant<V, C>);
  using Q = ColumnsShape<V>;
  static_assert(Q::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  static_assert(V::kBoxRows * Q::kLinesOfBox * 128 <= C::Config::kSlotBytes &&
                V::kWorkerTiles * C::Config::kNumWorkers >= V::kNumTiles);
  const LinesOfX<V> lines{c.staged(), c.warp, c.lane};
  const Span tiles = shared_span(V::kNumTiles, c.worker(job), 1, C::Config::kNumWorkers);
  const auto preload = [&](Span pass) { return RowsResult<V>(pass, c.warp, c.lane).preload(job); };
  const auto pass_from = [&](uint32_t tile) { return Span{tile, min(tiles.end, tile + V::kMainloopTiles)}; };
  const bool has_lines = c.warp < Q::kLanes;
  LineScales<V> scales{};
  const auto load_scales = [&](uint32_t tile) {
    if (has_lines && tile < tiles.end) scales.load(job, pass_from(tile), 0, c.warp * Q::kLinesOfBox, c.lane);
  };
  typename V::Extra extra{};
  if constexpr (V::kEarly && V::kHasExtra) extra = preload(pass_from(tiles.begin));
  load_scales(tiles.begin);
  if (!stage_lines<V>(c, job, lines)) return;
  c.stamp(&PhaseStamps::staged);
  float* left = reinterpret_cast<float*>(lines.staged + Q::kSumsOffset);
#pragma unroll 1
  for (uint32_t first = tiles.begin; first < tiles.end; first += V::kMainloopTiles) {
    const Span pass = pass_from(first);
    if constexpr (V::kHasExtra)
      if (!V::kEarly || first != tiles.begin) extra = preload(pass);
    if (has_lines) sum_lines<V>(c, job, pass, lines, scales, first == tiles.begin, left + c.warp * Q::kWarpFloats);
    c.entry += (pass.end - pass.begin) * V::kParts * Q::kEntries;
    if (!c.sync()) return;
    load_scales(pass.end);
    finish_tiles<V>(c, job, pass, ColumnSums<V>{left}, RowSums<V>(c, job, 0), extra);
    if (pass.end < tiles.end && !c.sync()) return;
  }
}

}  // namespace mpk::linear
