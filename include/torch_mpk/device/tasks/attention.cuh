// attention: one query position per row of the batch against a key-value cache, softmax in fp32.
//
// The visible positions of every (batch row, group) are cut into pieces, see KvPlan in partition.h: ragged batches and
// long contexts use the whole device. The loader streams a piece tile by tile, keys and values of a few positions, each
// tile for one warp. Within a piece warps combine in tile order, and pieces combine in the order of their positions:
// nothing is added in order of arrival.
//
// Work W:
//   T, kBatch, kGroups, kPasses, kHeads, kSize, kLength, kWorkers
//     kHeads query heads are worked on at a time; kPasses such groups share a key-value head, each streaming it anew
//   kZeroWithoutKeys     what a head that attends to nothing gives; otherwise it gives NaN
//   limit(job, b), partials(job)
//
// A variant V describes one job:
//   Work, kScale, kHasNew, kHasMask, kMaskPerHead, kPitchK, kPitchV (bytes from position to position)
//   kTagged, tag(job)    y travels as tagged words, with this tag
//   slot(job), mask(job, b, h, position), y(job, b, h), k_cache(job, b, g), v_cache(job, b, g), arrivals(job)
//   RowsQ, RowsK, RowsV           how the rows of q and of the new position come: Chain<Group>, see row.cuh,
//   constructed
//                                 with the row of the batch too; their references begin with kRefsQ, kRefsK, kRefsV
//   kOneChain                     RowsK is RowsQ, and RowsV fetches as RowsQ does and applies nothing
//   kEarly                        limits, the slot and what the chains fetch first are known before the phase's events
#pragma once

#include "torch_mpk/device/partition.h"
#include "torch_mpk/device/row.cuh"
#include "torch_mpk/device/tasks/linear.cuh"

namespace mpk::attention {

constexpr int floor_power_of_two(int n) { return n < 2 ? 1 : 2 * floor_power_of_two(n / 2); }

// A partial result: the unnormalised output, the maximum, the sum of exponentials, padding.
template <class W>
inline constexpr int kPartial = W::kSize + 4;

template <class W>
MPK_DEVICE uint32_t visible(const Job& job, uint32_t row) {
  const int64_t limit = W::limit(job, row);
  return limit < 0 ? 0 : limit > W::kLength ? W::kLength : static_cast<uint32_t>(limit);
}

// Positions of a tile: what the tensor cores take at once, if keys fit a ring entry.
template <class W>
inline constexpr int kTile = floor_power_of_two(kSlotBytes / (W::kSize * int(sizeof(typename W::T)))) < 16
                                 ? floor_power_of_two(kSlotBytes / (W::kSize * int(sizeof(typename W::T))))
                                 : 16;

// How the work is cut. Limits are read once where there is one row, and again wherever they are asked for otherwise.
template <class W>
struct Cut {
  const Job& job;
  uint32_t first;
  uint32_t length = 0;  // of a piece, in tiles

