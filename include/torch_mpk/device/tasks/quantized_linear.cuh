// quantized_linear for weights that cannot be copied as boxes: each warp reads rows of them in place. x is staged as
// the numbers that it is quantised to, with a factor for each run of columns.
#pragma once

#include "torch_mpk/device/tasks/quantized_format.cuh"

namespace mpk::linear {

template <class V, class C>
concept QuantizedVariant =
    Variant<V, C> && QuantizedSizes<V> && HasScales<V> && Constants<int, V::kRun> && requires(const Job& job, int i) {
      { V::weight(job, i) } -> Same<const uint8_t*>;  // i: segment or part
      { V::weight_pitch(i) } -> Same<int64_t>;        // in bytes
      // Columns that stand side by side, and bytes to those behind them.
      requires Constants<int, V::kWordColumns>;
      { V::word_pitch(i) } -> Same<int64_t>;
      // Of each column, the one of so many groups that it belongs to.
      requires !V::kHasGroups || requires {
        requires Constants<int, V::kGroups>;
        { V::groups(job, i) } -> Same<const int32_t*>;
      };
      // Numbers of all codes, of which the first of two stands in the high bits.
      requires !V::kHasCode || requires {
        { V::code(job, i) } -> Same<const float*>;
      };
      // Numbers of scales, by byte; for so many of them a scale of theirs; what is added to the products.
      requires !V::kNestedScales || requires {
        requires Constants<int, V::kRowScales, V::kScaleBlock>;
        { V::scale_code(job, i) } -> Same<const float*>;
        { V::scale_scale(job, i) } -> Same<const float*>;
        { V::scale_offset(job, i) } -> Same<const float*>;
      };
    };

template <class V>
struct DirectShape {
  static constexpr int kPitch = Shape<V>::kPitch;
  static constexpr int kRuns = (V::kSize + V::kRun - 1) / V::kRun;
  static constexpr int kFactorsOffset = V::kBatch * kPitch;
  static constexpr int kStagedBytes = kFactorsOffset + V::kBatch * kRuns * 4;
};

// Quantises rows of x to e4m3, one warp for each.
template <class V, class C>
MPK_DEVICE void quantize_rows(C& c, const Job& job, uint8_t* staged) {
  using T = typename V::T;
  using S = DirectShape<V>;
  float* factors = reinterpret_cast<float*>(staged + S::kFactorsOffset);
  for (int r = c.warp; r < V::kBatch; r += kConsumerWarps) {
    T* row = reinterpret_cast<T*>(staged + r * S::kPitch);
    constexpr int kBlock = V::kXScaleColumns > 0 ? V::kXScaleColumns : V::kSize;
    for (int first = 0; first < V::kSize; first += kBlock) {
      const int end = min(first + kBlock, V::kSize);
      float scale = 1;
      if constexpr (V::kXScaleColumns > 0) {
        float most = 0;
        for (int k = first + c.lane; k < end; k += 32) most = fmaxf(most, fabsf(to_float(row[k])));
        scale = V::kGivenXScale ? V::x_scale(job) : e4m3_scale(warp_max(most));
        for (int k = first + c.lane; k < end; k += 32) row[k] = cast<T>(round_e4m3(to_float(row[k]) / scale));
      }
      for (int run = first / V::kRun + c.lane; run < (end + V::kRun - 1) / V::kRun; run += 32)
        factors[r * S::kRuns + run] = scale;
    }
  }
}

// A row of weights where it is.
template <class V>
struct RowInPlace {
  const Job& job;
  const int which;  // segment or part
  const uint32_t n;
  const uint32_t place;      // of its 4 bits, in words that have several rows
  const uint8_t* const row;  // or where these bits of column 0 are

  MPK_DEVICE RowInPlace(const Job& job, int which, uint32_t n)
      : job(job),
        which(which),
        n(n),
        place(V::kWordRows > 1 ? place_in_word<V>(n) : 0),
        row(V::weight(job, which) + n / V::kWordRows * V::weight_pitch(which) + place / 2) {}

  MPK_DEVICE float number(int k) const {
    const uint8_t byte = row[k / V::kWordColumns * V::word_pitch(which) + k % V::kWordColumns * V::kWeightBits / 8];
    if constexpr (V::kHasCode) {
      return V::code(job, which)[byte >> (1 - k % 2) * 4 & 15];
    } else {
      return weight_of<V>(byte, V::kWordRows > 1 ? place : k);
    }
  }
  // The weight of column k, whose group has any number; NaN if there is none of that number.
  MPK_DEVICE float of_group(int k) const {
    const uint32_t group = V::groups(job, which)[k];
    if (group >= V::kGroups) return __int_as_float(0x7fffffff);
    const BlockScale<V> block = load_block_scale<V>(job, which, n, group);
    return fmaf(number(k), to_float(block.scale), block.offset());
  }

  // A lane's part of the product with a run of x.
  template <class T>
  MPK_DEVICE float sum(const T* x, int first, int end, int lane) const {
    float sum = 0, sum_of_x = 0;
    for (int k = first + lane; k < end; k += 32) {
      if constexpr (V::kHasGroups) {
        sum = fmaf(of_group(k), to_float(x[k]), sum);
      } else {
        sum = fmaf(number(k), to_float(x[k]), sum);
        if constexpr (V::kZero != kNoZero) sum_of_x += to_float(x[k]);
      }
    }
    if constexpr (!V::kScalesByRow && !V::kHasGroups) {
      const BlockScale<V> block = load_block_scale<V>(job, which, n, first / V::kScaleColumns);
      sum *= to_float(block.scale);
      if constexpr (V::kZero != kNoZero) sum = fmaf(sum_of_x, block.offset(), sum);
    }
    return sum;
  }
};

template <class V, class C>
MPK_DEVICE void compute_quantized_direct(C& c, const Job& job) {
  static_assert(QuantizedVariant<V, C>);
  using S = DirectShape<V>;
  using T = typename V::T;
  uint8_t* staged = c.staged();
  if (!stage<V>(c, job, reinterpret_cast<T*>(staged))) return;
  quantize_rows<V>(c, job, staged);
  if (!c.sync()) return;
  const float* factors = reinterpret_cast<const float*>(staged + S::kFactorsOffset);
  const uint32_t worker = c.worker(job);
  for (uint32_t tile = worker + c.warp * C::Config::kNumWorkers; tile < V::kNumTiles;
       tile += kConsumerWarps * C::Config::kNumWorkers) {
    const int segment = segment_of<V>(tile);
    const uint32_t n = tile - V::first_tile(segment);
    for (int r = 0; r < V::kBatch; r++) {
      const T* x = reinterpret_cast<const T*>(staged + r * S::kPitch);
      float results[V::kParts];
#pragma unroll
      for (int p = 0; p < V::kParts; p++) {
        const int which = V::kParts > 1 ? p : segment;
        const RowInPlace<V> row(job, which, n);
        float total = 0;
        for (int run = 0; run < S::kRuns; run++) {
          const int first = run * V::kRun, end = min(first + V::kRun, V::kSize);
          total = fmaf(row.sum(x, first, end, c.lane), factors[r * S::kRuns + run], total);
        }
        results[p] = warp_sum(total);
      }
      if (c.lane == 0) V::finish(c, job, segment, r, n, results, V::preload(job, segment, r, n));
    }
  }
}

}  // namespace mpk::linear
