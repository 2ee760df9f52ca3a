// A warp's rows of queries in prefill_attention: scores, softmax and results.
#pragma once

#include "torch_mpk/device/consumer.cuh"
#include "torch_mpk/device/fragment.cuh"
#include "torch_mpk/device/tasks/prefill_shape.cuh"

namespace mpk::prefill_attention {

// Two elements side by side.
template <bool aligned, class T>
MPK_DEVICE uint32_t load_pair(const T* p) {
  if constexpr (aligned) return *reinterpret_cast<const uint32_t*>(p);
  return to_word(p[0]) | to_word(p[1]) << 16;
}
template <bool aligned, class T>
MPK_DEVICE void store_pair(T* p, uint32_t pair) {
  if constexpr (aligned) {
    *reinterpret_cast<uint32_t*>(p) = pair;
  } else {
    p[0] = from_word<T>(pair);
    p[1] = from_word<T>(pair >> 16);
  }
}

// 16 rows of queries. A lane has parts of two of them, `lane / 4` and the one 8 below, as in fragments (fragment.cuh).
template <class V, class U>
struct Rows {
  using S = Shape<V>;
  using T = typename V::T;
  using KeyTile = typename S::KeyTile;
  using ValueTile = typename S::ValueTile;
  using Scores = SumFragment[S::kAtOnce / 8];
  static constexpr int kFragments = V::kValueSize / 8;  // of results

  const Job& job;
  const U& unit;
  uint32_t first, lane;       // the lane's first row; its lane
  uint32_t limit[2];          // positions that both rows see, but for a mask
  uint32_t least, most;       // fewest and most that the rows see that are multiplied together; 0: there are none
  ptx::SharedAddress staged;  // the lane's row of queries, where registers do not hold it
  ptx::Quad q[S::kKeepsQueries ? KeyTile::kSteps : 1];
  SumFragment out[kFragments] = {};
  float maximum[2], sum[2] = {};  // sum: the lane's part of it

  // `block`: the number of 16 rows within the unit. `place`: the warp's shared memory.
  MPK_DEVICE Rows(const Job& job, const U& unit, uint32_t block, uint32_t lane, uint8_t* place)
      : job(job), unit(unit), first(unit.first + block * kWarpRows + lane / 4), lane(lane) {
    const T* rows[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      rows[i] = unit.q(job, query(i), head(i)) + lane % 4 * 2;
      limit[i] = unit.limit(job, query(i));
      maximum[i] = -infinity();
    }
    load_queries(rows, place);
    find_ends(unit.first + block * kWarpRows / S::kRowsTogether * S::kRowsTogether);
  }

  // `begin`: the first of the rows that are multiplied together.
  MPK_DEVICE void find_ends(uint32_t begin) {
    least = min(limit[0], limit[1]);
    most = max(limit[0], limit[1]);
    if constexpr (S::kByWarpgroups) {  // all of them, some of which are other warps'
#pragma unroll
      for (int i = 0; i < S::kRowsTogether; i += 32) {
        const uint32_t seen = unit.limit(job, min(begin + i + lane, unit.num_rows() - 1) / V::kHeads);
        least = min(least, seen);
        most = max(most, seen);
      }
    }
#pragma unroll
    for (int o = S::kByWarpgroups ? 1 : 4; o < 32; o *= 2) {
      least = min(least, __shfl_xor_sync(~0u, least, o));
      most = max(most, __shfl_xor_sync(~0u, most, o));
    }
    if (begin >= unit.num_rows()) most = 0;
  }

