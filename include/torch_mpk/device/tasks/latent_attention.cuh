// latent_attention: one query position for each row of the batch against latents, which are keys and values of all
// heads, softmax in fp32.
//
// A unit of work is 16 heads of a row, the rows of a tensor core's tile, and a split of the positions, see
// attention_splits.cuh. A worker copies tiles of 16 latents and rotated keys, side by side, to shared memory, some
// ahead of the one that it computes. Warps share the positions of the products with queries, then the heads of the
// softmax, then the columns of the products with weights, whose second factor is the same tile.
//
// Splits leave tagged words. Once a worker has computed all its splits, it merges a share of the results of each of
// their units, in the order of positions. So no worker waits before it has left its own results, and no sum depends on
// the order of arrival.
#pragma once

#include "torch_mpk/device/fragment.cuh"
#include "torch_mpk/device/polled.cuh"
#include "torch_mpk/device/tasks/attention_scores.cuh"
#include "torch_mpk/device/tasks/attention_splits.cuh"

namespace mpk::latent_attention {

using attention::Cut;

// A variant declares this of one job.
template <class V>
concept Sizes = attention::Scores<V> && requires {
  typename V::T;
  // kSize: of a latent; kRope: of a rotated key; kGroups: of heads. kTilePositions: of a tile of splits.
  requires Constants<int, V::kBatch, V::kHeads, V::kGroups, V::kSize, V::kRope, V::kLength, V::kTilePositions>;
  // kStages: tiles in shared memory. For the others see attention::Sizes.
  requires Constants<int, V::kStages, V::kWorkers, V::kSplitTiles, V::kFewSplits, V::kSplits>;
  requires Constants<int64_t, V::kPitchLatent, V::kPitchRope>;  // elements from position to position
};

// Operands, for batch row b and head h.
template <class V>
concept Places = requires(const Job& job, uint32_t b, uint32_t h) {
  { V::q(job, b, h) } -> Same<const typename V::T*>;
  { V::q_rope(job, b, h) } -> Same<const typename V::T*>;
  { V::latent(job, b) } -> Same<const typename V::T*>;
  { V::rope(job, b) } -> Same<const typename V::T*>;
  { V::y(job, b, h) } -> Same<typename V::T*>;
  { V::limit(job, b) } -> Same<int64_t>;
  { V::partials(job) } -> Same<uint8_t*>;
};

template <class V>
concept Variant = Sizes<V> && Places<V>;

template <class V>
struct Shape {
  using T = typename V::T;
  static constexpr int kHeads = kWarpRows, kPositions = kWarpRows;  // of a unit, and of a tile
  static constexpr int kWarps = kLatentWarps, kColumns = kLatentColumns, kStages = V::kStages;
  static constexpr int kKey = V::kSize + V::kRope, kVec = kVecSize<T>;  // elements of a key, and of an access
  // Warps that share the positions of a tile, eight each; as many parts of a key are multiplied side by side.
  static constexpr int kScoreWarps = kPositions / 8, kParts = kLatentParts;
  // Rows of shared memory, in elements or floats; neighbouring ones begin in different banks.
  static constexpr int kPitch = key_row_pitch(kKey * 2) / 2, kScorePitch = kPositions + 8,
                       kWeightPitch = key_row_pitch(kPositions * 2) / 2;
  static constexpr int kTileBytes = kPositions * kPitch * 2;
  static constexpr int kQueryOffset = kStages * kTileBytes, kScoreOffset = kQueryOffset + kHeads * kPitch * 2;
  static constexpr int kWeightOffset = kScoreOffset + kParts * kHeads * kScorePitch * 4;
  static constexpr int kStateOffset = kWeightOffset + kHeads * kWeightPitch * 2;
  static constexpr int kRowSplits = V::kSplits / (V::kBatch * V::kGroups);  // at most
  static constexpr int kStagedBytes = latent_bytes(V::kSize, V::kRope, kStages, kRowSplits);
  // Results of a split: of each head the maximum and the sum of exponentials, then pairs of columns.
  static constexpr int kPairs = V::kSize / 2, kWords = kHeads * (1 + kPairs);
  static constexpr int kSplitBytes = kWords * int(sizeof(ulonglong2));
  static_assert(kStateOffset + 3 * kHeads * 4 <= kStagedBytes);
  static_assert(kSplitBytes == latent_split_bytes(V::kSize));
  static_assert(V::kSize % kColumns == 0 && V::kSize <= kWarps * kColumns && V::kRope % 16 == 0);
  static_assert(kScoreWarps * kParts == kWarps && kWarps * 2 == kHeads && kConsumerWarps >= kWarps && kStages >= 2);
};

// Shared memory of a worker.
template <class V>
struct Memory {
  using S = Shape<V>;
  using T = typename V::T;
  uint8_t* base;

