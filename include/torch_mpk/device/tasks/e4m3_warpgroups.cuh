// e4m3_linear by warpgroups (linear_warpgroups.cuh): tensor cores take e4m3 weights from the ring as they are, and x,
// which is quantised already, from its boxes.
//
// They add e4m3 products up with fewer bits than fp32 has, and scales change from one 128 columns, a line, to the next.
// So a line's sums go to other registers, times the scales of its columns. With up to 32 rows of x a warpgroup takes
// several lines at a time, those of its boxes or two of one, and adds the first one's sums while the others are
// multiplied.
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

// The scales of x in a line. Lanes load one or two of them each, of row after row.
template <class V>
struct XLineScales {
  static constexpr int kOfLane = (V::kXRows + 31) / 32;
  const float* scales;
  int lane;

  MPK_DEVICE XLineScales(const Job& job, int lane) : scales(V::x_scales(job)), lane(lane) {}
  MPK_DEVICE void load(float (&to)[kOfLane], uint32_t line) const {
    const float* from = scales + (line * V::kChunkSize / V::kXScaleColumns) * V::kXScaleStep;
#pragma unroll
    for (int i = 0; i < kOfLane; i++) to[i] = from[min(lane + 32 * i, V::kBatch - 1) * V::kXScalePitch];
  }
  // Gives a lane those of its sums' rows of x.
  MPK_DEVICE void share(float (&to)[V::kXRows / 4], const float (&loaded)[kOfLane]) const {
#pragma unroll
    for (int j = 0; j < V::kXRows / 4; j++) {
      const int row = j / 2 * 8 + j % 2;
      to[j] = __shfl_sync(~0u, loaded[row / 32], row % 32 + lane % 4 * 2);
    }
  }
};

// The scales of a lane's rows of weights in a line, where V::finish does not apply them. Blocks of scales have whole
// eights of rows, and a warp's 16 rows begin at a multiple of 16 or of 8.
template <class V, int held, bool there = !V::kScalesByRow>
struct WeightLineScales {
  static constexpr int kOfLane = V::kBoxRows % kWarpRows == 0 ? 1 : 2;
  const typename V::Scale* scales[held][kOfLane];  // of the first column of each box
  int which[held];

  MPK_DEVICE WeightLineScales(const Job& job, Span pass, const OwnLines<V>& own, uint32_t warp, int lane) {
#pragma unroll
    for (int h = 0; h < held; h++) {
      const WarpRows rows = WarpRows::of<V>(pass, min(own.box(h), own.boxes - 1), warp);
      which[h] = rows.which;
#pragma unroll
      for (int i = 0; i < kOfLane; i++) {
        const uint32_t n = min(kOfLane == 1 ? rows.first : rows.first + lane / 4 + 8 * i, rows.last);
        scales[h][i] = place_of_scale<V>(job, rows.which, n / V::scale_rows(rows.which), 0);
      }
    }
  }
  MPK_DEVICE void load(float (&to)[kOfLane], int h, uint32_t line) const {
    const int64_t offset = line * V::kChunkSize / V::kScaleColumns * V::scale_column_pitch(which[h]);
#pragma unroll
    for (int i = 0; i < kOfLane; i++) to[i] = to_float(scales[h][i][offset]);
  }
};
template <class V, int held>
struct WeightLineScales<V, held, false> {
  static constexpr int kOfLane = 1;
  MPK_DEVICE WeightLineScales(const Job&, Span, const OwnLines<V>&, uint32_t, int) {}
  MPK_DEVICE void load(float (&to)[1], int, uint32_t) const { to[0] = 1; }
};

// Adds a line's products to the sums of its box, times its scales.
template <class V, int of_lane>
MPK_DEVICE void add_line(WarpgroupSums<V::kXRows>& sums, const WarpgroupSums<V::kXRows>& products,
                         const float (&x)[V::kXRows / 4], const float (&weights)[of_lane]) {
#pragma unroll
  for (int j = 0; j < V::kXRows / 4; j++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int sum = j / 2 * 4 + half * 2 + j % 2;
      sums[sum] = fmaf(products[sum], x[j] * weights[half % of_lane], sums[sum]);
    }
}

