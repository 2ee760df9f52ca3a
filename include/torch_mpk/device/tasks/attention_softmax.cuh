// A warp's online softmax over its tiles, and the merge of warps and splits.
#pragma once

#include "torch_mpk/device/tasks/attention_values.cuh"

namespace mpk::attention {

// A tile in shared memory.
template <class V>
struct Tile {
  using T = typename V::T;
  const T *keys, *values;  // [position][kSize], [position][kValueSize]
  Live<V> live;            // positions that count; other values are zero
};

// Scores of 16 positions, from position `place` of the tile on, on tensor cores: S = K Q^T, four heads at a time. The
// order of elements along the summed dimension is free, as long as both factors agree, so fragments are 16-byte chunks.
// Eight lanes read two keys at a time, and both begin in the same bank. So the lanes of odd keys read the halves of 8
// chunks in reverse order. The free columns of four more heads hold the same heads with those halves reversed, which
// odd keys are multiplied with.
template <class V>
MPK_DEVICE void tensor_core_scores(const Tile<V>& tile, int place, const uint8_t* staged, float* scores,
                                   uint32_t lane) {
  using S = Shape<V>;
  using T = typename S::T;
  const uint32_t g = lane / 4, t = lane % 4;
  constexpr bool kReversed = S::kChunks % 8 == 0;
  const uint32_t key_flip = kReversed ? g % 2 * 4 : 0, query_flip = kReversed ? g / 4 * 4 : 0;
  const uint4* key = reinterpret_cast<const uint4*>(tile.keys) + (place + g) * S::kChunks + t;
  const uint4* query = reinterpret_cast<const uint4*>(reinterpret_cast<const T*>(staged) + g % 4 * S::kPitch) + t;
  const uint4* keys[2] = {key + key_flip, key + (key_flip ^ 4)};
  const uint4* queries[2] = {query + query_flip, query + (query_flip ^ 4)};
  constexpr int kChains = S::kTensorCoreSums ? 1 : 2;  // as many as registers hold
#pragma unroll 1
  for (int first = 0; first < S::kHeads; first += 4) {
    SumFragment sums[2 * kChains] = {};
#pragma unroll
    for (int i = 0; i < S::kChunks; i += 4) {
      const bool in = S::kChunks % 4 == 0 || i + t < S::kChunks;
      const uint4* k = keys[i / 4 % 2] + i / 8 * 8;
      const uint4 low = in ? k[0] : uint4{}, high = in ? k[8 * S::kChunks] : uint4{};
      const uint4 q = in ? queries[i / 4 % 2][i / 8 * 8 + first * (S::kPitch / S::kVec)] : uint4{};
      multiply_fragments<T>(sums[i / 4 % kChains], sums[kChains + i / 4 % kChains], {low, high}, {q});
    }
#pragma unroll
    for (int apart = 1; apart < 2 * kChains; apart *= 2)
#pragma unroll
      for (int i = 0; i < 2 * kChains; i += 2 * apart)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[i][e] += sums[i + apart][e];
    // A lane has positions g and g + 8 of columns 2t, 2t + 1.
    const uint32_t head = first + t % 2 * 2;
    if (t / 2 == g % 2 && head < S::kPad) {
      using Two = Floats<2>;
      *reinterpret_cast<Two*>(scores + g * S::kPad + head) = {sums[0][0], sums[0][1]};
      *reinterpret_cast<Two*>(scores + (g + 8) * S::kPad + head) = {sums[0][2], sums[0][3]};
    }
  }
}

// The place of element d of a query head for fma_scores. The quads of a 16-byte chunk lie apart, so that lanes with
// different chunks meet different banks.
template <class V>
MPK_DEVICE int query_place(int d) {
  using S = Shape<V>;
  const int chunk = d / S::kVec, e = d % S::kVec;
  return (e / 4) * (S::kChunks * 4) + chunk * 4 + e % 4;
}

// Scores by fused multiply-adds, for fp32. 32 / kTile lanes share a position, and take its chunks in turn.
template <class V>
MPK_DEVICE void fma_scores(const Tile<V>& tile, const uint8_t* staged, float* to, uint32_t lane) {
  using S = Shape<V>;
  using T = typename S::T;
  const float* queries = reinterpret_cast<const float*>(staged + S::kFloatsOffset);
  const uint32_t place = lane % S::kTile;
  float scores[S::kHeads] = {};
  const uint4* keys = reinterpret_cast<const uint4*>(tile.keys + place * S::kSize);
  const uint32_t start = place % S::kChunks;  // all rows begin in the same bank
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

// A lane's softmax: position lane % kTile of head kAtOnce r + lane / kTile in round r, and its share of the sums of
// values. Weights pass through the warp's shared memory.
template <class V>
struct Softmax {
  using S = Shape<V>;
  using T = typename S::T;
  using Sums = typename Choose<S::kTensorCoreSums, TensorCoreSums<V>, LaneSums<V>>::Type;
  float max[S::kRounds], sum[S::kRounds] = {};  // a head's maxima, the lane's share of sums
  float mask[S::kRounds] = {};                  // of the current tile
  Sums sums;

  MPK_DEVICE Softmax() {
#pragma unroll
    for (int r = 0; r < S::kRounds; r++) max[r] = -infinity();
  }

  static MPK_DEVICE uint32_t head(int r, uint32_t lane) { return r * S::kAtOnce + lane / S::kTile; }

  // Starts the loads of a tile's masks.
  MPK_DEVICE void fetch_mask(const Job& job, const KvSplit& split, uint32_t first, const Live<V>& live, uint32_t lane) {
    if constexpr (V::kHasMask)
#pragma unroll
      for (int r = 0; r < S::kRounds; r++)
        if (live.has(lane % S::kTile) && head(r, lane) < S::kHeads)
          mask[r] = V::mask(job, split.row, split.group * S::kHeads + head(r, lane), first + lane % S::kTile);
  }

  // values() waits for the tile's values. done() frees the tile.
  template <class Values, class Done>
  MPK_DEVICE bool add(const Tile<V>& tile, uint8_t* staged, uint32_t warp, uint32_t lane, Values values, Done done) {
    float* weights = reinterpret_cast<float*>(staged + S::kWeightsOffset) + warp * S::kWeights;
    if constexpr (S::kTensorCores)
#pragma unroll
      for (int first = 0; first < S::kTile; first += kWarpRows)
        tensor_core_scores<V>(tile, first, staged, weights + first * S::kPad, lane);
    else
      fma_scores<V>(tile, staged, weights, lane);
    __syncwarp();
    if constexpr (Sums::kReadsFirst) {
      const auto read = Sums::read(tile.values, lane);
      done();
      weigh(tile.live, weights, lane);
      sums.add(read, weights, lane);
    } else {
      weigh(tile.live, weights, lane);
      if (!values()) return false;
      sums.add(Sums::read(tile.values, lane), weights, lane);
      done();
    }
    return true;
  }

  // Turns scores into weights. The factors of earlier results stand behind them.
  MPK_DEVICE void weigh(const Live<V>& live, float* weights, uint32_t lane) {
    const uint32_t place = lane % S::kTile;
#pragma unroll
    for (int r = 0; r < S::kRounds; r++) {
      float* at = weights + head(r, lane);
      const float score = live.has(place) ? __fadd_rn(scored<V>(at[place * S::kPad]), mask[r]) : -infinity();
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
  }

  // Writes heads [first, first + kStored) as partials.
  MPK_DEVICE void store(int first, float* partials, uint32_t lane) {
    const auto partial = [&](uint32_t h) -> float* {
      const bool is_stored = (S::kStored == S::kHeads || h - first < S::kStored) && h < S::kHeads;
      return is_stored ? partials + (h - first) * kPartial<V> : nullptr;
    };
    sums.store(partial, lane);
#pragma unroll
    for (int r = 0; r < S::kRounds; r++) {
      float total = sum[r];
#pragma unroll
      for (int o = 1; o < S::kTile; o *= 2) total += __shfl_xor_sync(~0u, total, o);
      float* to = partial(head(r, lane));
      if (lane % S::kTile == 0 && to != nullptr) *reinterpret_cast<Floats<2>*>(to + S::kValueSize) = {max[r], total};
    }
  }
};

// ---- combining

// A head's result in a warp: a lane's unnormalised elements, the maximum, the sum of exponentials.
template <class V>
struct Combined {
  using S = Shape<V>;
  using T = typename V::T;
  using Part = Floats<S::kWidth>;
  float out[S::kSteps][S::kWidth] = {};
  float max = -infinity(), sum = 0;

  // As a partial result in memory: a lane's elements in pairs, then the maximum and the sum.
  static constexpr int kElements = S::kSteps * S::kWidth, kPairs = (kElements + 1) / 2;
  static_assert((32 * kPairs + 1) * sizeof(ulonglong2) <= V::kPartialBytes,
                "codegen and device disagree on partial results");
  static constexpr uint32_t kAhead = 4;  // splits

  // Merges the warps' results, `stride` floats apart, in order.
  MPK_DEVICE Combined(const float* results, int stride, uint32_t lane) {
    Floats<2> scales[kTileWarps<V>];
#pragma unroll
    for (int i = 0; i < kTileWarps<V>; i++) {
      scales[i] = *reinterpret_cast<const Floats<2>*>(results + i * stride + S::kValueSize);
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
        if (S::holds(s, lane))
#pragma unroll
          for (int e = 0; e < S::kWidth; e++) out[s][e] = fmaf(from[32 * s].v[e], f, out[s][e]);
    }
  }

  // Adds the group's `count` other splits in order, of which the first is at `from`. Several are in flight before the
  // first tag is checked. A lane has the maximum and sum of one of them. False when the launch was aborted.
  template <class C>
  MPK_DEVICE bool add(C& c, const uint8_t* from, uint32_t count, uint32_t tag) {
    constexpr uint32_t kStride = kUnits<V> * kSplitBytes<V>;
#pragma unroll 1
    for (; count > 0; from += kAhead * kStride, count -= min(count, kAhead)) {
      ulonglong2 words[kAhead][kPairs], scale;
      const uint32_t lane = c.lane;
      const auto load = [&](uint32_t split, uint32_t place) {
        return split < count && split < kAhead
                   ? ptx::load_relaxed_gpu(reinterpret_cast<const ulonglong2*>(from + split * kStride) + place)
                   : tagged(0u, 0u, tag);
      };
      const bool are_there = poll(c.shared.watchdog, c.phase, [&] {
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
        return missing;
      });
      if (!__all_sync(~0u, are_there)) return false;
      const float before = max;
#pragma unroll
      for (uint32_t i = 0; i < kAhead; i++) {
        const float of_split = __shfl_sync(~0u, float_of(scale.x), i);
        if (i < count) max = fmaxf(max, of_split);
      }
      const float less = subtrahend(max), keep = exponential<T>(before - less);
      const float factors = exponential<T>(float_of(scale.x) - less);  // the lane's split's
      sum *= keep;
#pragma unroll
      for (int e = 0; e < kElements; e++) element(e) *= keep;
#pragma unroll
      for (uint32_t i = 0; i < kAhead; i++) {
        const float factor = __shfl_sync(~0u, factors, i), of_split = __shfl_sync(~0u, float_of(scale.y), i);
        if (i >= count) continue;
        sum = fmaf(of_split, factor, sum);
#pragma unroll
        for (int e = 0; e < kElements; e++)
          element(e) = fmaf(float_of(e % 2 == 0 ? words[i][e / 2].x : words[i][e / 2].y), factor, element(e));
      }
    }
    return true;
  }

  // Calls take(at, elements) with the lane's parts of the rounded result. Without any key it is zero or NaN.
  template <class F>
  MPK_DEVICE void finish(const Job& job, uint32_t head, uint32_t lane, F take) const {
    float total = sum, kept = 1;
    if constexpr (V::kHasSinks) kept = add_sink<T>(V::sink(job, head), max, total);
    const bool zero = V::kZeroWithoutKeys && total == 0;
    const float inverse = zero ? 0.0f : __fdividef(kept, total);
#pragma unroll
    for (int s = 0; s < S::kSteps; s++) {
      if (!S::holds(s, lane)) continue;
      float v[S::kWidth];
#pragma unroll
      for (int e = 0; e < S::kWidth; e++)
        v[e] = sizeof(T) == 2 ? out[s][e] * inverse : zero ? 0.0f : out[s][e] * kept / total;
      take((lane + 32 * s) * S::kWidth, round_to<T>(v));
    }
  }

  // Stores it in memory, or in a polled vector.
  MPK_DEVICE void store(const Job& job, uint32_t row, uint32_t head, uint32_t lane) const {
    finish(job, head, lane, [&](uint32_t at, const Vec<T, S::kWidth>& rounded) {
      auto* y = V::y(job, row, head) + at;
      if constexpr (V::kPolled) {
        store_elements(y, rounded);
      } else {
#pragma unroll
        for (int e = 0; e < S::kWidth; e++) y[e] = rounded.v[e];
      }
    });
  }

  // Stores a partial result for the worker of the group's last split.
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

}  // namespace mpk::attention
