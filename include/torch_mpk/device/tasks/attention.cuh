// attention: one query position per row of the batch against a key-value cache, softmax in fp32.
//
// The visible tiles of all caches are lined up and cut into one piece per worker (partition.h), so ragged batches and
// long contexts use the whole device. The loader streams a tile as two ring entries, keys then values, for one warp.
// Within a piece warps combine in tile order; a group cut across workers is combined in piece order by whichever worker
// finishes it last. Nothing is added in order of arrival.
//
// A variant V describes one job:
//   T, kBatch, kGroups, kPasses, kHeads, kSize, kLength, kScale
//     kHeads query heads are worked on at a time; kPasses such groups share a key-value head, each streaming it anew
//   kHasNew, kHasMask, kMaskPerHead, kPitchK, kPitchV (bytes from position to position)
//   kZeroWithoutKeys: what a head that attends to nothing gives; otherwise it gives NaN
//   limit(job, b), slot(job), mask(job, b, h, position), y(job, b, h)
//   k_cache(job, b, g), v_cache(job, b, g)
//   prepare_q(group, job, b, h, row), prepare_k(group, job, b, g, row), prepare_v(group, job, b, g, row)
//   prefetch(job, lane)              parameters of the row tasks, into L2
//   partials(job), arrivals(job)     this job's scratch: floats in the workspace, counters in the control block
#pragma once

#include "torch_mpk/device/partition.h"
#include "torch_mpk/device/row.cuh"
#include "torch_mpk/device/tasks/linear.cuh"

namespace mpk::attention {

inline constexpr int kMinPieceTiles = 4;
inline constexpr int kMaxTilePositions = 32;

constexpr int floor_power_of_two(int n) { return n < 2 ? 1 : 2 * floor_power_of_two(n / 2); }

template <class V>
struct Shape {
  using T = typename V::T;
  static constexpr int kGroups = V::kGroups * V::kPasses;
  static constexpr int kRowBytes = V::kSize * int(sizeof(T));
  static constexpr int kFit = floor_power_of_two(kSlotBytes / kRowBytes);
  static constexpr int kTile = kFit < kMaxTilePositions ? kFit : kMaxTilePositions;  // positions
  // Scores: 32 / kTile lanes share a position, and take its 16-byte chunks in turn.
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kChunks = V::kSize / kVec;
  static constexpr int kLanesPerPosition = 32 / kTile;
  // Values: kRowLanes lanes cover a row, four elements each; 32 / kRowLanes sets of lanes take positions in turn.
  static constexpr int kQuads = V::kSize / 4;
  static constexpr int kRowLanes = kQuads >= 32 ? 32 : linear::next_power_of_two(kQuads);
  static constexpr int kSets = 32 / kRowLanes;
  static constexpr int kQuadsPerLane = (kQuads + kRowLanes - 1) / kRowLanes;
  // A partial result: the unnormalised output, the maximum, the sum of exponentials, padding.
  static constexpr int kPartial = V::kSize + 4;
  static constexpr int kRoundFit = 13 * 1024 / (kConsumerWarps * kPartial * 4);
  static constexpr int kRound = kRoundFit < 1           ? 1
                                : kRoundFit < V::kHeads ? kRoundFit
                                                        : V::kHeads;  // heads combined at a time
  // Shared memory, in bytes from the staged area.
  static constexpr int kRowsOffset = V::kHeads * V::kSize * 4;                      // behind q as float
  static constexpr int kWeightsOffset = kRowsOffset + (V::kHeads + 2) * kRowBytes;  // rows as T: q, k_new, v_new
  static constexpr int kCombineOffset = kWeightsOffset + kConsumerWarps * V::kHeads * kTile * 4;
  static constexpr int kStagedBytes = kCombineOffset + kConsumerWarps * kRound * kPartial * 4;
};

template <class V>
MPK_DEVICE uint32_t visible(const Job& job, uint32_t row) {
  const int64_t limit = V::limit(job, row);
  return limit < 0 ? 0 : limit > V::kLength ? V::kLength : static_cast<uint32_t>(limit);
}

template <class V>
struct TilesOf {
  const Job& job;
  MPK_DEVICE uint32_t operator()(uint32_t row) const {
    constexpr uint32_t kTile = Shape<V>::kTile;
    const uint32_t tiles = (visible<V>(job, row) + kTile - 1) / kTile;
    return tiles == 0 ? 1 : tiles;  // a row without keys still has a result
  }
};

// The loader's part.
// The ring entries of a run: of each tile the keys, then the values.
template <class V>
struct KvTiles {
  using S = Shape<V>;
  const uint8_t *k, *v;
  uint32_t first_tile, limit;