  MPK_DEVICE explicit Cut(const Job& job) : job(job), first(tiles(job, 0)) {
    length = kv_length(*this, W::kBatch, W::kGroups * W::kPasses, kConsumerWarps, 4 * kConsumerWarps, W::kWorkers);
  }
  static MPK_DEVICE uint32_t tiles(const Job& job, uint32_t row) {
    const uint32_t tiles = (visible<W>(job, row) + kTile<W> - 1) / kTile<W>;
    return tiles == 0 ? 1 : tiles;  // a row without keys still has a result
  }
  MPK_DEVICE uint32_t operator()(uint32_t row) const { return W::kBatch == 1 ? first : tiles(job, row); }
  MPK_DEVICE uint32_t pieces() const { return kv_pieces(*this, W::kBatch, W::kGroups * W::kPasses, length); }
  MPK_DEVICE KvPiece piece(uint32_t number) const { return kv_piece(*this, W::kGroups * W::kPasses, length, number); }
};

template <class V>
struct Shape {
  using W = typename V::Work;
  using T = typename W::T;
  static constexpr int kHeads = W::kHeads, kSize = W::kSize, kTile = attention::kTile<W>;
  static constexpr int kRowBytes = kSize * int(sizeof(T));
  static constexpr bool kTogether = 2 * kTile * kRowBytes <= kSlotBytes;  // keys and values in one ring entry
  static constexpr int kEntries = kTogether ? 1 : 2;                      // of a tile
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kChunks = kSize / kVec;  // 16-byte chunks of a row
  static constexpr bool kTensorCores = sizeof(T) == 2 && kTile == 16;
  static constexpr int kRoundFit = 24 * 1024 / (kConsumerWarps * kPartial<W> * 4);
  static constexpr int kRound = kRoundFit < 1        ? 1
                                : kRoundFit < kHeads ? kRoundFit
                                                     : kHeads;  // heads combined at a time
  // Shared memory, in bytes from the staged area: rows of q, k_new and v_new, for tensor cores with 8 rows of q.
  static constexpr int kNewRow = kTensorCores ? 8 : kHeads;
  static constexpr int kPitch = kSize + (kTensorCores ? 32 : 0);  // elements: rows side by side in other banks
  static constexpr int kScratchOffset = (kNewRow + 2) * kPitch * int(sizeof(T));
  static constexpr int kScratchFloats = kTensorCores ? 0 : kHeads * kTile;  // per warp
  static constexpr int kFloatsOffset = kScratchOffset + kConsumerWarps * kScratchFloats * 4;
  static constexpr int kCombineOffset = kFloatsOffset + (kTensorCores ? 0 : kHeads * kSize * 4);
  static constexpr int kStagedBytes = kCombineOffset + kConsumerWarps * kRound * kPartial<W> * 4;
};

// ---- the loader's part

// Keys and values are the two parts of a tile, positions its rows.
template <class V, class L>
MPK_DEVICE void load(L& l, const Job& job) {
  using S = Shape<V>;
  using W = typename V::Work;
  constexpr Stream kStream{S::kTile, 2, S::kTogether ? 2 : 1, S::kRowBytes, S::kRowBytes, 1, S::kEntries};
  const Cut<W> cut(job);
  const uint32_t pieces = cut.pieces();
#pragma unroll 1
  for (uint32_t number = l.worker(job); number < pieces; number += W::kWorkers) {
    const KvPiece piece = cut.piece(number);
    const uint32_t group = piece.group / W::kPasses, end = piece.first_tile + piece.num_tiles;
    if (l.lane < 2) {
      l.shared.data[l.lane] = reinterpret_cast<uint64_t>(l.lane == 0 ? V::k_cache(job, piece.row, group)
                                                                     : V::v_cache(job, piece.row, group));
      l.shared.matrices[l.lane] = {l.lane == 0 ? V::kPitchK : V::kPitchV, visible<W>(job, piece.row), 0, end};
    }
    __syncwarp();
    if (!l.fill(kStream, l.shared.data, l.shared.matrices, {piece.first_tile, end})) return;
  }
}

// ---- one warp's tiles: the running softmax

// A tile in shared memory, as a warp meets it.
template <class V>
struct Tile {
  using T = typename V::Work::T;
  const T *keys, *values;  // [position][kSize]
  int rows;                // positions that count
};

// The hardware's exponential is good to a millionth of the result: enough where that is rounded to 16 bits.
template <class T>
MPK_DEVICE float exponential(float x) {
  return sizeof(T) == 2 ? __expf(x) : expf(x);
}

// The exponential of a score, 0 for one that does not count; NaN stays NaN.
template <class T>
MPK_DEVICE float weigh(float score, float max) {
  return score == -infinity() ? 0.0f : exponential<T>(score - max);
}
template <class T>
MPK_DEVICE float rescale(float old_max, float new_max) {
  return new_max == -infinity() ? 1.0f : exponential<T>(old_max - new_max);
}

// On tensor cores, 16 positions by 8 heads: S = K Q^T, then Out^T = V^T P, with P split into a rounded part and the
// rest of it, so that P is as good as fp32. Lane 4g + t holds scores of positions g and g + 8, heads 2t and 2t + 1.
// Which element stands where along the summed dimension is free as long as both factors agree, so fragments are read in
// 16-byte chunks.
template <class V>
struct TensorCoreSoftmax {
  using S = Shape<V>;
  using T = typename S::T;
  static constexpr int kEighths = (S::kChunks + 7) / 8;
  float max[2], sum[2];            // of heads 2t, 2t + 1; the sum is a lane's own share
  float mask[4] = {};              // of the tile at hand
  float out[kEighths][4][4] = {};  // [i][j]: elements 8 (g + 8 i) + 2j, + 1 of heads 2t, 2t + 1

