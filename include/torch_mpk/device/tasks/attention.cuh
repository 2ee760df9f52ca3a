// attention: one query position per row of the batch against a key-value cache, softmax in fp32. The same of caches in
// pages is paged_attention.cuh, which says where positions lie (Positions) and which of a tile count (Live).
//
// The visible positions of every (batch row, group) are cut into pieces, see attention_pieces.cuh: with few of them
// so that a warp has one tile, and with many so that rows of any lengths are shared out evenly. The loader streams a
// piece tile by tile, keys and values of a few positions, each tile for one warp. The worker of a group's last piece
// puts the results of its pieces together: the others' come as tagged words, which it polls. Within a piece warps
// combine in tile order, and pieces combine in the order of their positions: nothing is added in order of arrival.
//
// A batch may have so many groups that a worker has several pieces one after the other (V::kOverlaps). Then some warps
// stage the rows of the next piece, and put the results of the one before together, while the others are at its tiles,
// of which they take turns through all pieces.
//
// A worker comes here once a layer and fetches all it executes anew, so the code is short: scores on tensor cores,
// where there are any for the dtype, one score of a head for each lane, and sums of values with fused multiply-adds, in
// which a lane has the same elements of all heads from the tiles to the result.
#pragma once

#include "torch_mpk/abi/partition.h"
#include "torch_mpk/device/fragment.cuh"
#include "torch_mpk/device/polled.cuh"
#include "torch_mpk/device/row.cuh"
#include "torch_mpk/device/tasks/attention_pieces.cuh"
#include "torch_mpk/device/tasks/linear.cuh"

namespace mpk::attention {

// What a variant says of one job.
template <class V>
concept Sizes = requires {
  typename V::T;
  requires Constants<int, V::kBatch, V::kGroups, V::kSize, V::kLength, V::kWorkers>;
  // With several rows: of a piece, at most, and the pieces that rows have as far as they are long enough. There is room
  // for kPieces pieces' results.
  requires Constants<int, V::kPieceTiles, V::kFewPieces, V::kPieces>;
  // kHeads query heads are worked on at a time; kPasses such groups share a key-value head, each streaming it anew;
  // kFewHeads divides kHeads, see Spread.
  requires Constants<int, V::kPasses, V::kHeads, V::kFewHeads>;
  requires Constants<bool, V::kHasNew, V::kHasMask, V::kOverlaps>;
  // Bytes from position to position.
  requires Constants<uint32_t, V::kPitchK, V::kPitchV>;
  { V::kScale } -> Same<const float&>;
  // What a head that attends to nothing gives; otherwise it gives NaN.
  requires Constants<bool, V::kZeroWithoutKeys>;
  // Scratch that the result of a head of a piece has.
  requires Constants<int, V::kPartialBytes>;
  // y travels as a polled vector.
  requires Constants<bool, V::kPolled>;
  // RowsK is RowsQ, and RowsV fetches as RowsQ does and applies nothing.
  requires Constants<bool, V::kOneChain>;
  // Limits, the slot and what the chains fetch first are known before the phase's events.
  requires Constants<bool, V::kEarly>;
};

template <class V>
concept Masked = requires(const Job& job, uint32_t b, uint32_t h, uint32_t position) {
  { V::mask(job, b, h, position) } -> Same<float>;
};

// Where keys and values are: a cache of each batch row b and group g,
template <class V>
concept InCaches = requires(const Job& job, uint32_t b, uint32_t g) {
  { V::k_cache(job, b, g) } -> Same<typename V::T*>;
  { V::v_cache(job, b, g) } -> Same<typename V::T*>;
  { V::slot(job) } -> Same<int64_t>;
};

// or pages, of which a table has the numbers: its place m of row b has that of positions m kPageSize to (m + 1)
// kPageSize, which is none if it is not below num_pages.
template <class V>
concept InPages = Constants<int, V::kPageSize> && requires(const Job& job, uint32_t b, int32_t page) {
  requires Constants<bool, V::kInBoxes>;  // keys and values come by maps
  { V::num_pages(job) } -> Same<int32_t>;
  { V::page(job, b, b) } -> Same<int32_t>;
  { V::k_pages(job, page, b) } -> Same<typename V::T*>;
  { V::v_pages(job, page, b) } -> Same<typename V::T*>;
};

// Where its operands are, for batch row b, group g and head h.
template <class V>
concept Places = (InCaches<V> || InPages<V>) && requires(const Job& job, uint32_t b, uint32_t h) {
  { V::limit(job, b) } -> Same<int64_t>;
  { V::partials(job) } -> Same<uint8_t*>;
  { V::y(job, b, h) } -> Same<typename Choose<V::kPolled, uint16_t*, typename V::T*>::Type>;
} && (!V::kHasMask || Masked<V>);

// How rows come: made with the row of the batch too, from references that begin with number `first`. C: the consumer.
template <class Rows, class V, class C, auto first>
concept Brings =
    Constants<uint32_t, first> &&
    RowChain<typename Rows::template Chain<WarpThreads<C>>, WarpThreads<C>, typename V::T, uint32_t, uint32_t>;

template <class V, class C>
concept BringsNew = Brings<typename V::RowsK, V, C, V::kRefsK> && Brings<typename V::RowsV, V, C, V::kRefsV>;

template <class V, class C>
concept Variant =
    Sizes<V> && Places<V> && Brings<typename V::RowsQ, V, C, V::kRefsQ> && (!V::kHasNew || BringsNew<V, C>);

constexpr int floor_power_of_two(int n) { return n < 2 ? 1 : 2 * floor_power_of_two(n / 2); }

// A warp's result: the unnormalised output, the maximum, the sum of exponentials, padding.
template <class V>
inline constexpr int kPartial = V::kSize + 4;

// Where a variant's positions lie, and which one a row writes first. In caches: all rows the same, side by side.
template <class V>
struct Positions {
  using T = typename V::T;
  using Slot = int64_t;
  Slot slot;

