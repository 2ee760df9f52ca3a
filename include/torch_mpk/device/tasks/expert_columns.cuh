// Products with weights that are stored as [E, K, N]. A tile is 64 columns of one expert's weights, which are the
// results of a pair: 128 bytes of each row. A box has 64 rows of them. Tensor cores take 16 rows at a time, transposed
// on the way to registers. In all else this is as with weights that are stored as [E, N, K].
#pragma once

#include "torch_mpk/device/tasks/expert_boxes.cuh"

namespace mpk::experts {

inline constexpr int kDepth = 16;                        // rows of weights that are multiplied at a time
inline constexpr int kBlocks = kBoxColumns / kTileRows;  // of 16 columns, of a tile

// A lane's fragment of kDepth rows of a box, from `depth` on, and 16 columns: the first factor of products. The copy
// engine swizzles accesses of 16 bytes by the row.
MPK_DEVICE ptx::Quad read_columns(const uint8_t* slot, int depth, int block, int lane) {
  const int row = lane % 8, access = (2 * block + lane / 8 % 2) ^ row;  // that this lane points at
  return ptx::load_matrices_transposed(
      ptx::smem_addr(slot + (depth + lane / 16 * 8 + row) * kBoxRowBytes + access * 16));
}

// The same rows of weights where they are. A lane has 16 bytes of a row in each half of the tile's columns, so columns
// come in another order than those of a box: see result_of.
template <class V>
struct WeightColumns {
  using T = typename V::T;
  const T* halves[2];

  struct Rows {
    uint4 data[2][2];  // of a half, rows `lane / 4` and the eighth behind

    MPK_DEVICE ptx::Quad block(int b) const {
      const uint4 &first = data[b / 2][0], &second = data[b / 2][1];
      return b % 2 == 0 ? transposed(first.x, first.y, second.x, second.y)
                        : transposed(first.z, first.w, second.z, second.w);
    }
    MPK_DEVICE static ptx::Quad transposed(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
      return {ptx::transpose(a), ptx::transpose(b), ptx::transpose(c), ptx::transpose(d)};
    }
  };

  MPK_DEVICE WeightColumns(const Job& job, int expert, uint32_t first, int lane) {
    const T* weight = V::weight(job) + expert * V::kExpertPitch + lane / 4 * V::kDepthPitch;
#pragma unroll
    for (int half = 0; half < 2; half++)
      halves[half] = weight + min(first + half * 32 + lane % 4 * 8, uint32_t(V::kRows - 8));
  }
  MPK_DEVICE Rows operator[](int step) const {
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        rows.data[half][i] = ptx::load_once(
            reinterpret_cast<const uint4*>(halves[half] + (int64_t(step) * kDepth + i * 8) * V::kDepthPitch));
    return rows;
  }
};

// Which lanes have two neighbouring results of a pair: both have the same block and half, and the second one has the
// row behind the first one's, which is even.
struct Neighbours {
  int block, row;
  bool is_lower;
};

// Where the columns of blocks are in a tile: that of a block's upper rows, and how far behind is that of the lower
// rows; and the other way round, where results 2 i and 2 i + 1 are.
struct InBox {
  static constexpr int kLower = 8;
  MPK_DEVICE static int result_of(int block, int of_eight) { return block * 16 + of_eight; }
  MPK_DEVICE static Neighbours neighbours(int i) { return {i / 8, i % 4 * 2, i / 4 % 2 == 1}; }
};
struct InPlace {
  static constexpr int kLower = 2;
  MPK_DEVICE static int result_of(int block, int of_eight) {
    return block / 2 * 32 + of_eight / 2 * 8 + block % 2 * 4 + of_eight % 2;
  }
  MPK_DEVICE static Neighbours neighbours(int i) { return {i / 16 * 2 + i / 2 % 2, i / 4 % 4 * 2, i % 2 == 1}; }
};

// Leaves two products of a pair, which are this lane's of a tile, to those who sum them: see expert_column_sums.cuh.
template <class V>
MPK_DEVICE void leave(const Job& job, int pair, uint32_t first, uint32_t both, uint32_t tag, int lane);

// As TileSums.
template <class V>
struct ColumnSums {
  using T = typename V::T;
  const T* x;
  int rows[kGroups<V>], num_groups;
  SumFragment sums[kGroups<V>][kBlocks] = {};

  MPK_DEVICE ColumnSums(const Job& job, const Pairs<V>& pairs, int lane)
      : x(V::x(job) + lane % 4 * 2), num_groups(pairs.num_groups()) {
#pragma unroll
    for (int g = 0; g < kGroups<V>; g++) rows[g] = pairs.row_of_x(g, lane);
  }
  // weights(b): the fragment of block b.
  template <class Weights>
  MPK_DEVICE void add(Weights weights, int step) {
    ptx::Pair of_x[kGroups<V>];
#pragma unroll
    for (int g = 0; g < kGroups<V>; g++) {
      const T* at = x + rows[g] + step * kDepth;
      of_x[g] = {*reinterpret_cast<const uint32_t*>(at), *reinterpret_cast<const uint32_t*>(at + 8)};
    }
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
      const ptx::Quad block = weights(b);
#pragma unroll
      for (int g = 0; g < kGroups<V>; g++)
        if (g == 0 || g < num_groups) ptx::mma<T>(sums[g][b], block, of_x[g]);
    }
  }
  template <class Place>
  MPK_DEVICE void store(const Job& job, const Pairs<V>& pairs, uint32_t first, int lane, Place place) const {
    if constexpr (Interleaved<V>) {
      hand_out(pairs, lane, place, [&](int pair, uint32_t both) {
        V::combine(job, pair * V::kColumns + int(first) / 2 + lane, from_word<T>(both), from_word<T>(both >> 16));
      });
    } else if constexpr (SummedColumns<V>) {
      hand_out(pairs, lane, place, [&](int pair, uint32_t both) { leave<V>(job, pair, first, both, pairs.tag, lane); });
    } else {
      store_each(job, pairs, first, lane, place);
    }
  }