  MPK_DEVICE TensorCoreSoftmax() : max{-infinity(), -infinity()}, sum{} {}

  // Begins to read the masks of a tile.
  MPK_DEVICE void fetch_mask(const Job& job, const KvPiece& piece, int first, int rows, int lane) {
    if constexpr (V::kHasMask) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int place = lane / 4 + i / 2 * 8, head = V::kMaskPerHead ? lane % 4 * 2 + i % 2 : 0;
        if (i % 2 == 1 && !V::kMaskPerHead)
          mask[i] = mask[i - 1];
        else if (place < rows && head < S::kHeads)
          mask[i] = V::mask(job, piece.row, piece.group * S::kHeads + head, first + place);
      }
    }
  }

  template <class Values>  // values(): waits for the tile's values
  MPK_DEVICE bool add(const Tile<V>& tile, uint8_t* staged, int, int lane, Values values) {
    const int g = lane / 4, t = lane % 4;
    const uint4 zero{};
    float scores[4] = {};
    const T* q = reinterpret_cast<const T*>(staged);
    // Eight lanes read at a time, of two rows. Rows begin in the same bank: where lanes of odd rows read the chunks of
    // two steps in reverse, they meet different banks.
    constexpr bool kReversed = S::kChunks % 8 == 0;
    const auto key_chunk = [&](int row, int chunk) {
      if (kReversed && g % 2 == 1) chunk ^= 4;
      const bool in = S::kChunks % 4 == 0 || chunk + t < S::kChunks;
      return in ? reinterpret_cast<const uint4*>(tile.keys + row * S::kSize)[chunk + t] : zero;
    };
    constexpr int kSteps = kReversed ? 2 : 1;
#pragma unroll
    for (int i = 0; i < S::kChunks; i += 4 * kSteps) {
      uint4 low[kSteps], high[kSteps];
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        low[s] = key_chunk(g, i + 4 * s);
        high[s] = key_chunk(g + 8, i + 4 * s);
      }
      if (kReversed) {
        exchange(low[0], low[kSteps - 1], g % 2 == 1);
        exchange(high[0], high[kSteps - 1], g % 2 == 1);
      }
#pragma unroll
      for (int s = 0; s < kSteps; s++) {
        const int chunk = i + 4 * s + t;
        const bool in = S::kChunks % 4 == 0 || chunk < S::kChunks;
        const uint4 query = in ? reinterpret_cast<const uint4*>(q + g * S::kPitch)[chunk] : zero;
        ptx::mma<T>(scores, {low[s].x, high[s].x, low[s].y, high[s].y}, {query.x, query.y});
        ptx::mma<T>(scores, {low[s].z, high[s].z, low[s].w, high[s].w}, {query.z, query.w});
      }
    }
    float weights[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      scores[i] = g + i / 2 * 8 < tile.rows ? __fadd_rn(__fmul_rn(scores[i], V::kScale), mask[i]) : -infinity();
    float keep[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = fmaxf(scores[h], scores[h + 2]);
#pragma unroll
      for (int o = 4; o < 32; o *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
      const float old = max[h];
      max[h] = fmaxf(old, top);
      keep[h] = rescale<T>(old, max[h]);
      weights[h] = weigh<T>(scores[h], max[h]);
      weights[h + 2] = weigh<T>(scores[h + 2], max[h]);
      sum[h] = fmaf(sum[h], keep[h], weights[h] + weights[h + 2]);
    }
    uint32_t rounded[2], rest[2];  // positions 0 to 7, 8 to 15
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const Vec<T, 2> r{cast<T>(weights[2 * i]), cast<T>(weights[2 * i + 1])};
      const Vec<T, 2> d{cast<T>(weights[2 * i] - to_float(r.v[0])), cast<T>(weights[2 * i + 1] - to_float(r.v[1]))};
      rounded[i] = ptx::transpose(bits_of(r));
      rest[i] = ptx::transpose(bits_of(d));
    }
    if (!values()) return false;
    // Here eight lanes read of four rows; every other one in reverse.
    constexpr int kGroup = S::kChunks % 16 == 0 ? 2 : 1;
#pragma unroll
    for (int first = 0; first < kEighths; first += kGroup) {
      uint4 rows[kGroup][4];
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const int place = 2 * t + r % 2 + r / 2 * 8;
#pragma unroll
        for (int s = 0; s < kGroup; s++) {
          const int chunk = g + 8 * (first + (kGroup == 2 ? s ^ t % 2 : s));
          const bool in = (S::kChunks % 8 == 0 || chunk < S::kChunks) && place < tile.rows;
          rows[s][r] = in ? reinterpret_cast<const uint4*>(tile.values + place * S::kSize)[chunk] : zero;
        }
        if (kGroup == 2) exchange(rows[0][r], rows[kGroup - 1][r], t % 2 == 1);
      }
#pragma unroll
      for (int s = 0; s < kGroup; s++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const uint32_t words[4] = {word(rows[s][0], j), word(rows[s][1], j), word(rows[s][2], j),
                                     word(rows[s][3], j)};
          const ptx::Quad v{ptx::low_halves(words[0], words[1]), ptx::high_halves(words[0], words[1]),
                            ptx::low_halves(words[2], words[3]), ptx::high_halves(words[2], words[3])};
          float (&sums)[4] = out[first + s][j];
#pragma unroll
          for (int e = 0; e < 4; e++) sums[e] *= keep[e % 2];
          ptx::mma<T>(sums, v, {rounded[0], rounded[1]});
          ptx::mma<T>(sums, v, {rest[0], rest[1]});
        }
    }
    return true;
  }

  // Writes heads [first, first + kRound) as partials.
  MPK_DEVICE void store(int first, float* partials, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float total = sum[h];
#pragma unroll
      for (int o = 4; o < 32; o *= 2) total += __shfl_xor_sync(~0u, total, o);
      const int head = 2 * t + h;
      if (head < first || head >= first + S::kRound || head >= S::kHeads) continue;
      float* to = partials + (head - first) * kPartial<typename V::Work>;
#pragma unroll
      for (int i = 0; i < kEighths; i++) {
        if (S::kChunks % 8 != 0 && g + 8 * i >= S::kChunks) continue;
        float4* quads = reinterpret_cast<float4*>(to + 8 * (g + 8 * i));
        quads[0] = make_float4(out[i][0][h], out[i][0][h + 2], out[i][1][h], out[i][1][h + 2]);
        quads[1] = make_float4(out[i][2][h], out[i][2][h + 2], out[i][3][h], out[i][3][h + 2]);
      }
      if (g == 0) {
        to[S::kSize] = max[h];
        to[S::kSize + 1] = total;
      }
    }
  }

 private:
  static MPK_DEVICE void exchange(uint4& a, uint4& b, bool really) {
    const uint4 old = a;
    if (really) a = b, b = old;
  }
  static MPK_DEVICE uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
  static MPK_DEVICE uint32_t bits_of(const Vec<T, 2>& v) { return *reinterpret_cast<const uint32_t*>(&v); }
};