  MPK_DEVICE T* tile(uint32_t number) const { return reinterpret_cast<T*>(base + number % S::kStages * S::kTileBytes); }
  MPK_DEVICE T* queries() const { return reinterpret_cast<T*>(base + S::kQueryOffset); }
  MPK_DEVICE float* scores() const { return reinterpret_cast<float*>(base + S::kScoreOffset); }
  MPK_DEVICE T* weights() const { return reinterpret_cast<T*>(base + S::kWeightOffset); }
  // Each head's largest score, its sum of exponentials above that, and the factor of earlier results.
  MPK_DEVICE float* most() const { return reinterpret_cast<float*>(base + S::kStateOffset); }
  MPK_DEVICE float* total() const { return most() + S::kHeads; }
  MPK_DEVICE float* kept() const { return total() + S::kHeads; }
  // While results are merged: two floats of each split and head, in the place of tiles.
  MPK_DEVICE float2* merged() const { return reinterpret_cast<float2*>(base); }
};

// Copies `count` of `rows` rows of two parts each to shared memory, all threads some accesses. The others become zeros.
template <class V, class First, class Second>
MPK_DEVICE void copy_rows(typename V::T* to, uint32_t rows, uint32_t count, First first, Second second) {
  using S = Shape<V>;
  constexpr uint32_t kFirst = V::kSize / S::kVec, kAll = S::kKey / S::kVec;
#pragma unroll 4
  for (uint32_t i = ptx::thread_index(); i < rows * kAll; i += kConsumerThreads) {
    const uint32_t row = i / kAll, access = i % kAll;
    typename V::T* at = to + row * S::kPitch + access * S::kVec;
    if (row >= count)
      *reinterpret_cast<uint4*>(at) = uint4{};
    else if (access < kFirst)
      ptx::copy_async_16(at, first(row) + access * S::kVec);
    else
      ptx::copy_async_16(at, second(row) + (access - kFirst) * S::kVec);
  }
}

// A split's heads and positions.
template <class V>
struct Part {
  using S = Shape<V>;
  uint32_t row, head, num_heads, first, end;

  MPK_DEVICE Part(const KvSplit& split, uint32_t limit)
      : row(split.row),
        head(split.group * S::kHeads),
        num_heads(min(uint32_t(S::kHeads), V::kHeads - head)),
        first(split.first_tile * V::kTilePositions),
        end(min(limit, first + split.num_tiles * V::kTilePositions)) {}
  MPK_DEVICE uint32_t tiles() const { return first < end ? (end - first + S::kPositions - 1) / S::kPositions : 0; }
  MPK_DEVICE uint32_t begin(uint32_t tile) const { return first + tile * S::kPositions; }

  MPK_DEVICE void copy_queries(const Job& job, typename V::T* to) const {
    copy_rows<V>(
        to, S::kHeads, num_heads, [&](uint32_t h) { return V::q(job, row, head + h); },
        [&](uint32_t h) { return V::q_rope(job, row, head + h); });
  }
  MPK_DEVICE void copy_tile(const Job& job, uint32_t tile, typename V::T* to) const {
    const auto *latent = V::latent(job, row), *rope = V::rope(job, row);
    const uint32_t from = begin(tile);
    copy_rows<V>(
        to, S::kPositions, min(uint32_t(S::kPositions), end - from),
        [&](uint32_t p) { return latent + (from + p) * V::kPitchLatent; },
        [&](uint32_t p) { return rope + (from + p) * V::kPitchRope; });
  }
};

// Multiplies the queries and the keys of a warp's positions, in a part of the keys' elements.
template <class V>
MPK_DEVICE void multiply_keys(const Memory<V>& memory, const typename V::T* tile, int warp, int lane) {
  using S = Shape<V>;
  constexpr int kSteps = S::kKey / 16, kEach = (kSteps + 2 * S::kParts - 1) / (2 * S::kParts) * 2;  // of a part
  const int part = warp / S::kScoreWarps, position = warp % S::kScoreWarps * 8;
  const typename V::T* q = memory.queries() + lane % 16 * S::kPitch + lane / 16 * 8;
  const typename V::T* k = tile + (position + lane % 8) * S::kPitch + lane / 8 % 2 * 8;
  SumFragment sums[2] = {};
#pragma unroll 3
  for (int i = 0; i < kEach; i += 2) {
    const int step = part * kEach + i;
    if (step >= kSteps) break;
    const bool has_next = step + 1 < kSteps;
    const int of_lane = step + (has_next && lane >= 16 ? 1 : 0);
    const ptx::Quad keys = ptx::load_matrices(ptx::smem_addr(k + of_lane * 16));
    ptx::mma<typename V::T>(sums[0], ptx::load_matrices(ptx::smem_addr(q + step * 16)), {keys.v[0], keys.v[1]});
    if (has_next)
      ptx::mma<typename V::T>(sums[1], ptx::load_matrices(ptx::smem_addr(q + step * 16 + 16)), {keys.v[2], keys.v[3]});
  }
  float* scores = memory.scores() + (part * S::kHeads + lane / 4) * S::kScorePitch + position + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    scores[i] = sums[0][i] + sums[1][i];
    scores[8 * S::kScorePitch + i] = sums[0][i + 2] + sums[1][i + 2];
  }
}