  MPK_DEVICE uint32_t tile(uint32_t i) const { return first_tile + i / 2; }
  MPK_DEVICE uint32_t rows(uint32_t i) const { return min(uint32_t(S::kTile), limit - tile(i) * S::kTile); }
  MPK_DEVICE uint32_t bytes(uint32_t i) const { return rows(i) * S::kRowBytes; }
  MPK_DEVICE void copy(uint32_t i, const SlotWriter& to) const {
    const int64_t pitch = i % 2 ? V::kPitchV : V::kPitchK;
    to.copy(0, (i % 2 ? v : k) + int64_t(tile(i) * S::kTile) * pitch, pitch, rows(i), S::kRowBytes);
  }
};

template <class V, class L>
MPK_DEVICE void load(L& l, const Job& job) {
  using S = Shape<V>;
  V::prefetch(job, l.lane);
  if (!l.await_inputs(job)) return;
  const TilesOf<V> tiles_of{job};
  const KvPiece piece =
      kv_piece(tiles_of, V::kBatch, S::kGroups, kMinPieceTiles, l.worker(job), L::Config::kNumWorkers);
  for (uint32_t unit = piece.begin; unit < piece.end;) {
    const KvRun run = kv_run(tiles_of, S::kGroups, unit, piece.end);
    const uint32_t group = run.group / V::kPasses;
    const KvTiles<V> tiles{reinterpret_cast<const uint8_t*>(V::k_cache(job, run.row, group)),
                           reinterpret_cast<const uint8_t*>(V::v_cache(job, run.row, group)), run.first_tile,
                           visible<V>(job, run.row)};
    if (!l.fill(2 * run.num_tiles, tiles)) return;
    unit += run.num_tiles;
  }
}

// The running softmax of one warp over its tiles of a run. Maxima are the same in all lanes; `sum` is a lane's own
// share, counted once per position.
template <class V>
struct Softmax {
  using S = Shape<V>;
  float max[V::kHeads], sum[V::kHeads];
  float out[V::kHeads][S::kQuadsPerLane][4];

  MPK_DEVICE Softmax() {
#pragma unroll
    for (int h = 0; h < V::kHeads; h++) {
      max[h] = -infinity();
      sum[h] = 0;
#pragma unroll
      for (int i = 0; i < S::kQuadsPerLane; i++) out[h][i][0] = out[h][i][1] = out[h][i][2] = out[h][i][3] = 0;
    }
  }