// With fused multiply-adds, for fp32. Maxima are the same in all lanes; `sum` is a lane's own share.
template <class V>
struct FmaSoftmax {
  using S = Shape<V>;
  using T = typename S::T;
  // Scores: 32 / kTile lanes share a position, and take its 16-byte chunks in turn.
  static constexpr int kLanesPerPosition = 32 / S::kTile;
  // Values: kRowLanes lanes cover a row, four elements each; 32 / kRowLanes sets of lanes take positions in turn.
  static constexpr int kQuads = S::kSize / 4;
  static constexpr int kRowLanes = kQuads >= 32 ? 32 : linear::next_power_of_two(kQuads);
  static constexpr int kSets = 32 / kRowLanes;
  static constexpr int kQuadsPerLane = (kQuads + kRowLanes - 1) / kRowLanes;
  float max[S::kHeads], sum[S::kHeads] = {};
  float out[S::kHeads][kQuadsPerLane][4] = {};
  static constexpr int kMasks = V::kMaskPerHead ? S::kHeads : 1;
  float mask[kMasks] = {};  // of the tile at hand

  MPK_DEVICE FmaSoftmax() {
#pragma unroll
    for (int h = 0; h < S::kHeads; h++) max[h] = -infinity();
  }

  // Where element d of a query head stands: the quads of a 16-byte chunk side by side, so that lanes reading different
  // chunks meet different banks.
  static MPK_DEVICE int query_place(int d) {
    const int chunk = d / S::kVec, e = d % S::kVec;
    return (e / 4) * (S::kChunks * 4) + chunk * 4 + e % 4;
  }