  MPK_DEVICE explicit Positions(const Job& job) : slot(V::slot(job)) {}

  // What the row writes; outside [0, kLength): nothing.
  MPK_DEVICE Slot written(const Job&, uint32_t) const { return slot; }

  // Finds the key or value of a position. False where it has none.
  static MPK_DEVICE bool find(const Job& job, uint32_t row, uint32_t group, Slot position, bool is_value, T*& at) {
    T* cache = is_value ? V::v_cache(job, row, group) : V::k_cache(job, row, group);
    at = reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(cache) + position * (is_value ? V::kPitchV : V::kPitchK));
    return true;
  }

  // Streams a piece's tiles; false when the launch was given up. Keys and values are the two parts of a tile, positions
  // its rows, of which the batch row has `limit`.
  template <class L>
  static MPK_DEVICE bool load(L& l, const Job& job, const KvPiece& piece, uint32_t limit);
};

template <class V>
using Slot = typename Positions<V>::Slot;

// Those of a tile's positions that count. In caches: all below the row's limit.
template <class V>
struct Live {
  static constexpr bool kAreKnown = true;  // and not said by the loader; those that count are in front of the others
  uint32_t rows;

  MPK_DEVICE Live(uint32_t first, uint32_t limit) : rows(min(uint32_t(kTile<V>), limit - first)) {}
  MPK_DEVICE bool has(uint32_t place) const { return place < rows; }
  MPK_DEVICE bool has(int64_t position, uint32_t first) const {
    return position >= int64_t(first) && position < int64_t(first) + rows;
  }
  MPK_DEVICE bool has_all() const { return rows == kTile<V>; }
  MPK_DEVICE uint32_t num_first() const { return rows; }  // in front of the first that does not count
};

// Of the partial results of a piece.
template <class V>
inline constexpr uint32_t kPieceBytes = V::kHeads * V::kPartialBytes;

// Warps that work on tiles.
template <class V>
inline constexpr int kTileWarps = kConsumerWarps - (V::kOverlaps ? kBringingWarps : 0);