  MPK_DEVICE void load_queries(const T* const (&rows)[2], uint8_t* place) {
    const auto fragment = [&](int k, int i) {
      const bool is_there = !KeyTile::kEndsHalf || k + 1 < KeyTile::kSteps || i < 2;
      return is_there ? load_pair<V::kAlignedQ>(rows[i % 2] + 16 * k + i / 2 * 8) : 0;
    };
    if constexpr (S::kKeepsQueries) {
#pragma unroll
      for (int k = 0; k < KeyTile::kSteps; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) q[k].v[i] = fragment(k, i);
    } else {
      staged = ptx::smem_addr(place) + lane % 16 * S::kQueriesPitch + lane / 16 * 16;
      uint8_t* mine = place + lane / 4 * S::kQueriesPitch + lane % 4 * 4;
#pragma unroll 4
      for (int k = 0; k < KeyTile::kSteps; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          *reinterpret_cast<uint32_t*>(mine + i % 2 * 8 * S::kQueriesPitch + 32 * k + i / 2 * 16) = fragment(k, i);
      __syncwarp();
    }
  }
  MPK_DEVICE ptx::Quad queries(int k) const {
    if constexpr (S::kKeepsQueries)
      return q[k];
    else
      return ptx::load_matrices(staged + 32 * k);
  }

  // Read anew each time, so that values computed from it hold no registers in between.
  static MPK_DEVICE uint32_t lane_anew() { return ptx::thread_index() % 32; }

  // Rows past the end repeat the last one, and are not stored.
  MPK_DEVICE uint32_t row(int i) const { return min(first + 8 * i, unit.num_rows() - 1); }
  MPK_DEVICE uint32_t query(int i) const { return row(i) / V::kHeads; }
  MPK_DEVICE uint32_t head(int i) const { return unit.group * V::kHeads + row(i) % V::kHeads; }

  // Adds a tile, some positions at a time. They need no check if all rows see all of them.
  MPK_DEVICE void attend(const uint8_t* entry, uint32_t tile) {
    uint32_t begin = tile * V::kKeys;
#pragma unroll 1
    for (int part = 0; part < V::kKeys / S::kAtOnce && begin < most; part++) {
      // Where keys and values have one pitch, this takes no register.
      const uint8_t* values = entry + KeyTile::kBytes + part * S::kAtOnce * (ValueTile::kPitch - KeyTile::kPitch);
      if (is_before_window(begin + S::kAtOnce - 1, least)) {
      } else if (V::kHasMask || begin + S::kAtOnce > least || is_before_window(begin, most)) {
        attend_part<true>(entry, values, begin);
      } else {
        attend_part<false>(entry, values, begin);
      }
      begin += S::kAtOnce;
      entry += S::kAtOnce * KeyTile::kPitch;
    }
  }

  // The tiles have been added.
  MPK_DEVICE void finish() {}

  // Whether a position lies before the window of a row with this limit.
  static MPK_DEVICE bool is_before_window(uint32_t position, uint32_t limit) {
    if constexpr (Windowed<V>)
      if constexpr (V::kWindow > 0) return position + V::kWindow < limit;
    return false;
  }

  template <bool cut>
  MPK_DEVICE void attend_part(const uint8_t* keys, const uint8_t* values, uint32_t begin) {
    Scores scores;
    multiply_keys(scores, keys);
    finish_scores<cut>(scores, begin);
    rescale(raise(scores));
    exponentiate(scores);
    add_values<cut>(scores, values, most - begin);
  }

  template <bool cut>
  MPK_DEVICE void finish_scores(Scores& scores, uint32_t begin) const {
    if constexpr (S::kScaleFirst)
#pragma unroll
      for (SumFragment& fragment : scores)
#pragma unroll
        for (float& score : fragment) score = attention::scored<V>(score);
    if constexpr (cut) hide(scores, begin);
  }

  // Each load of a warp covers 16 keys by 16 columns: 8 columns of 8 keys, the next 8 columns, then 8 more keys.
  MPK_DEVICE void multiply_keys(Scores& scores, const uint8_t* keys) const {
    for (SumFragment& fragment : scores)
#pragma unroll
      for (float& score : fragment) score = 0;
    const uint32_t lane = lane_anew(), matrix = lane / 8;
    const ptx::SharedAddress from = KeyTile::fragment_of(keys, matrix / 2 * 8 + lane % 8, matrix % 2);
#pragma unroll
    for (int k = 0; k < KeyTile::kSteps; k++) {
      const ptx::SharedAddress columns = KeyTile::columns_of(from, k);
      const ptx::Quad a = queries(k);
#pragma unroll
      for (int n = 0; n < S::kAtOnce / 16; n++) {
        ptx::Quad b = ptx::load_matrices(columns + n * 16 * KeyTile::kPitch);
        if (KeyTile::kEndsHalf && k + 1 == KeyTile::kSteps) b.v[1] = b.v[3] = 0;  // anything may stand behind a key
        ptx::mma<T>(scores[2 * n], a, {b.v[0], b.v[1]});
        ptx::mma<T>(scores[2 * n + 1], a, {b.v[2], b.v[3]});
      }
    }
  }

  // Adds the mask, and hides positions that a row does not see, whatever stands there.
  MPK_DEVICE void hide(Scores& scores, uint32_t begin) const {
    const uint32_t lane = lane_anew();
#pragma unroll
    for (int n = 0; n < S::kAtOnce / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t position = begin + 8 * n + lane % 4 * 2 + i % 2;
        const bool sees = position < limit[i / 2] && !is_before_window(position, limit[i / 2]);
        if constexpr (V::kHasMask)
          if (sees) scores[n][i] += V::mask(job, unit.batch, head(i / 2), query(i / 2), position);
        if (!sees) scores[n][i] = -infinity();
      }
  }

  // Turns scores into exponentials, and adds them up. Rounding is explicit, so a row has the same bits whichever tiles
  // are cut.
  MPK_DEVICE void exponentiate(Scores& scores) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float base = attention::subtrahend(maximum[i]), offset = -base * S::kToExponent;
#pragma unroll
      for (SumFragment& s : scores)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; e++) {
          s[e] = ptx::exp2(S::kScaleFirst ? (s[e] - base) * S::kToExponent : fmaf(s[e], S::kToExponent, offset));
          sum[i] += s[e];
        }
    }
  }

  // Raises each row's maximum by its scores, and rescales its sum. The results so far are to be rescaled as well.
  struct Raised {
    float kept[2] = {1, 1};
    bool any = false;  // of the warp's rows
  };
  MPK_DEVICE Raised raise(const Scores& scores) {
    Raised raised;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float high = maximum[i];
#pragma unroll
      for (const SumFragment& s : scores) high = fmaxf(high, fmaxf(s[2 * i], s[2 * i + 1]));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      if (!((high - maximum[i]) * S::kToExponent > S::kSlack)) continue;
      raised.any = true;
      raised.kept[i] = factor(maximum[i], high);
      sum[i] *= raised.kept[i];
      maximum[i] = high;
    }
    raised.any = __any_sync(~0u, raised.any);
    return raised;
  }
  MPK_DEVICE void rescale(const Raised& raised) {
    if (!raised.any) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (SumFragment& o : out) {
        o[2 * i] *= raised.kept[i];
        o[2 * i + 1] *= raised.kept[i];
      }
    }
  }

  // Exponentials of 16 positions from 16 k on, rounded, as a factor of products.
  static MPK_DEVICE ptx::Quad rounded(const Scores& weights, int k) {
    const auto pair = [&](int n, int i) { return round_pair<T>(weights[n][i], weights[n][i + 1]); };
    return {pair(2 * k, 0), pair(2 * k, 2), pair(2 * k + 1, 0), pair(2 * k + 1, 2)};
  }

  // Each load of a warp covers 16 positions by 16 columns, transposed: 8 positions of 8 columns, the next 8 positions,
  // then 8 more columns. With `cut`, values from number `count` on count as zero: anything may stand there, and a
  // weight of 0 would make NaN of it.
  template <bool cut>
  MPK_DEVICE void add_values(const Scores& weights, const uint8_t* values, uint32_t count) {
    const uint32_t lane = lane_anew(), matrix = lane / 8;
    const ptx::SharedAddress from = ValueTile::fragment_of(values, matrix % 2 * 8 + lane % 8, matrix / 2);
#pragma unroll
    for (int k = 0; k < S::kAtOnce / 16; k++) {
      const ptx::Quad a = rounded(weights, k);
      const uint32_t position = 16 * k + lane % 4 * 2;
      const uint32_t keeps[2] = {kept_of(position, count), kept_of(position + 8, count)};
#pragma unroll
      for (int n = 0; n < ValueTile::kSteps; n++) {
        ptx::Quad b = ptx::load_matrices_transposed(ValueTile::columns_of(from, n) + k * 16 * ValueTile::kPitch);
        if constexpr (cut)
#pragma unroll
          for (int i = 0; i < 4; i++) b.v[i] &= keeps[i % 2];
        ptx::mma<T>(out[2 * n], a, {b.v[0], b.v[1]});
        if (2 * n + 1 < kFragments) ptx::mma<T>(out[2 * n + 1], a, {b.v[2], b.v[3]});
      }
    }
  }
  static MPK_DEVICE uint32_t kept_of(uint32_t position, uint32_t count) {
    return (position < count ? 0xffff : 0) | (position + 1 < count ? 0xffff0000 : 0);
  }

  // Merges the results of the warps that share rows, through shared memory, in their order, into the first warp's.
  // Their numbers are `stride` apart. False when the launch was aborted.
  template <class C>
  MPK_DEVICE bool merge(C& c, uint32_t stride) {
    constexpr int kAtATime = kMergedColumns / 8, kPlace = S::kWarpBytes / int(sizeof(float4));
    float4* mine = reinterpret_cast<float4*>(c.staged()) + c.warp * kPlace + c.lane;
    const bool is_first = c.warp < stride;
    const auto for_others = [&](auto f) {
      const float4* theirs = mine;
#pragma unroll 1
      for (uint32_t other = c.warp + stride; other < kConsumerWarps; other += stride) {
        theirs += stride * kPlace;
        f(theirs, theirs[kAtATime * 32]);
      }
    };
    float high[2] = {maximum[0], maximum[1]}, kept[2];
    if (!is_first) mine[kAtATime * 32] = {maximum[0], maximum[1], sum[0], sum[1]};
#pragma unroll
    for (int begin = 0; begin < kFragments; begin += kAtATime) {
      const int end = kFragments - begin < kAtATime ? kFragments - begin : kAtATime;
      if (!is_first)
#pragma unroll
        for (int n = 0; n < end; n++) {
          const SumFragment& o = out[begin + n];
          mine[n * 32] = {o[0], o[1], o[2], o[3]};
        }
      if (!c.sync()) return false;
      if (is_first) {
        if (begin == 0) {
          for_others([&](const float4*, const float4& of) {
            high[0] = fmaxf(high[0], of.x);
            high[1] = fmaxf(high[1], of.y);
          });
#pragma unroll
          for (int i = 0; i < 2; i++) sum[i] *= kept[i] = factor(maximum[i], high[i]);
          for_others([&](const float4*, const float4& of) {
            sum[0] = fmaf(factor(of.x, high[0]), of.z, sum[0]);
            sum[1] = fmaf(factor(of.y, high[1]), of.w, sum[1]);
          });
        }
#pragma unroll
        for (int n = 0; n < end; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) out[begin + n][i] *= kept[i / 2];
        for_others([&](const float4* theirs, const float4& of) {
          const float factors[2] = {factor(of.x, high[0]), factor(of.y, high[1])};
#pragma unroll
          for (int n = 0; n < end; n++) {
            const float4 v = theirs[n * 32];
            SumFragment& o = out[begin + n];
            o[0] = fmaf(factors[0], v.x, o[0]);
            o[1] = fmaf(factors[0], v.y, o[1]);
            o[2] = fmaf(factors[1], v.z, o[2]);
            o[3] = fmaf(factors[1], v.w, o[3]);
          }
        });
      }
      if (!c.sync()) return false;  // all have been read
    }
#pragma unroll
    for (int i = 0; i < 2; i++) maximum[i] = high[i];
    return true;
  }
  // The factor of sums of exponentials when their maximum changes.
  static MPK_DEVICE float factor(float from, float to) {
    return ptx::exp2((from - attention::subtrahend(to)) * S::kToExponent);
  }

  // Stores results, rounded. Rows that saw nothing give zero or NaN.
  MPK_DEVICE void store() {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
      if (first + 8 * i >= unit.num_rows()) continue;
      float kept = 1;
      if constexpr (V::kHasSinks)
        kept = attention::add_sink<T>(V::sink(job, head(i)), maximum[i] * (S::kScaleFirst ? 1.0f : V::kScale), sum[i]);
      const float inverse = V::kZeroWithoutKeys && sum[i] == 0 ? 0.0f : __fdividef(kept, sum[i]);
      T* y = unit.y(job, query(i), head(i)) + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kFragments; n++)
        store_pair<V::kAlignedY>(y + 8 * n, round_pair<T>(out[n][2 * i] * inverse, out[n][2 * i + 1] * inverse));
    }
  }
};

}  // namespace mpk::prefill_attention