// Waits for the j-th of `count` lines.
template <int count>
MPK_DEVICE void await_line(int j) {
  if (count > 2 && j == 0)
    ptx::await_products<2>();
  else if (j + 1 < count)
    ptx::await_products<1>();
  else
    ptx::await_products<0>();
}

// A warpgroup's mainloop, of `held` boxes, `count` lines at a time.
template <class V, int held, int count, class C>
MPK_DEVICE void multiply_e4m3(C& c, const Job& job, Span pass, HeldSums<V>& sums, const uint8_t* stages) {
  using S = RowsShape<V>;
  constexpr int kBoxes = OwnLines<V>::template boxes_together<held, count>(), kColumns = count / kBoxes;
  const OwnLines<V> own(pass, c.warp);
  const uint32_t first = c.worker(job) % V::kSplit * S::kChunks;
  const bool has_boxes = own.box(0) < own.boxes;
  using XScales = XLineScales<V>;
  using WeightScales = WeightLineScales<V, held>;
  const XScales x_scales(job, c.lane);
  const WeightScales weight_scales(job, pass, own, c.warp % kWarpgroupWarps, c.lane);
  float next_x[kColumns][XScales::kOfLane] = {}, next_weights[count][WeightScales::kOfLane] = {};
  WarpgroupSums<V::kXRows> products[count] = {};
  const auto load = [&](int h, uint32_t chunk, int j) {
    if (!has_boxes || chunk >= S::kChunks) return;
    if (j % kBoxes == 0) x_scales.load(next_x[j / kBoxes], first + chunk);
    weight_scales.load(next_weights[j], h, first + chunk);
  };
  own.template each<held, count>(
      c, products, stages, load, [&](const OwnLine(&lines)[count], const uint8_t* x, auto load_next) {
#pragma unroll
        for (int j = 0; j < count; j++) {
          ptx::hold_sums(products[j]);
          ptx::begin_products();
          multiply_byte_blocks<V::kXRows>(products[j], c.ring.slot(lines[j].entry), x + lines[j].i * S::kBlockPitch);
          ptx::commit_products();
        }
        float of_x[kColumns][V::kXRows / 4], of_weights[count][WeightScales::kOfLane];
#pragma unroll
        for (int i = 0; i < kColumns; i++) x_scales.share(of_x[i], next_x[i]);
#pragma unroll
        for (int j = 0; j < count; j++)
#pragma unroll
          for (int i = 0; i < WeightScales::kOfLane; i++) of_weights[j][i] = next_weights[j][i];
        load_next();
#pragma unroll
        for (int j = 0; j < count; j++) {
          await_line<count>(j);
          ptx::hold_sums(products[j]);
          c.ring.release_share(lines[j].entry);
          add_line<V>(sums[lines[j].h], products[j], of_x[j / kBoxes], of_weights[j]);
        }
      });
}

// A loop for each number of boxes that a warpgroup may have, up to `held`.
template <class V, int held, class C>
MPK_DEVICE void multiply_held(C& c, const Job& job, Span pass, HeldSums<V>& sums, const uint8_t* stages) {
  static_assert(held <= 3);
  const OwnLines<V> own(pass, c.warp);
  if constexpr (held > 1)
    if (own.box(held - 1) >= own.boxes) return multiply_held<V, held - 1>(c, job, pass, sums, stages);
  // Lines of both warpgroups are in slots that follow each other, and the loader may wait for room for several.
  constexpr int kTogether = OwnLines<V>::template count_together<held>();
  constexpr bool kHasRoom = C::Config::kSlots >= kTogether * kWarpgroups - 1 + kLeastFilled<C::Config::kSlotBytes>;
  multiply_e4m3<V, held, kHasRoom ? kTogether : 1>(c, job, pass, sums, stages);
}

template <class V, class C>
MPK_DEVICE void compute_e4m3_warpgroups(C& c, const Job& job) {
  static_assert(E4M3WarpgroupsVariant<V, C>);
  static_assert(V::kElementBytes == 1 && V::kChunkSize == kBoxRowBytes);
  compute_by_warpgroups<V, true>(
      c, job, [](Span) {}, [&](uint8_t* stages) { return load_boxes<V>(c, job, stages); },
      [&](Span pass, HeldSums<V>& sums, const uint8_t* stages) {
        multiply_held<V, RowsShape<V>::kHeld>(c, job, pass, sums, stages);
      });
}

}  // namespace mpk::linear