template <int lanes>
MPK_DEVICE float lanes_max(float v) {
#pragma unroll
  for (int o = lanes / 2; o > 0; o /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}

// Makes weights of scores. A warp has two heads, and half of its lanes the positions of one.
template <class V>
MPK_DEVICE void weigh(const Job& job, const Memory<V>& memory, const Part<V>& part, uint32_t tile, int warp, int lane) {
  using S = Shape<V>;
  using T = typename V::T;
  constexpr int kLanes = S::kPositions;
  const uint32_t head = 2 * warp + lane / kLanes, place = lane % kLanes, position = part.begin(tile) + place;
  float score = -infinity();
  if (position < part.end) {
    float product = 0;
#pragma unroll
    for (int p = 0; p < S::kParts; p++) product += memory.scores()[(p * S::kHeads + head) * S::kScorePitch + place];
    score = attention::scored<V>(product);
    if constexpr (V::kHasMask)
      if (head < part.num_heads) score += V::mask(job, part.row, part.head + head, position);
  }
  const float before = tile == 0 ? -infinity() : memory.most()[head], top = fmaxf(before, lanes_max<kLanes>(score));
  const float base = attention::subtrahend(top), kept = attention::exponential<T>(before - base);
  const float weight = attention::exponential<T>(score - base), total = warp_sum<kLanes>(weight);
  memory.weights()[head * S::kWeightPitch + place] = cast<T>(weight);
  __syncwarp();  // all have read what is replaced
  if (place != 0) return;
  memory.total()[head] = tile == 0 ? total : fmaf(memory.total()[head], kept, total);
  memory.most()[head] = top;
  memory.kept()[head] = kept;
}

// The results of 64 columns, of a warp: eight at a time.
template <class V>
struct Results {
  using S = Shape<V>;
  using T = typename V::T;
  static constexpr int kBlocks = S::kColumns / 8;
  SumFragment sums[kBlocks] = {};

  // Adds the weighted latents of a tile.
  MPK_DEVICE void add(const Memory<V>& memory, const T* tile, int column, int lane) {
    const float upper = memory.kept()[lane / 4], lower = memory.kept()[lane / 4 + 8];
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      sums[b][0] *= upper, sums[b][1] *= upper;
      sums[b][2] *= lower, sums[b][3] *= lower;
    }
    const T* w = memory.weights() + lane % 16 * S::kWeightPitch + lane / 16 * 8;
    const T* values = tile + lane % 16 * S::kPitch + lane / 16 * 8 + column;
    const ptx::Quad weights = ptx::load_matrices(ptx::smem_addr(w));
#pragma unroll
    for (int b = 0; b < kBlocks; b += 2) {
      const ptx::Quad two = ptx::load_matrices_transposed(ptx::smem_addr(values + b * 8));
      ptx::mma<T>(sums[b], weights, {two.v[0], two.v[1]});
      ptx::mma<T>(sums[b + 1], weights, {two.v[2], two.v[3]});
    }
  }

  // Calls with(head, column, first, second) for each two neighbouring columns.
  template <class With>
  MPK_DEVICE void for_each(int column, int lane, With with) const {
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      const int at = column + b * 8 + lane % 4 * 2;
      with(lane / 4, at, sums[b][0], sums[b][1]);
      with(lane / 4 + 8, at, sums[b][2], sums[b][3]);
    }
  }
};