template <Sizes V>
struct Shape {
  using T = typename V::T;
  static constexpr int kHeads = V::kHeads, kSize = V::kSize, kTile = attention::kTile<V>;
  static constexpr int kRowBytes = kSize * int(sizeof(T));
  static constexpr bool kTogether = 2 * kTile * kRowBytes <= kMinSlotBytes;  // keys and values in one ring entry
  static constexpr int kEntries = kTogether ? 1 : 2;                         // of a tile
  static constexpr int kParts = kTogether ? 2 : 1;                           // of an entry
  // Where workers have several pieces, nothing is polled that more entries in flight would delay.
  static constexpr uint32_t kInFlight = entries_in_flight(kParts * kTile * kRowBytes) * (V::kOverlaps ? 14 : 9) / 9;
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kChunks = kSize / kVec;  // 16-byte chunks of a row
  static constexpr bool kTensorCores = kHasFragments<T> && kTile == 16;
  // What a lane holds of every head's result: kWidth elements, and so many again for every 32 lanes.
  static constexpr int kWidth = lane_width<T>(kSize);
  static constexpr int kSteps = (kSize / kWidth + 31) / 32;
  // Rows of values summed at a time: as many as are quick to read at once, as long as the code is short.
  static constexpr int kAtATime = floor_power_of_two(32 / kHeads), kRows = kAtATime < kTile ? kAtATime : kTile;
  // The softmax of a tile: a lane has one score of a head, the warp kAtOnce heads.
  static constexpr int kAtOnce = 32 / kTile, kRounds = (kHeads + kAtOnce - 1) / kAtOnce;
  // Scores, then weights [position][kPad], with a row behind them: what to multiply results so far by.
  static constexpr int kPad = linear::next_power_of_two(kHeads > kAtOnce ? kHeads : kAtOnce);
  static constexpr int kWeights = ((kTile + 1) * kPad + 3) / 4 * 4;
  static constexpr int kFit = 24 * 1024 / (kConsumerWarps * kPartial<V> * 4);
  // Heads put together at a time.
  static constexpr int kStored = V::kOverlaps || kFit >= kHeads ? kHeads : kFit < 1 ? 1 : kFit;
  // Shared memory, in bytes from the staged area: rows of q, four at a time for tensor cores, then k_new and v_new.
  static constexpr int kNewRow = kTensorCores ? (kHeads + 3) / 4 * 4 : kHeads;
  static constexpr int kPitch = kSize + (kTensorCores ? 32 : 0);  // elements: rows side by side in other banks
  static constexpr int kWeightsOffset = (kNewRow + 2) * kPitch * int(sizeof(T));
  static constexpr int kFloatsOffset = kWeightsOffset + kTileWarps<V> * kWeights * 4;
  static constexpr int kCombineOffset = kFloatsOffset + (kTensorCores ? 0 : kHeads * kSize * 4);
  static constexpr int kStagedOfPiece = kCombineOffset + kTileWarps<V> * kStored * kPartial<V> * 4;
  static constexpr int kBufferBytes = (kStagedOfPiece + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
  static constexpr int kStagedBytes = V::kOverlaps ? 2 * kBufferBytes : kStagedOfPiece;
};

// ---- the loader's part

template <class V>
template <class L>
MPK_DEVICE bool Positions<V>::load(L& l, const Job& job, const KvPiece& piece, uint32_t limit) {
  using S = Shape<V>;
  constexpr uint32_t kParts = S::kParts, kBytes = S::kRowBytes, kEntries = S::kEntries;
  constexpr Stream kStream{S::kTile,          2,           kParts, kBytes, kBytes, 1, kEntries, inverse(1),
                           inverse(kEntries), S::kInFlight};
  const uint32_t group = piece.group / V::kPasses, end = piece.first_tile + piece.num_tiles;
  if (l.lane < 2) {
    l.shared.data[l.lane] =
        reinterpret_cast<uint64_t>(l.lane == 0 ? V::k_cache(job, piece.row, group) : V::v_cache(job, piece.row, group));
    l.shared.matrices[l.lane] = {l.lane == 0 ? V::kPitchK : V::kPitchV, limit, 0, end};
  }
  __syncwarp();
  return l.fill(kStream, l.shared.data, l.shared.matrices, {piece.first_tile, end});
}

template <class V, class L>
MPK_DEVICE void load_pieces(L& l, const Job& job) {
  const Cut<V> cut(job);
#pragma unroll 1
  for (uint32_t turn = 0;; turn++) {
    const KvPiece piece = cut.piece(turn, l.worker(job));
    if (piece.num_tiles == 0 || !Positions<V>::load(l, job, piece, cut.limit(piece.row))) return;
  }
}

template <class V, class L>
MPK_DEVICE void load(L& l, const Job& job) {
  static_assert(Sizes<V> && Places<V>);
  static_assert(
      V::kBatch == 1 ||
          kv_own_count(tiles_of<V>(V::kLength), V::kFewPieces, V::kPieceTiles) * V::kBatch * kUnits<V> <= V::kPieces,
      "the schedule has less room for results of pieces");
  if constexpr (kMaySpread<V>)
    if (spreads<V>(job)) return load_pieces<Spread<V>>(l, job);
  load_pieces<V>(l, job);
}

// ---- one warp's tiles: the running softmax

// A tile in shared memory, as a warp meets it.
template <class V>
struct Tile {
  using T = typename V::T;
  const T *keys, *values;  // [position][kSize]
  Live<V> live;            // positions that count; values of others are zero
};

// N floats moved in accesses of 16 bytes, or of all.
template <int N>
struct alignas(N < 4 ? 4 * N : 16) Floats {
  float v[N];
};

// The hardware's exponential is good to a millionth of the result: enough where that is rounded to 16 bits.
template <class T>
MPK_DEVICE float exponential(float x) {
  return sizeof(T) == 2 ? ptx::exp2(x * 1.44269504f) : expf(x);
}

// What to subtract from scores and maxima up to `max` before taking exponentials: exp(-inf) is 0, and nothing else
// comes of -inf, even where no score counts.
MPK_DEVICE float subtrahend(float max) { return max == -infinity() ? 0.0f : max; }

// Scores on tensor cores: S = K Q^T, 16 positions by four heads. Which element stands where along the summed dimension
// is free as long as both factors agree, so fragments are read in 16-byte chunks. Eight lanes read at a time, of two
// keys, which begin in the same bank: so odd keys' lanes read the halves of 8 chunks in reverse, and meet other banks.
// The columns of four more heads, which are free, hold the same heads with those halves reversed: in them odd keys meet
// the elements that are theirs.
template <class V>
MPK_DEVICE void tensor_core_scores(const Tile<V>& tile, const uint8_t* staged, float* scores, uint32_t lane) {
  using S = Shape<V>;
  using T = typename S::T;
  const uint32_t g = lane / 4, t = lane % 4;
  constexpr bool kReversed = S::kChunks % 8 == 0;
  const uint32_t key_flip = kReversed ? g % 2 * 4 : 0, query_flip = kReversed ? g / 4 * 4 : 0;
  const uint4* key = reinterpret_cast<const uint4*>(tile.keys) + g * S::kChunks + t;
  const uint4* query = reinterpret_cast<const uint4*>(reinterpret_cast<const T*>(staged) + g % 4 * S::kPitch) + t;
  const uint4* keys[2] = {key + key_flip, key + (key_flip ^ 4)};
  const uint4* queries[2] = {query + query_flip, query + (query_flip ^ 4)};
#pragma unroll 1
  for (int first = 0; first < S::kHeads; first += 4) {
    SumFragment sums[4] = {};
#pragma unroll
    for (int i = 0; i < S::kChunks; i += 4) {
      const bool in = S::kChunks % 4 == 0 || i + t < S::kChunks;
      const uint4* k = keys[i / 4 % 2] + i / 8 * 8;
      const uint4 low = in ? k[0] : uint4{}, high = in ? k[8 * S::kChunks] : uint4{};
      const uint4 q = in ? queries[i / 4 % 2][i / 8 * 8 + first * (S::kPitch / S::kVec)] : uint4{};
      multiply_pieces<T>(sums[i / 4 % 2], sums[2 + i / 4 % 2], {low, high}, {q});
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sums[0][i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
    // A lane has positions g and g + 8 of columns 2t, 2t + 1.
    const uint32_t head = first + t % 2 * 2;
    if (t / 2 == g % 2 && head < S::kPad) {
      using Two = Floats<2>;
      *reinterpret_cast<Two*>(scores + g * S::kPad + head) = {sums[0][0], sums[0][1]};
      *reinterpret_cast<Two*>(scores + (g + 8) * S::kPad + head) = {sums[0][2], sums[0][3]};
    }
  }
}

// Where element d of a query head stands for fma_scores: the quads of a 16-byte chunk side by side, so that lanes
// reading different chunks meet different banks.
template <class V>
MPK_DEVICE int query_place(int d) {
  using S = Shape<V>;
  const int chunk = d / S::kVec, e = d % S::kVec;
  return (e / 4) * (S::kChunks * 4) + chunk * 4 + e % 4;
}

// Scores with fused multiply-adds, for fp32: 32 / kTile lanes share a position, and take its chunks in turn.
template <class V>
MPK_DEVICE void fma_scores(const Tile<V>& tile, const uint8_t* staged, float* to, uint32_t lane) {
  using S = Shape<V>;
  using T = typename S::T;
  const float* queries = reinterpret_cast<const float*>(staged + S::kFloatsOffset);
  const uint32_t place = lane % S::kTile;
  float scores[S::kHeads] = {};
  const uint4* keys = reinterpret_cast<const uint4*>(tile.keys + place * S::kSize);
  const uint32_t start = place % S::kChunks;  // rows begin in the same bank: lanes begin at different chunks
#pragma unroll 4
  for (uint32_t i = lane / S::kTile; i < S::kChunks; i += S::kAtOnce) {
    const uint32_t chunk = i + start < S::kChunks ? i + start : i + start - S::kChunks;
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
    if (lane < S::kTile) to[place * S::kPad + h] = scores[h];
  }
}

// A lane's softmax: position lane % kTile of head kAtOnce r + lane / kTile in round r, and its elements of all heads'
// results. Weights go through the warp's shared memory, and stay fp32.
template <class V>
struct Softmax {
  using S = Shape<V>;
  using T = typename S::T;
  float max[S::kRounds], sum[S::kRounds] = {};  // maxima are a head's, the sum is a lane's own share
  float mask[S::kRounds] = {};                  // of the tile at hand
  float out[S::kHeads][S::kSteps][S::kWidth] = {};

  MPK_DEVICE Softmax() {
#pragma unroll
    for (int r = 0; r < S::kRounds; r++) max[r] = -infinity();
  }

  static MPK_DEVICE uint32_t head(int r, uint32_t lane) { return r * S::kAtOnce + lane / S::kTile; }
  static MPK_DEVICE bool holds(int s, uint32_t lane) {
    return S::kSize % (32 * S::kWidth) == 0 || (lane + 32 * s) * S::kWidth < S::kSize;
  }

  // Begins to read the masks of a tile.
  MPK_DEVICE void fetch_mask(const Job& job, const KvPiece& piece, uint32_t first, const Live<V>& live, uint32_t lane) {
    if constexpr (V::kHasMask)
#pragma unroll
      for (int r = 0; r < S::kRounds; r++)
        if (live.has(lane % S::kTile) && head(r, lane) < S::kHeads)
          mask[r] = V::mask(job, piece.row, piece.group * S::kHeads + head(r, lane), first + lane % S::kTile);
  }

  // `values()` waits for the tile's values.
  template <class Values>
  MPK_DEVICE bool add(const Tile<V>& tile, uint8_t* staged, uint32_t warp, uint32_t lane, Values values) {
    float* weights = reinterpret_cast<float*>(staged + S::kWeightsOffset) + warp * S::kWeights;
    if constexpr (S::kTensorCores)
      tensor_core_scores<V>(tile, staged, weights, lane);
    else
      fma_scores<V>(tile, staged, weights, lane);
    __syncwarp();
    const uint32_t place = lane % S::kTile;
#pragma unroll
    for (int r = 0; r < S::kRounds; r++) {
      float* at = weights + head(r, lane);
      const float score =
          tile.live.has(place) ? __fadd_rn(__fmul_rn(at[place * S::kPad], V::kScale), mask[r]) : -infinity();
      float top = fmaxf(max[r], score);
#pragma unroll
      for (int o = 1; o < S::kTile; o *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
      const float less = subtrahend(top);
      const float keep = exponential<T>(max[r] - less), weight = exponential<T>(score - less);
      max[r] = top;
      sum[r] = fmaf(sum[r], keep, weight);
      at[place * S::kPad] = weight;
      if (place == 0) at[S::kTile * S::kPad] = keep;
    }
    __syncwarp();
    if (!values()) return false;
    const auto keep = reinterpret_cast<const Floats<S::kPad>*>(weights)[S::kTile];
#pragma unroll
    for (int h = 0; h < S::kHeads; h++)
#pragma unroll
      for (int s = 0; s < S::kSteps; s++)
#pragma unroll
        for (int e = 0; e < S::kWidth; e++) out[h][s][e] *= keep.v[h];
    using Elements = Vec<T, S::kWidth>;
    const Elements* v = reinterpret_cast<const Elements*>(tile.values);
#pragma unroll 1
    for (int first = 0; first < S::kTile; first += S::kRows) {
      const auto w = reinterpret_cast<const Floats<S::kRows * S::kPad>*>(weights)[first / S::kRows];
#pragma unroll
      for (int p = 0; p < S::kRows; p++)
#pragma unroll
        for (int s = 0; s < S::kSteps; s++) {
          float x[S::kWidth];
          to_floats(v[(first + p) * (S::kSize / S::kWidth) + (holds(s, lane) ? lane + 32 * s : 0)], x);
#pragma unroll
          for (int h = 0; h < S::kHeads; h++)
#pragma unroll
            for (int e = 0; e < S::kWidth; e++) out[h][s][e] = fmaf(w.v[p * S::kPad + h], x[e], out[h][s][e]);
        }
    }
    return true;
  }

  // Writes heads [first, first + kStored) as partials.
  MPK_DEVICE void store(int first, float* partials, uint32_t lane) {
    const auto stored = [&](uint32_t h) {
      return (S::kStored == S::kHeads || h - first < S::kStored) && h < S::kHeads;
    };
    const auto partial = [&](uint32_t h) { return partials + (h - first) * kPartial<V>; };
#pragma unroll
    for (int h = 0; h < S::kHeads; h++)
#pragma unroll
      for (int s = 0; s < S::kSteps; s++)
        if (stored(h) && holds(s, lane)) {
          Floats<S::kWidth>* to = reinterpret_cast<Floats<S::kWidth>*>(partial(h));
#pragma unroll
          for (int e = 0; e < S::kWidth; e++) to[lane + 32 * s].v[e] = out[h][s][e];
        }
#pragma unroll
    for (int r = 0; r < S::kRounds; r++) {
      float total = sum[r];
#pragma unroll
      for (int o = 1; o < S::kTile; o *= 2) total += __shfl_xor_sync(~0u, total, o);
      const uint32_t h = head(r, lane);
      if (lane % S::kTile == 0 && stored(h)) *reinterpret_cast<Floats<2>*>(partial(h) + S::kSize) = {max[r], total};
    }
  }
};

// ---- combining

// A head's result, by one warp: a lane's unnormalised elements, the maximum, the sum of exponentials.
template <class V>
struct Combined {
  using S = Shape<V>;
  using T = typename V::T;
  using Part = Floats<S::kWidth>;
  float out[S::kSteps][S::kWidth] = {};
  float max = -infinity(), sum = 0;

  // As a partial result in memory: a lane's elements, two at a time, then the maximum and the sum.
  static constexpr int kElements = S::kSteps * S::kWidth, kPairs = (kElements + 1) / 2;
  static_assert((32 * kPairs + 1) * sizeof(ulonglong2) <= V::kPartialBytes,
                "codegen and device disagree on partial results");
  static constexpr uint32_t kAhead = 4;  // pieces

  // Of the warps' results, `stride` floats apart, added in order.
  MPK_DEVICE Combined(const float* results, int stride, uint32_t lane) {
    Floats<2> scales[kTileWarps<V>];
#pragma unroll
    for (int i = 0; i < kTileWarps<V>; i++) {
      scales[i] = *reinterpret_cast<const Floats<2>*>(results + i * stride + S::kSize);
      max = fmaxf(max, scales[i].v[0]);
    }
    const float less = subtrahend(max);
#pragma unroll
    for (int i = 0; i < kTileWarps<V>; i++) {
      const float f = exponential<T>(scales[i].v[0] - less);
      sum = fmaf(scales[i].v[1], f, sum);
      const Part* from = reinterpret_cast<const Part*>(results + i * stride) + lane;
#pragma unroll
      for (int s = 0; s < S::kSteps; s++)
        if (Softmax<V>::holds(s, lane))
#pragma unroll
          for (int e = 0; e < S::kWidth; e++) out[s][e] = fmaf(from[32 * s].v[e], f, out[s][e]);
    }
  }

  // Adds the results of the group's `count` other pieces, in order; `from`: of the first. Those of some pieces are all
  // in flight before the first tag is looked at; a lane has the maximum and the sum of one of them. False when the
  // launch was given up.
  template <class C>
  MPK_DEVICE bool add(C& c, const uint8_t* from, uint32_t count, uint32_t tag) {
    constexpr uint32_t kStride = kUnits<V> * kPieceBytes<V>;
    uint64_t since = 0;
#pragma unroll 1
    for (; count > 0; from += kAhead * kStride, count -= min(count, kAhead)) {
      ulonglong2 words[kAhead][kPairs], scale;
      const uint32_t lane = c.lane;
      const auto load = [&](uint32_t piece, uint32_t place) {
        return piece < count && piece < kAhead
                   ? ptx::load_relaxed_gpu(reinterpret_cast<const ulonglong2*>(from + piece * kStride) + place)
                   : tagged(0u, 0u, tag);
      };
      bool are_there = false;
      for (uint32_t polls = 1;; polls++) {
#pragma unroll
        for (uint32_t i = 0; i < kAhead; i++)
#pragma unroll
          for (int j = 0; j < kPairs; j++) words[i][j] = load(i, 32 * j + lane);
        scale = load(lane, 32 * kPairs);
        uint32_t missing = differing(scale, tag);
#pragma unroll
        for (uint32_t i = 0; i < kAhead; i++)
#pragma unroll
          for (int j = 0; j < kPairs; j++) missing |= differing(words[i][j], tag);
        are_there = missing == 0;
        if (are_there || ((polls & 4095) == 0 && (since = keep_polling(c.shared.watchdog, c.phase, since)) == 0)) break;
      }
      if (!__all_sync(~0u, are_there)) return false;
      const float before = max;
#pragma unroll
      for (uint32_t i = 0; i < kAhead; i++) {
        const float of_piece = __shfl_sync(~0u, float_of(scale.x), i);
        if (i < count) max = fmaxf(max, of_piece);
      }
      const float less = subtrahend(max), keep = exponential<T>(before - less);
      const float factors = exponential<T>(float_of(scale.x) - less);  // the lane's piece's
      sum *= keep;
#pragma unroll
      for (int e = 0; e < kElements; e++) element(e) *= keep;
#pragma unroll
      for (uint32_t i = 0; i < kAhead; i++) {
        const float factor = __shfl_sync(~0u, factors, i), of_piece = __shfl_sync(~0u, float_of(scale.y), i);
        if (i >= count) continue;
        sum = fmaf(of_piece, factor, sum);
#pragma unroll
        for (int e = 0; e < kElements; e++)
          element(e) = fmaf(float_of(e % 2 == 0 ? words[i][e / 2].x : words[i][e / 2].y), factor, element(e));
      }
    }
    return true;
  }

  // Rounded, to where the head stands: anywhere, or in a polled vector. Without any key: zero or NaN.
  MPK_DEVICE void store(const Job& job, uint32_t row, uint32_t head, uint32_t lane) const {
    const bool zero = V::kZeroWithoutKeys && sum == 0;
    const float inverse = zero ? 0.0f : __fdividef(1.0f, sum);
#pragma unroll
    for (int s = 0; s < S::kSteps; s++) {
      if (!Softmax<V>::holds(s, lane)) continue;
      auto* y = V::y(job, row, head) + (lane + 32 * s) * S::kWidth;
      float v[S::kWidth];
#pragma unroll
      for (int e = 0; e < S::kWidth; e++) v[e] = sizeof(T) == 2 ? out[s][e] * inverse : zero ? 0.0f : out[s][e] / sum;
      const Vec<T, S::kWidth> rounded = round_to<T>(v);
      if constexpr (V::kPolled) {
        store_elements(y, rounded);
      } else {
#pragma unroll
        for (int e = 0; e < S::kWidth; e++) y[e] = rounded.v[e];
      }
    }
  }

  // For the worker of the group's last piece.
  MPK_DEVICE void store_partial(uint8_t* at, uint32_t tag, uint32_t lane) {
    ulonglong2* to = reinterpret_cast<ulonglong2*>(at);
#pragma unroll
    for (int j = 0; j < kPairs; j++)
      ptx::store_relaxed_gpu(to + 32 * j + lane,
                             tagged(element(2 * j), 2 * j + 1 < kElements ? element(2 * j + 1) : 0.0f, tag));
    if (lane == 0) ptx::store_relaxed_gpu(to + 32 * kPairs, tagged(max, sum, tag));
  }

 private:
  MPK_DEVICE float& element(int i) { return out[i / S::kWidth][i % S::kWidth]; }
};

// ---- the consumers' part

template <class Rows, class V, class C>
MPK_DEVICE void stage_row(C& c, const Job& job, uint32_t row, uint32_t batch_row, typename V::T* data) {
  WarpThreads<C> threads(c);
  typename Rows::template Chain<WarpThreads<C>> chain(threads, job, row, batch_row);
  chain.fetch(threads, job, row, data);
  chain.apply(threads, job, row, data);
}

// Tiles of a piece that are there when it is staged: each warp's first, if the ring holds them at once, beside as many
// entries as the loader fills only together.
template <class V, class C>
inline constexpr uint32_t kHeldTiles =
    (C::Config::kSlots - (kLeastFilled<C::Config::kSlotBytes> - 1)) / Shape<V>::kEntries;
template <class V, class C>
inline constexpr uint32_t kStagedTiles = kHeldTiles<V, C> < kConsumerWarps ? kHeldTiles<V, C> : kConsumerWarps;

// Row `place` of those that a piece needs, brought to `staged` by a warp: first the rows of q, then, with a new
// position, its key and value, which the worker with the first tile of a group also writes to the caches. begins() is
// asked behind what is known of the rows beforehand; false when it says so.
template <class V, class C, class Begins>
MPK_DEVICE bool bring_row(C& c, const Job& job, const KvPiece& piece, Slot<V> slot, int place, uint8_t* staged,
                          Begins begins) {
  using S = Shape<V>;
  using T = typename V::T;
  const uint32_t group = piece.group / V::kPasses;
  const bool is_query = place < V::kHeads, is_value = place == V::kHeads + 1;
  const bool is_new = V::kHasNew && !is_query && place < V::kHeads + 2;
  const uint32_t row = is_query ? piece.row * (V::kGroups * V::kPasses * V::kHeads) + piece.group * V::kHeads + place
                                : piece.row * V::kGroups + group;
  T* data = reinterpret_cast<T*>(staged) + (is_query ? place : place - V::kHeads + S::kNewRow) * S::kPitch;
  if constexpr (V::kOneChain) {
    WarpThreads<C> threads(c);
    const Job chained = job.from(is_query ? V::kRefsQ : V::kRefsK);
    typename V::RowsQ::template Chain<WarpThreads<C>> chain(threads, chained, row, piece.row);
    if (!begins()) return false;
    if (is_query || is_new) {
      chain.fetch(threads, is_value ? job.from(V::kRefsV) : chained, row, data);
      if (!is_value) chain.apply(threads, chained, row, data);
    }
  } else {
    if (!begins()) return false;
    if (is_query) stage_row<typename V::RowsQ, V>(c, job.from(V::kRefsQ), row, piece.row, data);
    if constexpr (V::kHasNew) {
      if (is_new && !is_value) stage_row<typename V::RowsK, V>(c, job.from(V::kRefsK), row, piece.row, data);
      if (is_value) stage_row<typename V::RowsV, V>(c, job.from(V::kRefsV), row, piece.row, data);
    }
  }
  __syncwarp();
  if constexpr (!S::kTensorCores) {
    float* queries = reinterpret_cast<float*>(staged + S::kFloatsOffset) + place * S::kSize;
    if (is_query)
      for (int d = c.lane; d < S::kSize; d += 32) queries[query_place<V>(d)] = to_float(data[d]);
  }
  T* to;
  if (is_new && piece.first_tile == 0 && piece.group % V::kPasses == 0 && slot >= 0 && slot < V::kLength &&
      Positions<V>::find(job, piece.row, group, slot, is_value, to)) {
#pragma unroll
    for (int i = 0; i < S::kChunks; i += 32)
      if (i + c.lane < S::kChunks)
        reinterpret_cast<uint4*>(to)[i + c.lane] = reinterpret_cast<const uint4*>(data)[i + c.lane];
  }
  return true;
}

// What a piece needs in shared memory, each row by one warp. False when there is no such piece, or the launch was given
// up. What is known of the rows beforehand is fetched before it is known whether there is a piece, which takes a limit
// from memory.
template <class V, class C>
MPK_DEVICE bool stage(C& c, const Job& job, const KvPiece& piece, Slot<V> slot) {
  static_assert(V::kHeads + 2 <= kConsumerWarps);
  const auto begins = [&] { return (!V::kEarly || c.await()) && piece.num_tiles != 0; };
  if (!bring_row<V>(c, job, piece, slot, c.warp, c.staged(), begins)) return false;
  // The warp's first tile, so that code that is not in the instruction cache is fetched while the rows are awaited.
  if (c.warp < min(piece.num_tiles, kStagedTiles<V, C>) && !c.ring.wait(c.entry + c.warp * Shape<V>::kEntries, c.phase))
    c.failed = true;
  return c.sync();
}

// One tile of keys and values; false when the launch was given up. The first `present` tiles are known to be there.
template <class V, class C>
MPK_DEVICE bool add_tile(C& c, const Job& job, const KvPiece& piece, uint32_t index, uint32_t limit, Slot<V> slot,
                         uint8_t* staged, uint32_t present, Softmax<V>& softmax) {
  using S = Shape<V>;
  using T = typename S::T;
  const T* new_rows = reinterpret_cast<const T*>(staged) + S::kNewRow * S::kPitch;
  const uint32_t entry = c.entry + index * S::kEntries;
  const uint32_t first = (piece.first_tile + index) * S::kTile;
  Live<V> live(first, limit);
  // The cache may still hold what was there before this launch, and the slot what was there before this tile.
  bool has_new, mended;
  const auto compare = [&] {
    has_new = V::kHasNew && live.has(slot, first);
    mended = has_new || !live.has_all();
  };
  if (Live<V>::kAreKnown) compare();
  auto data_of = [&](uint32_t e) { return reinterpret_cast<T*>(c.ring.slot(e)); };
  auto replace_row = [&](T* data, const T* row) {
    if (!has_new) return;
    uint4* to = reinterpret_cast<uint4*>(data) + (uint32_t(slot) - first) * S::kChunks;
#pragma unroll
    for (int i = 0; i < S::kChunks; i += 32)
      if (i + c.lane < S::kChunks) to[i + c.lane] = reinterpret_cast<const uint4*>(row)[i + c.lane];
  };
  auto mend_keys = [&](T* keys) {
    replace_row(keys, new_rows);
    if (!S::kTogether) __syncwarp();
  };
  auto mend_values = [&](T* values) {
    if (!mended) return;
    replace_row(values, new_rows + S::kPitch);
#pragma unroll 1
    for (uint32_t i = live.num_first() * S::kChunks + c.lane; i < S::kTile * S::kChunks; i += 32)
      if (Live<V>::kAreKnown || !live.has(i / S::kChunks)) reinterpret_cast<uint4*>(values)[i] = uint4{};
    __syncwarp();
  };
  auto release = [&](uint32_t e) {
    if (mended) ptx::fence_proxy_async_shared();
    c.ring.release(e);
  };
  softmax.fetch_mask(job, piece, first, live, c.lane);
  if (index >= present && !c.ring.wait(entry, c.phase)) return false;
  if constexpr (!Live<V>::kAreKnown) {
    live = Live<V>(c.ring.said_of(entry));
    compare();
  }
  T* keys = data_of(entry);
  T* values = S::kTogether ? keys + S::kTile * S::kSize : data_of(entry + 1);
  mend_keys(keys);
  if (S::kTogether) mend_values(values);
  auto await_values = [&] {
    if (S::kTogether) return true;
    release(entry);
    if (!c.ring.wait(entry + 1, c.phase)) return false;
    mend_values(values);
    return true;
  };
  if (!softmax.add({keys, values, live}, staged, c.warp, c.lane, await_values)) return false;
  release(entry + S::kEntries - 1);
  return true;
}

// A head's result of a piece from those of the warps, the first of which is at `results`; the result of all pieces by
// the worker of the group's last one, once it has added those of the others, which are partial. False when the launch
// was given up.
template <class V, class C>
MPK_DEVICE bool combine_head(C& c, const Job& job, const KvPiece& piece, int head, const float* results) {
  Combined<V> all(results, Shape<V>::kStored * kPartial<V>, c.lane);
  if constexpr (kMayCut<V>) {
    const uint32_t tag = tag_of(c);
    uint8_t* partials = V::partials(job) + piece.first * kPieceBytes<V> + head * V::kPartialBytes;
    if (!piece.is_last) {
      all.store_partial(partials + piece.index * kUnits<V> * kPieceBytes<V>, tag, c.lane);
      return true;
    }
    if (!all.add(c, partials, piece.index, tag)) return false;
  }
  all.store(job, piece.row, piece.group * V::kHeads + head, c.lane);
  return true;
}

// The warps' results of a piece, put together by a warp for each head and written. False when the launch was given up.
template <class V, class C>
MPK_DEVICE bool combine_warps(C& c, const Job& job, const KvPiece& piece, Softmax<V>& softmax) {
  using S = Shape<V>;
  float* stored = reinterpret_cast<float*>(c.staged() + S::kCombineOffset);
#pragma unroll 1
  for (int first = 0; first < V::kHeads; first += S::kStored) {
    if (first > 0 && !c.sync()) return false;
    softmax.store(first, stored + c.warp * S::kStored * kPartial<V>, c.lane);
    if (!c.sync()) return false;
    const int head = first + c.warp;
    if (c.warp >= S::kStored || head >= V::kHeads) continue;
    if (!combine_head<V>(c, job, piece, head, stored + c.warp * kPartial<V>)) c.failed = true;
  }
  return true;
}

template <class V, class C>
MPK_DEVICE void compute_pieces(C& c, const Job& job) {
  using S = Shape<V>;
  static_assert(S::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  const Cut<V> cut(job);
  const Positions<V> positions(job);
  const uint32_t worker = c.worker(job);
  // Then no worker has two pieces.
  constexpr bool kOnce = V::kBatch == 1 && kUnits<V> <= V::kWorkers;
#pragma unroll 1
  for (uint32_t turn = 0;; turn++) {
    const KvPiece piece = cut.piece(turn, worker);
    if (!kOnce && piece.num_tiles == 0) return;
    if (!kOnce && turn > 0 && !c.sync()) return;  // the shared memory of the piece before is no longer read
    const uint32_t limit = cut.limit(piece.row);
    const Slot<V> slot = positions.written(job, piece.row);
    Softmax<V> softmax;
    if (!stage<V>(c, job, piece, slot)) return;
    c.stamp_first(&PhaseStamps::staged);
#pragma unroll 1
    for (uint32_t t = c.warp; t < piece.num_tiles && !c.failed; t += kConsumerWarps)
      c.failed = !add_tile<V>(c, job, piece, t, limit, slot, c.staged(), kStagedTiles<V, C>, softmax);
    if (!combine_warps<V>(c, job, piece, softmax)) return;
    c.entry += S::kEntries * piece.num_tiles;
    if (kOnce) return;
  }
}

// ---- the same with pieces that overlap
//
// Windows are full when a piece's rows are staged, and empty when its tiles' results are stored; two pieces have room.

template <class V, class C>
MPK_DEVICE uint8_t* window_of(C& c, uint32_t number) {
  return c.staged() + number % 2 * Shape<V>::kBufferBytes;
}

template <class C>
MPK_DEVICE bool await_window(C& c, uint64_t* windows, uint32_t number, Waiting what) {
  const uint32_t place = number % kWindows, parity = number / kWindows & 1;
  return ptx::mbar_peek(&windows[place], parity) ||
         wait_barrier(c.shared.watchdog, &windows[place], parity, c.phase, WarpRole::kConsumer, what, place, number);
}

// The pieces' tiles. False when the launch was given up.
template <class V, class C>
MPK_DEVICE bool work_on_tiles(C& c, const Job& job, const Cut<V>& cut, const Positions<V>& positions) {
  using S = Shape<V>;
  uint32_t place = c.warp;  // the warp's among those that take the piece's first tiles
#pragma unroll 1
  for (uint32_t turn = 0;; turn++) {
    const KvPiece piece = cut.piece(turn, c.worker(job));
    if (piece.num_tiles == 0) return true;
    const uint32_t limit = cut.limit(piece.row);
    const Slot<V> slot = positions.written(job, piece.row);
    uint8_t* staged = window_of<V>(c, c.window);
    Softmax<V> softmax;
    if (!await_window(c, c.windows().full, c.window, Waiting::kFullSlot)) return false;
    c.stamp_first(&PhaseStamps::staged);
#pragma unroll 1
    for (uint32_t t = place; t < piece.num_tiles; t += kTileWarps<V>)
      if (!add_tile<V>(c, job, piece, t, limit, slot, staged, 0, softmax)) return false;
    softmax.store(0, reinterpret_cast<float*>(staged + S::kCombineOffset) + place * S::kStored * kPartial<V>, c.lane);
    place = (place + kTileWarps<V> - piece.num_tiles % kTileWarps<V>) % kTileWarps<V>;
    __syncwarp();
    if (c.lane == 0) ptx::mbar_arrive(&c.windows().empty[c.window % kWindows]);
    c.window++;
    c.entry += S::kEntries * piece.num_tiles;
  }
}

// All else. A piece's results are put together when the next one's rows are staged; so a warp that waits for pieces of
// others has staged all pieces before its own.
template <class V, class C>
MPK_DEVICE bool serve_tiles(C& c, const Job& job, const Cut<V>& cut, const Positions<V>& positions) {
  using S = Shape<V>;
  const int helper = c.warp - kTileWarps<V>;
  const auto combine = [&](const KvPiece& piece, uint32_t window) {
    const float* stored = reinterpret_cast<const float*>(window_of<V>(c, window) + S::kCombineOffset);
    if (!await_window(c, c.windows().empty, window, Waiting::kFreeSlot)) return false;
#pragma unroll 1
    for (int head = helper; head < V::kHeads; head += kBringingWarps)
      if (!combine_head<V>(c, job, piece, head, stored + head * kPartial<V>)) return false;
    __syncwarp();
    return true;
  };
  KvPiece before{};
  bool has_before = false;
#pragma unroll 1
  for (uint32_t turn = 0;; turn++) {
    const KvPiece piece = cut.piece(turn, c.worker(job));
    if (piece.num_tiles != 0) {
      const Slot<V> slot = positions.written(job, piece.row);
#pragma unroll 1
      for (int place = helper; place < V::kHeads + (V::kHasNew ? 2 : 0); place += kBringingWarps)
        bring_row<V>(c, job, piece, slot, place, window_of<V>(c, c.window), [] { return true; });
      ptx::mbar_arrive(&c.windows().full[c.window % kWindows]);
    }
    if (has_before && !combine(before, c.window - 1)) return false;
    if (piece.num_tiles == 0) return true;
    c.window++;
    c.entry += S::kEntries * piece.num_tiles;
    before = piece;
    has_before = true;
  }
}

template <class V, class C>
MPK_DEVICE void compute_overlapped(C& c, const Job& job) {
  static_assert(Shape<V>::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  const Cut<V> cut(job);
  const Positions<V> positions(job);
  if (!c.await()) return;
  if (!(c.warp < kTileWarps<V> ? work_on_tiles<V>(c, job, cut, positions) : serve_tiles<V>(c, job, cut, positions)))
    c.failed = true;
}

template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  static_assert(Variant<V, C>);
  if (!V::kEarly && !c.await()) return;
  if constexpr (kMaySpread<V>)
    if (spreads<V>(job)) return compute_pieces<Spread<V>>(c, job);
  if constexpr (V::kOverlaps)
    compute_overlapped<V>(c, job);
  else
    compute_pieces<V>(c, job);
}

}  // namespace mpk::attention