  // scores: of this lane's position (-inf where it does not count). weights: shared memory of this warp,
  // [head][position].
  MPK_DEVICE void add_scores(const float (&scores)[V::kHeads], float* weights, int lane) {
#pragma unroll
    for (int h = 0; h < V::kHeads; h++) {
      const float old = max[h];
      max[h] = fmaxf(old, warp_max(scores[h]));
      const bool empty = max[h] == -infinity();
      const float keep = empty ? 1.0f : expf(old - max[h]);
      const float weight = scores[h] == -infinity() ? 0.0f : expf(scores[h] - max[h]);  // NaN stays NaN
      sum[h] = fmaf(sum[h], keep, lane < S::kTile ? weight : 0.0f);
#pragma unroll
      for (int i = 0; i < S::kQuadsPerLane; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[h][i][e] *= keep;
      if (lane < S::kTile) weights[h * S::kTile + lane] = weight;
    }
    __syncwarp();
  }

  MPK_DEVICE void add_values(const typename V::T* values, const float* weights, int rows, int lane) {
    using T = typename V::T;
    const int column = lane % S::kRowLanes;
#pragma unroll 4
    for (int p = lane / S::kRowLanes; p < rows; p += S::kSets) {
#pragma unroll
      for (int i = 0; i < S::kQuadsPerLane; i++) {
        const int quad = column + i * S::kRowLanes;
        if (S::kQuads % S::kRowLanes != 0 && quad >= S::kQuads) continue;
        const Vec<T, 4> v = reinterpret_cast<const Vec<T, 4>*>(values + p * V::kSize)[quad];
        float f[4];
#pragma unroll
        for (int e = 0; e < 4; e++) f[e] = to_float(v.v[e]);
#pragma unroll
        for (int h = 0; h < V::kHeads; h++) {
          const float weight = weights[h * S::kTile + p];
#pragma unroll
          for (int e = 0; e < 4; e++) out[h][i][e] = fmaf(weight, f[e], out[h][i][e]);
        }
      }
    }
    __syncwarp();
  }

  // Writes heads [first, first + kRound) as partials, kPartial floats each.
  MPK_DEVICE void store(int first, float* partials, int lane) {
#pragma unroll
    for (int h = 0; h < V::kHeads; h++) {
      if (h < first || h >= first + S::kRound) continue;
      float* to = partials + (h - first) * S::kPartial;
      const float total = warp_sum(sum[h]);
#pragma unroll
      for (int i = 0; i < S::kQuadsPerLane; i++) {
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
          for (int o = 16; o >= S::kRowLanes; o /= 2) out[h][i][e] += __shfl_xor_sync(~0u, out[h][i][e], o);
        const int quad = lane + i * S::kRowLanes;
        if (lane < S::kRowLanes && quad < S::kQuads)
          reinterpret_cast<float4*>(to)[quad] = make_float4(out[h][i][0], out[h][i][1], out[h][i][2], out[h][i][3]);
      }
      if (lane == 0) {
        to[V::kSize] = max[h];
        to[V::kSize + 1] = total;
      }
    }
  }
};

// Element d of several partials combined in order; partial(i) points to the i-th.
struct Combined {
  float out, max, sum;
  MPK_DEVICE float result(bool zero_without_keys) const { return sum == 0 && zero_without_keys ? 0.0f : out / sum; }
};
template <int kSize, class Partial>
MPK_DEVICE Combined combine(int count, int d, Partial partial) {
  Combined c{0, -infinity(), 0};
#pragma unroll 4
  for (int i = 0; i < count; i++) c.max = fmaxf(c.max, partial(i)[kSize]);
#pragma unroll 4
  for (int i = 0; i < count; i++) {
    const float* p = partial(i);
    const float keep = c.max == -infinity() ? 1.0f : expf(p[kSize] - c.max);
    c.out = fmaf(p[d], keep, c.out);
    c.sum = fmaf(p[kSize + 1], keep, c.sum);
  }
  return c;
}

// Where element e of 16-byte chunk c of a query head stands: chunks of four floats side by side, so that lanes reading
// different chunks meet different banks.
template <class V>
MPK_DEVICE int query_place(int d) {
  using S = Shape<V>;
  const int chunk = d / S::kVec, e = d % S::kVec;
  return (e / 4) * (S::kChunks * 4) + chunk * 4 + e % 4;
}

// Query rows (through their row tasks, then as float) and the new key and value rows into shared memory. The worker
// with the first tile of a group also writes the new rows to the caches.
template <class V, class C>
MPK_DEVICE void stage(C& c, const Job& job, const KvRun& run, int64_t slot) {
  using S = Shape<V>;
  using T = typename V::T;
  float* queries = reinterpret_cast<float*>(c.staged());
  T* rows = reinterpret_cast<T*>(c.staged() + S::kRowsOffset);
  const uint32_t group = run.group / V::kPasses, pass = run.group % V::kPasses;
  WarpThreads threads{c.lane};
  for (int i = c.warp; i < V::kHeads + (V::kHasNew ? 2 : 0); i += kConsumerWarps) {
    T* row = rows + i * V::kSize;
    if (i < V::kHeads) {
      V::prepare_q(threads, job, run.row, (group * V::kPasses + pass) * V::kHeads + i, row);
      __syncwarp();
      for (int d = c.lane; d < V::kSize; d += 32) queries[i * V::kSize + query_place<V>(d)] = to_float(row[d]);
      continue;
    }
    if constexpr (V::kHasNew) {
      const bool is_key = i == V::kHeads;
      if (is_key)
        V::prepare_k(threads, job, run.row, group, row);
      else
        V::prepare_v(threads, job, run.row, group, row);
      __syncwarp();
      if (run.first_tile == 0 && pass == 0 && slot >= 0 && slot < V::kLength) {
        uint8_t* cache =
            reinterpret_cast<uint8_t*>(is_key ? V::k_cache(job, run.row, group) : V::v_cache(job, run.row, group));
        T* to = reinterpret_cast<T*>(cache + slot * (is_key ? V::kPitchK : V::kPitchV));
        for (int d = c.lane; d < V::kSize; d += 32) to[d] = row[d];
      }
    }
  }
}

// One tile of keys and values; false when the launch was given up.
template <class V, class C>
MPK_DEVICE bool add_tile(C& c, const Job& job, const KvRun& run, uint32_t tile, uint32_t limit, int64_t slot,
                         uint32_t entry, Softmax<V>& softmax) {
  using S = Shape<V>;
  using T = typename V::T;
  const float* queries = reinterpret_cast<const float*>(c.staged());
  const T* new_rows = reinterpret_cast<const T*>(c.staged() + S::kRowsOffset) + V::kHeads * V::kSize;
  float* weights = reinterpret_cast<float*>(c.staged() + S::kWeightsOffset) + c.warp * V::kHeads * S::kTile;
  const int lane = c.lane, first = tile * S::kTile, rows = min(S::kTile, int(limit) - first);
  const int place = lane % S::kTile, share = lane / S::kTile;
  const bool counts = place < rows;
  const int new_place = V::kHasNew && slot >= first && slot < first + rows ? int(slot - first) : -1;

  constexpr int kMasks = V::kMaskPerHead ? V::kHeads : 1;
  float mask[kMasks] = {};
  if constexpr (V::kHasMask) {
    if (counts) {
#pragma unroll
      for (int h = 0; h < kMasks; h++) mask[h] = V::mask(job, run.row, run.group * V::kHeads + h, first + place);
    }
  }

  if (!c.ring.wait(entry, c.phase)) return false;
  auto replace_row = [&](uint8_t* data, const T* row) {  // the cache may still hold what was there before this launch
    if (new_place < 0) return;
    for (int d = lane; d < V::kSize; d += 32) reinterpret_cast<T*>(data)[new_place * V::kSize + d] = row[d];
    __syncwarp();
  };
  uint8_t* data = c.ring.slot(entry);
  replace_row(data, new_rows);
  float scores[V::kHeads] = {};
  {
    const uint4* keys = reinterpret_cast<const uint4*>(data + place * S::kRowBytes);
    const int start = place % S::kChunks;  // rows begin in the same bank: lanes begin at different chunks
#pragma unroll 4
    for (int i = share; i < S::kChunks; i += S::kLanesPerPosition) {
      const int chunk = i + start < S::kChunks ? i + start : i + start - S::kChunks;
      float k[S::kVec];
      linear::Unpack<T>::apply(keys[chunk], k);
#pragma unroll
      for (int h = 0; h < V::kHeads; h++)
#pragma unroll
        for (int e = 0; e < S::kVec; e += 4) {
          const float4 q = *reinterpret_cast<const float4*>(queries + h * V::kSize + e * S::kChunks + chunk * 4);
          scores[h] = fmaf(q.x, k[e], scores[h]);
          scores[h] = fmaf(q.y, k[e + 1], scores[h]);
          scores[h] = fmaf(q.z, k[e + 2], scores[h]);
          scores[h] = fmaf(q.w, k[e + 3], scores[h]);
        }
    }
  }
  if (new_place >= 0) ptx::fence_proxy_async();
  c.ring.release(entry);
#pragma unroll
  for (int h = 0; h < V::kHeads; h++) {
#pragma unroll
    for (int o = S::kTile; o < 32; o *= 2) scores[h] += __shfl_xor_sync(~0u, scores[h], o);
    scores[h] = counts ? __fadd_rn(__fmul_rn(scores[h], V::kScale), mask[V::kMaskPerHead ? h : 0]) : -infinity();
  }
  softmax.add_scores(scores, weights, lane);

  entry++;
  if (!c.ring.wait(entry, c.phase)) return false;
  data = c.ring.slot(entry);
  replace_row(data, new_rows + V::kSize);
  softmax.add_values(reinterpret_cast<const T*>(data), weights, rows, lane);
  if (new_place >= 0) ptx::fence_proxy_async();
  c.ring.release(entry);
  return true;
}

// The worker that completes a group which several pieces share combines them.
template <class V, class C>
MPK_DEVICE void combine_pieces(C& c, const Job& job, const KvRun& run, uint32_t length) {
  using S = Shape<V>;
  const Span pieces = run.pieces(length);
  if (!c.sync()) return;
  if (c.rank == 0) {
    uint32_t* arrivals = V::arrivals(job) + run.row * S::kGroups + run.group;
    const uint32_t last = pieces.end - pieces.begin - 1;
    c.shared.word = ptx::fetch_inc_acq_rel_gpu(arrivals, last) == last;
  }
  if (!c.sync() || c.shared.word == 0) return;
  const float* partials = V::partials(job);
  for (int i = c.rank; i < V::kHeads * V::kSize; i += kConsumerThreads) {
    const int h = i / V::kSize, d = i % V::kSize;
    const Combined all = combine<V::kSize>(pieces.end - pieces.begin, d, [&](int p) {
      return partials + (partial_slot(pieces.begin + p, length, run.start) * V::kHeads + h) * S::kPartial;
    });
    V::y(job, run.row, run.group * V::kHeads + h)[d] = cast<typename V::T>(all.result(V::kZeroWithoutKeys));
  }
}

// The consumers' part.
template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  using S = Shape<V>;
  static_assert(S::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  const TilesOf<V> tiles_of{job};
  const uint32_t worker = c.worker(job);
  const KvPiece piece = kv_piece(tiles_of, V::kBatch, S::kGroups, kMinPieceTiles, worker, C::Config::kNumWorkers);
  const int64_t slot = V::slot(job);
  for (uint32_t unit = piece.begin; unit < piece.end;) {
    if (unit > piece.begin && !c.sync()) return;  // the previous run's queries are no longer read
    const KvRun run = kv_run(tiles_of, S::kGroups, unit, piece.end);
    const uint32_t limit = visible<V>(job, run.row);
    stage<V>(c, job, run, slot);
    if (!c.sync()) return;

    const uint32_t skipped = unit - piece.begin;  // tiles of this piece before the run
    Softmax<V> softmax;
    for (uint32_t t = (c.warp + kConsumerWarps - skipped % kConsumerWarps) % kConsumerWarps; t < run.num_tiles;
         t += kConsumerWarps)
      if (!add_tile<V>(c, job, run, run.first_tile + t, limit, slot, c.entry + 2 * (skipped + t), softmax)) {
        c.failed = true;
        break;
      }

    const int active = min(uint32_t(kConsumerWarps), run.num_tiles);
    const int turn = (c.warp + kConsumerWarps - skipped % kConsumerWarps) % kConsumerWarps;  // this warp's first tile
    float* round = reinterpret_cast<float*>(c.staged() + S::kCombineOffset);
    float* partials = V::partials(job) + partial_slot(worker, piece.length, run.start) * V::kHeads * S::kPartial;
#pragma unroll
    for (int first = 0; first < V::kHeads; first += S::kRound) {
      if (first > 0 && !c.sync()) return;
      if (turn < active) softmax.store(first, round + turn * S::kRound * S::kPartial, c.lane);
      if (!c.sync()) return;
      const int heads = min(S::kRound, V::kHeads - first);
      for (int i = c.rank; i < heads * V::kSize; i += kConsumerThreads) {
        const int h = i / V::kSize, d = i % V::kSize;
        const Combined all =
            combine<V::kSize>(active, d, [&](int w) { return round + (w * S::kRound + h) * S::kPartial; });
        if (run.complete()) {
          V::y(job, run.row, run.group * V::kHeads + first + h)[d] =
              cast<typename V::T>(all.result(V::kZeroWithoutKeys));
        } else {
          float* to = partials + (first + h) * S::kPartial;
          to[d] = all.out;
          if (d == 0) {
            to[V::kSize] = all.max;
            to[V::kSize + 1] = all.sum;
          }
        }
      }
    }
    if (!run.complete()) {
      combine_pieces<V>(c, job, run, piece.length);
      if (!c.alive) return;
    }
    unit += run.num_tiles;
  }
  c.entry += 2 * (piece.end - piece.begin);
}

}  // namespace mpk::attention