template <class V>
MPK_DEVICE float inverse_of(float total) {
  return total > 0 ? 1 / total : total == 0 ? 0 : total;
}

template <class V>
MPK_DEVICE void store(const Job& job, uint32_t row, uint32_t head, int column, float first, float second) {
  typename V::T* y = V::y(job, row, head) + column;
  y[0] = cast<typename V::T>(first), y[1] = cast<typename V::T>(second);
}

// Where the results of a unit's splits lie, kUnits splits apart.
template <class V>
MPK_DEVICE ulonglong2* words_of(const Job& job, const KvSplit& split, uint32_t index) {
  const uint64_t number = split.first + uint64_t(index) * attention::kUnits<V>;
  return reinterpret_cast<ulonglong2*>(V::partials(job) + number * Shape<V>::kSplitBytes);
}

// Computes a split, and stores its results, or those of its heads if it is the only one. False when the launch was
// aborted.
template <class V, class C>
MPK_DEVICE bool compute_split(C& c, const Job& job, const KvSplit& split, uint32_t limit) {
  using S = Shape<V>;
  const Memory<V> memory{c.staged()};
  const Part<V> part(split, limit);
  const uint32_t num_tiles = part.tiles();
  const int column = c.warp * S::kColumns;
  Results<V> results;
  if (num_tiles == 0) {
    if (c.rank < S::kHeads) memory.most()[c.rank] = -infinity(), memory.total()[c.rank] = 0;
  } else {
    part.copy_queries(job, memory.queries());
  }
  const auto start_copy = [&](uint32_t tile) {
    if (tile < num_tiles) part.copy_tile(job, tile, memory.tile(tile));
    ptx::commit_copies();
  };
#pragma unroll 1
  for (uint32_t tile = 0; tile < S::kStages; tile++) start_copy(tile);
#pragma unroll 1
  for (uint32_t tile = 0; tile < num_tiles; tile++) {
    if (tile == 0)
      ptx::await_copies<S::kStages - 1>();
    else
      ptx::await_copies<S::kStages - 2>();
    if (!c.sync()) return false;  // all have this tile, and none reads the one before
    if (tile > 0) start_copy(tile + S::kStages - 1);
    if (c.warp < S::kWarps) multiply_keys(memory, memory.tile(tile), c.warp, c.lane);
    if (!c.sync()) return false;
    if (c.warp < S::kWarps) weigh(job, memory, part, tile, c.warp, c.lane);
    if (!c.sync()) return false;
    if (column < V::kSize) results.add(memory, memory.tile(tile), column, c.lane);
  }
  if (num_tiles == 0 && !c.sync()) return false;
  if (split.index == 0 && split.is_last) {
    if (column < V::kSize)
      results.for_each(column, c.lane, [&](int head, int at, float first, float second) {
        const float factor = inverse_of<V>(memory.total()[head]);
        if (head < part.num_heads) store<V>(job, part.row, part.head + head, at, first * factor, second * factor);
      });
    return true;
  }
  const uint32_t tag = tag_of(c);
  ulonglong2* words = words_of<V>(job, split, split.index);
  if (c.rank < S::kHeads)
    ptx::store_relaxed_gpu(words + c.rank, tagged(memory.most()[c.rank], memory.total()[c.rank], tag));
  if (column < V::kSize)
    results.for_each(column, c.lane, [&](int head, int at, float first, float second) {
      ptx::store_relaxed_gpu(words + S::kHeads + head * S::kPairs + at / 2, tagged(first, second, tag));
    });
  return true;
}

// The splits of a row with this limit.
template <class V>
MPK_DEVICE uint32_t num_splits(uint32_t limit) {
  const uint32_t tiles = attention::tiles_of<V>(limit);
  if constexpr (V::kBatch == 1)
    return kv_count(tiles, kv_row_length(tiles, attention::kUnits<V>, kKvSplitTiles, V::kWorkers));
  else
    return kv_count(tiles, kv_own_length(tiles, V::kFewSplits, V::kSplitTiles));
}

