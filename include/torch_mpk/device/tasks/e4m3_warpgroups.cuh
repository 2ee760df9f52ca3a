// e4m3_linear by warpgroups (linear_warpgroups.cuh): tensor cores take e4m3 weights from the ring as they are, and x,
// which is quantised already, from its boxes.
//
// They add e4m3 products up with fewer bits than fp32 has, and scales change from one 128 columns, a line, to the next.
// So a line's sums go to other registers, times the scales of its columns. With up to 32 rows of x a warpgroup takes
// two lines at a time, of two boxes or of one, and adds the first one's sums while the second one is multiplied.
#pragma once

#include "torch_mpk/device/quantized.cuh"
#include "torch_mpk/device/tasks/linear_warpgroups.cuh"
#include "torch_mpk/device/tasks/quantized_format.cuh"

namespace mpk::linear {

template <class V, class C>
concept E4M3WarpgroupsVariant =
    WarpgroupsVariant<V, C> && QuantizedSizes<V> && HasScales<V> && requires(const Job& job) {
      requires Constants<int, V::kElementBytes, V::kXScalePitch, V::kXScaleStep>;
      { V::x_scales(job) } -> Same<const float*>;
    };

// The scales of a line: of a lane's two rows of weights, unless V::finish applies them, and of some rows of x, which
// lanes exchange.
template <class V>
struct E4M3LineScales {
  static constexpr int kOfLane = (V::kXRows + 31) / 32;
  float weights[2], mine[kOfLane];

  MPK_DEVICE void load(const Job& job, const WarpRows& rows, uint32_t line, int lane) {
    constexpr int kStep = V::kChunkSize;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if constexpr (V::kScalesByRow) {
        weights[i] = 1;
      } else {
        const uint32_t n = min(rows.first + lane / 4 + 8 * i, rows.last) / V::scale_rows(rows.which);
        weights[i] = to_float(*place_of_scale<V>(job, rows.which, n, line * kStep / V::kScaleColumns));
      }
    }
    const float* scales = V::x_scales(job) + (line * kStep / V::kXScaleColumns) * V::kXScaleStep;
#pragma unroll
    for (int i = 0; i < kOfLane; i++) mine[i] = scales[min(lane + 32 * i, V::kBatch - 1) * V::kXScalePitch];
  }
  // Finds the scale of row `r` of x, or of a row behind it in lanes that have other columns of sums.
  MPK_DEVICE float x(int r, int lane) const { return __shfl_sync(~0u, mine[r / 32], r % 32 + lane % 4 * 2); }
};

// Adds a line's products to the sums of its box, times its scales.
template <class V>
MPK_DEVICE void add_line(WarpgroupSums<V::kXRows>& sums, const WarpgroupSums<V::kXRows>& products,
                         const E4M3LineScales<V>& scales, int lane) {
#pragma unroll
  for (int j = 0; j < V::kXRows / 4; j++) {
    const float x_scale = scales.x(j / 2 * 8 + j % 2, lane);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int sum = j / 2 * 4 + half * 2 + j % 2;
      sums[sum] = fmaf(products[sum], x_scale * scales.weights[half], sums[sum]);
    }
  }
}

// A warpgroup's mainloop, of `held` boxes, `count` lines at a time.
template <class V, int held, int count, class C>
MPK_DEVICE void multiply_e4m3(C& c, const Job& job, Span pass, HeldSums<V>& sums, const uint8_t* stages) {
  using S = RowsShape<V>;
  const OwnLines<V> own(pass, c.warp);
  const uint32_t first = c.worker(job) % V::kSplit * S::kChunks, warp = c.warp % kWarpgroupWarps;
  E4M3LineScales<V> next[count];
  WarpgroupSums<V::kXRows> products[count] = {};
  const auto load = [&](uint32_t box, uint32_t chunk, int j) {
    if (box < own.boxes && chunk < S::kChunks)
      next[j].load(job, WarpRows::of<V>(pass, box, warp), first + chunk, c.lane);
  };
  own.template each<held, count>(
      c, products, stages, load, [&](const OwnLine(&lines)[count], const uint8_t* x, auto load_next) {
#pragma unroll
        for (int j = 0; j < count; j++) {
          const uint8_t* line = c.smem + warp_uniform(static_cast<uint32_t>(c.ring.slot(lines[j].entry) - c.smem));
          ptx::hold_sums(products[j]);
          ptx::begin_products();
          multiply_byte_blocks<V::kXRows>(products[j], line, x + lines[j].i * S::kBlockPitch);
          ptx::commit_products();
        }
        E4M3LineScales<V> scales[count];
#pragma unroll
        for (int j = 0; j < count; j++) scales[j] = next[j];
        load_next();
#pragma unroll
        for (int j = 0; j < count; j++) {
          if (j + 1 < count)
            ptx::await_products<count - 1>();
          else
            ptx::await_products<0>();
          ptx::hold_sums(products[j]);
          c.ring.release_share(lines[j].entry);
          add_line<V>(sums[lines[j].h], products[j], scales[j], c.lane);
        }
      });
}

template <class V, class C>
MPK_DEVICE void compute_e4m3_warpgroups(C& c, const Job& job) {
  static_assert(E4M3WarpgroupsVariant<V, C>);
  static_assert(V::kElementBytes == 1 && V::kChunkSize == kBoxRowBytes);
  compute_by_warpgroups<V, true>(
      c, job, [](Span) {},
      [&](Span pass, HeldSums<V>& sums, const uint8_t* stages) {
        // Two at a time are in four slots that follow each other, and the loader may wait for room for several.
        constexpr bool kHasRoom = C::Config::kSlots >= 3 + kLeastFilled<C::Config::kSlotBytes>;
        constexpr int kHeld = RowsShape<V>::kHeld;
        static_assert(kHeld <= 2);
        if (kHeld == 1 || OwnLines<V>(pass, c.warp).box(1) >= (pass.end - pass.begin) * V::kParts)
          multiply_e4m3<V, 1, kHasRoom && OwnLines<V>::template are_pairs<1>() ? 2 : 1>(c, job, pass, sums, stages);
        else
          multiply_e4m3<V, kHeld, kHasRoom && OwnLines<V>::template are_pairs<kHeld>() ? 2 : 1>(c, job, pass, sums,
                                                                                                stages);
      });
}

}  // namespace mpk::linear