  MPK_DEVICE void fetch_mask(const Job& job, const KvPiece& piece, int first, int rows, int lane) {
    if constexpr (V::kHasMask)
      if (lane % S::kTile < rows) {
#pragma unroll
        for (int h = 0; h < kMasks; h++)
          mask[h] = V::mask(job, piece.row, piece.group * S::kHeads + h, first + lane % S::kTile);
      }
  }

  template <class Values>
  MPK_DEVICE bool add(const Tile<V>& tile, uint8_t* staged, int warp, int lane, Values values) {
    const float* queries = reinterpret_cast<const float*>(staged + S::kFloatsOffset);
    float* weights = reinterpret_cast<float*>(staged + S::kScratchOffset) + warp * S::kScratchFloats;
    const int place = lane % S::kTile, share = lane / S::kTile;
    const bool counts = place < tile.rows;
    float scores[S::kHeads] = {};
    const uint4* keys = reinterpret_cast<const uint4*>(tile.keys + place * S::kSize);
    const int start = place % S::kChunks;  // rows begin in the same bank: lanes begin at different chunks
#pragma unroll 4
    for (int i = share; i < S::kChunks; i += kLanesPerPosition) {
      const int chunk = i + start < S::kChunks ? i + start : i + start - S::kChunks;
      float k[S::kVec];
      linear::unpack<T>(keys[chunk], k);
#pragma unroll
      for (int h = 0; h < S::kHeads; h++)
#pragma unroll
        for (int e = 0; e < S::kVec; e += 4) {
          const float4 q = *reinterpret_cast<const float4*>(queries + h * S::kSize + e * S::kChunks + chunk * 4);
          scores[h] = fmaf(q.x, k[e], scores[h]);
          scores[h] = fmaf(q.y, k[e + 1], scores[h]);
          scores[h] = fmaf(q.z, k[e + 2], scores[h]);
          scores[h] = fmaf(q.w, k[e + 3], scores[h]);
        }
    }
#pragma unroll
    for (int h = 0; h < S::kHeads; h++) {
#pragma unroll
      for (int o = S::kTile; o < 32; o *= 2) scores[h] += __shfl_xor_sync(~0u, scores[h], o);
      scores[h] = counts ? __fadd_rn(__fmul_rn(scores[h], V::kScale), mask[V::kMaskPerHead ? h : 0]) : -infinity();
      const float old = max[h];
      max[h] = fmaxf(old, warp_max(scores[h]));
      const float keep = rescale<T>(old, max[h]), weight = weigh<T>(scores[h], max[h]);
      sum[h] = fmaf(sum[h], keep, lane < S::kTile ? weight : 0.0f);
#pragma unroll
      for (int i = 0; i < kQuadsPerLane; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[h][i][e] *= keep;
      if (lane < S::kTile) weights[h * S::kTile + lane] = weight;
    }
    __syncwarp();
    if (!values()) return false;
    const int column = lane % kRowLanes;
#pragma unroll 4
    for (int p = lane / kRowLanes; p < tile.rows; p += kSets) {
#pragma unroll
      for (int i = 0; i < kQuadsPerLane; i++) {
        const int quad = column + i * kRowLanes;
        if (kQuads % kRowLanes != 0 && quad >= kQuads) continue;
        const Vec<T, 4> v = reinterpret_cast<const Vec<T, 4>*>(tile.values + p * S::kSize)[quad];
#pragma unroll
        for (int h = 0; h < S::kHeads; h++)
#pragma unroll
          for (int e = 0; e < 4; e++) out[h][i][e] = fmaf(weights[h * S::kTile + p], to_float(v.v[e]), out[h][i][e]);
      }
    }
    __syncwarp();
    return true;
  }

  // Writes heads [first, first + kRound) as partials.
  MPK_DEVICE void store(int first, float* partials, int lane) {
#pragma unroll
    for (int h = 0; h < S::kHeads; h++) {
      if (h < first || h >= first + S::kRound) continue;
      float* to = partials + (h - first) * kPartial<typename V::Work>;
      const float total = warp_sum(sum[h]);
#pragma unroll
      for (int i = 0; i < kQuadsPerLane; i++) {
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
          for (int o = 16; o >= kRowLanes; o /= 2) out[h][i][e] += __shfl_xor_sync(~0u, out[h][i][e], o);
        const int quad = lane + i * kRowLanes;
        if (lane < kRowLanes && quad < kQuads)
          reinterpret_cast<float4*>(to)[quad] = make_float4(out[h][i][0], out[h][i][1], out[h][i][2], out[h][i][3]);
      }
      if (lane == 0) {
        to[S::kSize] = max[h];
        to[S::kSize + 1] = total;
      }
    }
  }
};

// ---- combining

// Four elements of a result: their unnormalised sums, the maximum, the sum of exponentials.
struct Combined {
  float4 out;
  float max, sum;
};

// Four elements of `count` partials, `stride` floats apart, added in order; `scale` points to the first one's maximum
// and sum. Four partials are fetched at a time, with their maxima. Out of line: warps, pieces and readers use the same
// code.
template <class T>
__device__ __noinline__ Combined combine(const float* out, const float* scale, int stride, int count) {
  Combined c{make_float4(0, 0, 0, 0), -infinity(), 0};
#pragma unroll 1
  for (int first = 0; first < count; first += 4, out += 4 * stride, scale += 4 * stride) {
    float4 outs[4];
    float2 scales[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool in = first + i < count;
      outs[i] = in ? *reinterpret_cast<const float4*>(out + i * stride) : make_float4(0, 0, 0, 0);
      scales[i] = in ? *reinterpret_cast<const float2*>(scale + i * stride) : make_float2(-infinity(), 0);
    }
    const float before = c.max;
#pragma unroll
    for (int i = 0; i < 4; i++) c.max = fmaxf(c.max, scales[i].x);
    auto scale_by = [&](float keep, const float4& more, float more_sum, float keep_more) {
      c.out.x = fmaf(more.x, keep_more, c.out.x * keep);
      c.out.y = fmaf(more.y, keep_more, c.out.y * keep);
      c.out.z = fmaf(more.z, keep_more, c.out.z * keep);
      c.out.w = fmaf(more.w, keep_more, c.out.w * keep);
      c.sum = fmaf(more_sum, keep_more, c.sum * keep);
    };
#pragma unroll
    for (int i = 0; i < 4; i++)
      scale_by(i == 0 ? rescale<T>(before, c.max) : 1.0f, outs[i], scales[i].y, rescale<T>(scales[i].x, c.max));
  }
  return c;
}

// Four elements of a result, rounded. Without any key: zero or NaN.
template <class W>
MPK_DEVICE Vec<typename W::T, 4> result(const Combined& c) {
  using T = typename W::T;
  const bool zero = W::kZeroWithoutKeys && c.sum == 0;
  auto divide = [&](float v) { return zero ? 0.0f : sizeof(T) == 2 ? __fdividef(v, c.sum) : v / c.sum; };
  return {cast<T>(divide(c.out.x)), cast<T>(divide(c.out.y)), cast<T>(divide(c.out.z)), cast<T>(divide(c.out.w))};
}

// Four elements of a result, to where they stand: anywhere, or as tagged words.
template <class V>
MPK_DEVICE void store_quad(const Job& job, uint32_t row, uint32_t head, int d, const Vec<typename V::Work::T, 4>& v) {
  auto* y = V::y(job, row, head) + d;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (V::kTagged)
      store_word(y + i, v.v[i], V::tag(job));
    else
      y[i] = v.v[i];
  }
}