 private:
  // Hands results out to all lanes, since eight of them have those of a pair: calls f(pair, both) for each listed pair,
  // where `both` are its results 2 `lane` and the next, side by side.
  template <class Place, class F>
  MPK_DEVICE void hand_out(const Pairs<V>& pairs, int lane, Place, F f) const {
    const Neighbours mine = Place::neighbours(lane);
#pragma unroll
    for (int g = 0; g < kGroups<V>; g++)
#pragma unroll
      for (int column = 0; column < 2; column++) {
        uint32_t words[kBlocks];  // upper and lower row of each block
#pragma unroll
        for (int b = 0; b < kBlocks; b++) words[b] = round_pair<T>(sums[g][b][column], sums[g][b][2 + column]);
#pragma unroll 1
        for (int of_lanes = 0; of_lanes < 4; of_lanes++) {
          const int index = g * kPairsOfGroup + of_lanes * 2 + column;
          if (index >= pairs.count) break;
          uint32_t first = 0, second = 0;
#pragma unroll
          for (int b = 0; b < kBlocks; b++) {
            const uint32_t even = __shfl_sync(~0u, words[b], mine.row * 4 + of_lanes);
            const uint32_t odd = __shfl_sync(~0u, words[b], mine.row * 4 + 4 + of_lanes);
            if (b == mine.block) first = even, second = odd;
          }
          f(pairs.list[index], mine.is_lower ? ptx::high_halves(first, second) : ptx::low_halves(first, second));
        }
      }
  }
  template <class Place>
  MPK_DEVICE void store_each(const Job& job, const Pairs<V>& pairs, uint32_t first, int lane, Place) const {
#pragma unroll
    for (int g = 0; g < kGroups<V>; g++)
#pragma unroll
      for (int column = 0; column < 2; column++) {
        const int index = g * kPairsOfGroup + lane % 4 * 2 + column;
        if (index >= pairs.count) continue;
#pragma unroll
        for (int b = 0; b < kBlocks; b++)
#pragma unroll
          for (int lower = 0; lower < 2; lower++)
            pairs.store_result(job, pairs.list[index], first + Place::result_of(b, lane / 4) + lower * Place::kLower,
                               cast<T>(sums[g][b][2 * lower + column]));
      }
  }
};

template <int ahead, Transposed V>
MPK_DEVICE void multiply_listed(const Job& job, const Pairs<V>& pairs, uint32_t first, int lane) {
  constexpr int kSteps = V::kSize / kDepth;
  const WeightColumns<V> weights(job, pairs.expert, first, lane);
  ColumnSums<V> sums(job, pairs, lane);
  typename WeightColumns<V>::Rows next[ahead];
#pragma unroll
  for (int u = 0; u < ahead; u++) next[u] = weights[min(u, kSteps - 1)];
#pragma unroll 1
  for (int begin = 0; begin < kSteps; begin += ahead)
#pragma unroll
    for (int u = 0; u < ahead; u++) {
      const int step = begin + u;
      const auto now = next[u];
      if (step + ahead < kSteps) next[u] = weights[step + ahead];
      if (step < kSteps) sums.add([&](int b) { return now.block(b); }, step);
    }
  sums.store(job, pairs, first, lane, InPlace{});
}

template <Transposed V, class C>
MPK_DEVICE bool multiply_boxes(C& c, const Job& job, Pairs<V>& pairs, uint32_t first, uint32_t entry, uint32_t stride) {
  constexpr int kBoxSteps = kBoxDepth / kDepth;
  ColumnSums<V> sums(job, pairs, c.lane);
#pragma unroll 1
  for (uint32_t box = 0; box < kBoxesOfTile<V>; box++, entry += stride) {
    if (!c.ring.wait(entry, c.phase)) return false;
    const uint8_t* slot = c.ring.slot(entry);
#pragma unroll
    for (int s = 0; s < kBoxSteps; s++) {
      const int step = box * kBoxSteps + s;
      if (V::kSize % kBoxDepth != 0 && step >= V::kSize / kDepth) continue;
      sums.add([&](int b) { return read_columns(slot, s * kDepth, b, c.lane); }, step);
    }
    c.ring.release(entry);
  }
  sums.store(job, pairs, first, c.lane, InBox{});
#pragma unroll 1
  while (pairs.find_next(job, c.lane)) multiply_listed<1>(job, pairs, first, c.lane);
  return true;
}

}  // namespace mpk::experts