// Makes each split's maxima and sums of a unit, which have been read to shared memory, the factors of its results. A
// warp has a head at a time.
template <class V, class C>
MPK_DEVICE void make_factors(C& c, float2* merged, uint32_t count) {
  using S = Shape<V>;
#pragma unroll 1
  for (int head = c.warp; head < S::kHeads; head += kConsumerWarps) {
    float most = -infinity(), total = 0;
#pragma unroll 1
    for (uint32_t i = c.lane; i < count; i += 32) most = fmaxf(most, merged[i * S::kHeads + head].x);
    const float base = attention::subtrahend(warp_max(most));
#pragma unroll 1
    for (uint32_t i = c.lane; i < count; i += 32) {
      float2& each = merged[i * S::kHeads + head];
      each.x = attention::exponential<typename V::T>(each.x - base);
      total = fmaf(each.x, each.y, total);
    }
    const float factor = inverse_of<V>(warp_sum(total));
#pragma unroll 1
    for (uint32_t i = c.lane; i < count; i += 32) merged[i * S::kHeads + head].x *= factor;
  }
}

// Merges the worker's share of the results of a unit. False when the launch was aborted.
template <class V, class C>
MPK_DEVICE bool merge(C& c, const Job& job, const KvSplit& split, uint32_t limit) {
  using S = Shape<V>;
  constexpr int kAtOnce = 8;  // more spill, beside the state of a launch
  const Part<V> part(split, limit);
  const uint32_t count = num_splits<V>(limit), tag = tag_of(c);
  const ulonglong2* first = words_of<V>(job, split, 0);
  constexpr uint32_t kApart = attention::kUnits<V> * S::kWords;  // from split to split
  const Watchdog& dog = c.shared.watchdog;
  float2* merged = Memory<V>{c.staged()}.merged();
#pragma unroll 1
  for (uint32_t i = c.rank; i < count * S::kHeads && !c.failed; i += kConsumerThreads) {
    ulonglong2 words;
    const ulonglong2* at = first + uint64_t(i / S::kHeads) * kApart + i % S::kHeads;
    c.failed = !poll(dog, c.phase, [&] { return differing(words = ptx::load_relaxed_gpu(at), tag); });
    merged[i] = {float_of(words.x), float_of(words.y)};
  }
  if (!c.sync()) return false;
  make_factors<V>(c, merged, count);
  if (!c.sync()) return false;
  const Span mine = static_span(part.num_heads * S::kPairs, split.index, count);
#pragma unroll 1
  for (uint32_t i = mine.begin + c.rank; i < mine.end && !c.failed; i += kConsumerThreads) {
    const uint32_t head = i / S::kPairs;
    float sums[2] = {};
#pragma unroll 1
    for (uint32_t s = 0; s < count && !c.failed; s += kAtOnce) {
      ulonglong2 words[kAtOnce];
      c.failed = !poll(dog, c.phase, [&] {
#pragma unroll
        for (int u = 0; u < kAtOnce; u++)
          if (s + u < count) words[u] = ptx::load_relaxed_gpu(first + uint64_t(s + u) * kApart + S::kHeads + i);
        uint32_t missing = 0;
#pragma unroll
        for (int u = 0; u < kAtOnce; u++)
          if (s + u < count) missing |= differing(words[u], tag);
        return missing;
      });
#pragma unroll
      for (int u = 0; u < kAtOnce; u++) {
        if (s + u >= count) continue;
        const float factor = merged[(s + u) * S::kHeads + head].x;
        sums[0] = fmaf(factor, float_of(words[u].x), sums[0]);
        sums[1] = fmaf(factor, float_of(words[u].y), sums[1]);
      }
    }
    store<V>(job, part.row, part.head + head, i % S::kPairs * 2, sums[0], sums[1]);
  }
  return true;
}

template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  static_assert(Variant<V>);
  static_assert(Shape<V>::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  if (!c.await()) return;
  const Cut<V> cut(job);
  const uint32_t worker = c.worker(job);
#pragma unroll 1
  for (uint32_t turn = 0;; turn++) {
    const KvSplit split = cut.split(turn, worker);
    if (split.num_tiles == 0) break;
    if (turn > 0 && !c.sync()) return;  // nobody reads what the split before has in shared memory
    if (!compute_split<V>(c, job, split, cut.limit(split.row))) return;
  }
  if constexpr (!attention::kMayCut<V>) return;
#pragma unroll 1
  for (uint32_t turn = 0;; turn++) {
    const KvSplit split = cut.split(turn, worker);
    if (split.num_tiles == 0) return;
    if (split.index == 0 && split.is_last) continue;
    if (!c.sync() || !merge<V>(c, job, split, cut.limit(split.row))) return;
  }
}

}  // namespace mpk::latent_attention