// Calls combined(head, d) for every fourth element of `heads` heads.
template <int kSize, class Combine>
MPK_DEVICE void for_each_quad(int heads, int rank, Combine combined) {
#pragma unroll 1
  for (int i = rank; i < heads * (kSize / 4); i += kConsumerThreads) combined(i / (kSize / 4), i % (kSize / 4) * 4);
}

// ---- the consumers' part

// The row of this warp: fetched by Rows, whose tasks are applied unless it is the row of a value that comes with keys'.
template <class Rows, class V, class C>
MPK_DEVICE bool stage_row(C& c, const Job& params, const Job& source, uint32_t row, uint32_t batch_row, bool applied,
                          typename V::Work::T* data) {
  WarpThreads<C> threads(c);
  typename Rows::template Chain<WarpThreads<C>> chain(threads, params, row, batch_row);
  if (!c.await()) return false;
  if (data == nullptr) return true;
  chain.fetch(threads, source, row, data);
  if (applied) chain.apply(threads, params, row, data);
  __syncwarp();
  return true;
}

// The rows of q and, with a new position, its key and value; each by one warp. The worker with the first tile of a
// group also writes them to the caches. False when the launch was given up.
template <class V, class C>
MPK_DEVICE bool stage(C& c, const Job& job, const KvPiece& piece, int64_t slot) {
  using S = Shape<V>;
  using W = typename V::Work;
  using T = typename W::T;
  static_assert(W::kHeads + 2 <= kConsumerWarps);
  const uint32_t group = piece.group / W::kPasses;
  const int place = c.warp;
  const bool is_query = place < W::kHeads, is_key = V::kHasNew && place == W::kHeads,
             is_value = V::kHasNew && place == W::kHeads + 1;
  const uint32_t row = is_query ? piece.row * (W::kGroups * W::kPasses * W::kHeads) + piece.group * W::kHeads + place
                                : piece.row * W::kGroups + group;
  T* rows = reinterpret_cast<T*>(c.staged());
  T* data = is_query             ? rows + place * S::kPitch
            : is_key || is_value ? rows + (S::kNewRow + (is_key ? 0 : 1)) * S::kPitch
                                 : nullptr;
  bool ok = true;
  if constexpr (V::kOneChain) {
    const uint32_t source = is_query ? V::kRefsQ : is_value ? V::kRefsV : V::kRefsK;
    ok = stage_row<typename V::RowsQ, V>(c, job.from(is_query ? V::kRefsQ : V::kRefsK), job.from(source), row,
                                         piece.row, !is_value, data);
  } else {
    const Job q = job.from(V::kRefsQ);
    if (is_query) ok = stage_row<typename V::RowsQ, V>(c, q, q, row, piece.row, true, data);
    if constexpr (V::kHasNew) {
      const Job k = job.from(V::kRefsK), v = job.from(V::kRefsV);
      if (is_key) ok = stage_row<typename V::RowsK, V>(c, k, k, row, piece.row, true, data);
      if (is_value) ok = stage_row<typename V::RowsV, V>(c, v, v, row, piece.row, true, data);
    }
  }
  if (!ok || !c.await()) return false;
  if constexpr (!S::kTensorCores) {
    float* queries = reinterpret_cast<float*>(c.staged() + S::kFloatsOffset) + c.warp * S::kSize;
    if (is_query)
      for (int d = c.lane; d < S::kSize; d += 32) queries[FmaSoftmax<V>::query_place(d)] = to_float(data[d]);
  }
  if ((is_key || is_value) && piece.first_tile == 0 && piece.group % W::kPasses == 0 && slot >= 0 &&
      slot < W::kLength) {
    T* cache = is_key ? V::k_cache(job, piece.row, group) : V::v_cache(job, piece.row, group);
    T* to = reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(cache) + slot * (is_key ? V::kPitchK : V::kPitchV));
    for (int i = c.lane; i < S::kChunks; i += 32) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<uint4*>(data)[i];
  }
  return c.sync();
}

// One tile of keys and values; false when the launch was given up.
template <class V, class C, class Softmax>
MPK_DEVICE bool add_tile(C& c, const Job& job, const KvPiece& piece, uint32_t index, uint32_t limit, int64_t slot,
                         Softmax& softmax) {
  using S = Shape<V>;
  using T = typename S::T;
  const T* new_rows = reinterpret_cast<const T*>(c.staged()) + S::kNewRow * S::kPitch;
  const uint32_t entry = c.entry + index * S::kEntries;
  const int first = (piece.first_tile + index) * S::kTile, rows = min(S::kTile, int(limit) - first);
  const bool has_new = V::kHasNew && slot >= first && slot < first + rows;
  auto data_of = [&](uint32_t e) { return reinterpret_cast<T*>(c.ring.slot(e)); };
  auto replace_row = [&](T* data, const T* row) {  // the cache may still hold what was there before this launch
    if (!has_new) return;
    for (int d = c.lane; d < S::kSize; d += 32) data[(slot - first) * S::kSize + d] = row[d];
    __syncwarp();
  };
  auto release = [&](uint32_t e) {
    if (has_new) ptx::fence_proxy_async();
    c.ring.release(e);
  };
  softmax.fetch_mask(job, piece, first, rows, c.lane);
  if (!c.ring.wait(entry, c.phase)) return false;
  T* keys = data_of(entry);
  T* values = S::kTogether ? keys + S::kTile * S::kSize : data_of(entry + 1);
  replace_row(keys, new_rows);
  if (S::kTogether) replace_row(values, new_rows + S::kPitch);
  auto await_values = [&] {
    if (S::kTogether) return true;
    release(entry);
    if (!c.ring.wait(entry + 1, c.phase)) return false;
    replace_row(values, new_rows + S::kPitch);
    return true;
  };
  if (!softmax.add(Tile<V>{keys, values, rows}, c.staged(), c.warp, c.lane, await_values)) return false;
  release(entry + S::kEntries - 1);
  return true;
}

// The worker that completes a group combines its pieces.
template <class V, class C>
MPK_DEVICE void combine_pieces(C& c, const Job& job, const KvPiece& piece) {
  using W = typename V::Work;
  using T = typename W::T;
  if (!c.sync()) return;
  if (c.rank == 0) {
    uint32_t* arrivals = V::arrivals(job) + piece.row * (W::kGroups * W::kPasses) + piece.group;
    c.shared.word = ptx::fetch_inc_acq_rel_gpu(arrivals, piece.count - 1) == piece.count - 1;
  }
  if (!c.sync() || c.shared.word == 0) return;
  const float* partials = W::partials(job);
  for_each_quad<W::kSize>(W::kHeads, c.rank, [&](int h, int d) {
    const float* from = partials + (piece.first * W::kHeads + h) * kPartial<W>;
    store_quad<V>(job, piece.row, piece.group * W::kHeads + h, d,
                  result<W>(combine<T>(from + d, from + W::kSize, W::kHeads * kPartial<W>, piece.count)));
  });
}

// The warps' results of a piece, put together and written: the result where the piece is all there is, else a partial
// one. False when the launch was given up.
template <class V, class C, class Softmax>
MPK_DEVICE bool combine_warps(C& c, const Job& job, const KvPiece& piece, bool complete, Softmax& softmax) {
  using S = Shape<V>;
  using W = typename V::Work;
  using T = typename W::T;
  const int active = min(uint32_t(kConsumerWarps), piece.num_tiles);
  float* round = reinterpret_cast<float*>(c.staged() + S::kCombineOffset);
  float* partials = W::partials(job) + (piece.first + piece.index) * W::kHeads * kPartial<W>;
#pragma unroll 1
  for (int first = 0; first < W::kHeads; first += S::kRound) {
    if (first > 0 && !c.sync()) return false;
    if (c.warp < active) softmax.store(first, round + c.warp * S::kRound * kPartial<W>, c.lane);
    if (!c.sync()) return false;
    const int heads = min(S::kRound, W::kHeads - first);
    for_each_quad<W::kSize>(heads, c.rank, [&](int h, int d) {
      const float* from = round + h * kPartial<W>;
      const Combined all = combine<T>(from + d, from + W::kSize, S::kRound * kPartial<W>, active);
      if (complete) {
        store_quad<V>(job, piece.row, piece.group * W::kHeads + first + h, d, result<W>(all));
      } else {
        float* to = partials + (first + h) * kPartial<W>;
        *reinterpret_cast<float4*>(to + d) = all.out;
        if (d == 0) *reinterpret_cast<float2*>(to + W::kSize) = make_float2(all.max, all.sum);
      }
    });
  }
  return true;
}

template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  using S = Shape<V>;
  using W = typename V::Work;
  static_assert(S::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  if (!V::kEarly && !c.await()) return;
  const Cut<W> cut(job);
  const int64_t slot = V::slot(job);
  const uint32_t worker = c.worker(job), pieces = cut.pieces();
  for (uint32_t number = worker; number < pieces; number += W::kWorkers) {
    if (number != worker && !c.sync()) return;  // the shared memory of the piece before is no longer read
    const KvPiece piece = cut.piece(number);
    const uint32_t limit = visible<W>(job, piece.row);
    const bool complete = piece.count == 1;
    using Softmax = typename Choose<S::kTensorCores, TensorCoreSoftmax<V>, FmaSoftmax<V>>::Type;
    Softmax softmax;
    if (!stage<V>(c, job, piece, slot)) return;
    c.stamp(&PhaseStamps::staged);
#pragma unroll 1
    for (uint32_t t = c.warp; t < piece.num_tiles && !c.failed; t += kConsumerWarps)
      c.failed = !add_tile<V>(c, job, piece, t, limit, slot, softmax);
    if (!combine_warps<V>(c, job, piece, complete, softmax)) return;
    c.entry += S::kEntries * piece.num_tiles;
    if (!complete) {
      combine_pieces<V>(c, job, piece);
      if (!c.alive) return;
    }
  }
}

}  // namespace mpk::attention
