// Sums of a tile's values times their positions' weights, for all heads of a split.
#pragma once

#include "torch_mpk/device/tasks/attention_shape.cuh"

namespace mpk::attention {

// N floats, moved in accesses of 16 bytes, or in one if they are less.
template <int N>
struct alignas(N < 4 ? 4 * N : 16) Floats {
  float v[N];
};

// By fused multiply-adds: a lane has the same elements of all heads.
template <class V>
struct LaneSums {
  using S = Shape<V>;
  using T = typename S::T;
  using Values = const T*;
  float out[S::kHeads][S::kSteps][S::kWidth] = {};

  static constexpr bool kReadsFirst = false;
  static MPK_DEVICE Values read(const T* values, uint32_t) { return values; }

  // `weights`: [position][kPad], and behind them the factors of earlier sums.
  MPK_DEVICE void add(Values values, const float* weights, uint32_t lane) {
    const auto keep = reinterpret_cast<const Floats<S::kPad>*>(weights)[S::kTile];
#pragma unroll
    for (int h = 0; h < S::kHeads; h++)
#pragma unroll
      for (int s = 0; s < S::kSteps; s++)
#pragma unroll
        for (int e = 0; e < S::kWidth; e++) out[h][s][e] *= keep.v[h];
    using Elements = Vec<T, S::kWidth>;
    const Elements* v = reinterpret_cast<const Elements*>(values);
#pragma unroll 1
    for (int first = 0; first < S::kTile; first += S::kRows) {
      const auto w = reinterpret_cast<const Floats<S::kRows * S::kPad>*>(weights)[first / S::kRows];
#pragma unroll
      for (int p = 0; p < S::kRows; p++)
#pragma unroll
        for (int s = 0; s < S::kSteps; s++) {
          float x[S::kWidth];
          to_floats(v[(first + p) * (S::kValueSize / S::kWidth) + (S::holds(s, lane) ? lane + 32 * s : 0)], x);
#pragma unroll
          for (int h = 0; h < S::kHeads; h++)
#pragma unroll
            for (int e = 0; e < S::kWidth; e++) out[h][s][e] = fmaf(w.v[p * S::kPad + h], x[e], out[h][s][e]);
        }
    }
  }

  // `to(h)`: the place of head h's sums, or null.
  template <class To>
  MPK_DEVICE void store(To to, uint32_t lane) {
#pragma unroll
    for (int h = 0; h < S::kHeads; h++) {
      auto* elements = reinterpret_cast<Floats<S::kWidth>*>(to(h));
      if (elements == nullptr) continue;
#pragma unroll
      for (int s = 0; s < S::kSteps; s++)
        if (S::holds(s, lane))
#pragma unroll
          for (int e = 0; e < S::kWidth; e++) elements[lane + 32 * s].v[e] = out[h][s][e];
    }
  }
};

// By tensor cores, 16 positions at a time: O^T = V^T W^T, elements by heads. Lanes 4 g to 4 g + 3 read the g-th eighth
// of the elements, each of four positions, in units of 16 bytes, or of 8 if an eighth is no more. Of two neighbouring
// elements, one is in row g of a product's first factor, and one in row g + 8.
//
// All positions begin in the same bank, so lanes at odd places read the units of each pair in reverse order. A product
// then has one unit's elements at even lanes' positions, and the other's at odd ones'. If there are enough columns, a
// head has two: one with the weights of even lanes' positions, one with those of odd ones'. That keeps both units' sums
// apart. (An infinite value makes NaN of its element in the other unit, too: zero times infinity.)
template <class V>
struct TensorCoreSums {
  using S = Shape<V>;
  using T = typename S::T;
  static constexpr int kColumns = S::kHeads <= 4 ? 4 : 8;
  static constexpr bool kTwoColumns = kColumns == 4;
  static constexpr int kEighth = (S::kValueChunks + 7) / 8;  // chunks
  static constexpr int kWords = kEighth == 1 ? 2 : 4;        // of a unit
  static constexpr int kUnits = kEighth == 1 ? 2 : (kEighth + 1) / 2 * 2;
  static constexpr int kPositions = 4;  // of a lane
  using Unit = Vec<uint32_t, kWords>;
  struct Values {
    Unit units[S::kTile / kWarpRows][kPositions][kUnits];
  };
  float out[kUnits][kWords][4] = {};  // as SumFragment

  // A tile's values fit the registers, so that their entry is free before weights are known.
  static constexpr bool kReadsFirst = S::kTogether;

  // The unit in a lane's place `i`; the units before the lane's; whether the place has one, since an eighth may be no
  // whole number of units.
  static MPK_DEVICE uint32_t unit(int i, bool is_odd) { return kTwoColumns && is_odd ? i ^ 1 : i; }
  static MPK_DEVICE uint32_t units_before(uint32_t lane) { return lane / 4 * (kEighth == 1 ? 2 : kEighth); }
  static MPK_DEVICE bool has(uint32_t unit, uint32_t lane) {
    return (kEighth == 1 || unit < kEighth) && (units_before(lane) + unit) * sizeof(Unit) < S::kValueBytes;
  }
  static MPK_DEVICE uint32_t position(int i, uint32_t lane) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

  static MPK_DEVICE Values read(const T* values, uint32_t lane) {
    Values read;
    const Unit* from = reinterpret_cast<const Unit*>(values) + units_before(lane);
#pragma unroll
    for (int k = 0; k < S::kTile / kWarpRows; k++)
#pragma unroll
      for (int p = 0; p < kPositions; p++)
#pragma unroll
        for (int i = 0; i < kUnits; i++) {
          const uint32_t u = unit(i, lane % 2 != 0);
          const uint32_t row = k * kWarpRows + position(p, lane);
          read.units[k][p][i] = has(u, lane) ? from[row * (S::kValueBytes / sizeof(Unit)) + u] : Unit{};
        }
    return read;
  }

  MPK_DEVICE void add(const Values& values, const float* weights, uint32_t lane) {
    // The lane's sums are of columns 2 t and 2 t + 1, its weights of column g.
    const auto keep =
        *reinterpret_cast<const Floats<2>*>(weights + S::kTile * S::kPad + lane % 4 * 2 % kColumns % S::kPad);
    const uint32_t head = lane / 4 % kColumns;
    const bool counts = head < S::kHeads && (!kTwoColumns || lane / 16 == lane % 2);
#pragma unroll
    for (int i = 0; i < kUnits; i++)
#pragma unroll
      for (int j = 0; j < kWords; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) out[i][j][e] *= keep.v[e % 2];
#pragma unroll
    for (int k = 0; k < S::kTile / kWarpRows; k++) {
      float w[kPositions];
#pragma unroll
      for (int p = 0; p < kPositions; p++)
        w[p] = counts ? weights[(k * kWarpRows + position(p, lane)) * S::kPad + head] : 0.0f;
      const ptx::Pair factor{round_pair<T>(w[0], w[1]), round_pair<T>(w[2], w[3])};
#pragma unroll
      for (int i = 0; i < kUnits; i++)
#pragma unroll
        for (int j = 0; j < kWords; j++) {
          const auto of = [&](int p) { return values.units[k][p][i].v[j]; };
          ptx::mma<T>(out[i][j],
                      {ptx::low_halves(of(0), of(1)), ptx::high_halves(of(0), of(1)), ptx::low_halves(of(2), of(3)),
                       ptx::high_halves(of(2), of(3))},
                      factor);
        }
    }
  }

  // See LaneSums.
  template <class To>
  MPK_DEVICE void store(To to, uint32_t lane) {
    constexpr int kElements = 2 * kWords;
#pragma unroll
    for (int i = 0; i < kUnits; i += kTwoColumns ? 2 : 1) {
      if constexpr (kTwoColumns)  // the other column's sums of the unit are in the next place
#pragma unroll
        for (int j = 0; j < kWords; j++)
#pragma unroll
          for (int e = 0; e < 4; e++) out[i][j][e] += __shfl_xor_sync(~0u, out[i + 1][j][e], 2);
      const uint32_t u = unit(i, lane / 2 % 2 != 0);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float* elements = to(lane % 4 * 2 % kColumns + c);
        if (elements == nullptr || !has(u, lane)) continue;
        Floats<kElements> sums;
#pragma unroll
        for (int e = 0; e < kElements; e++) sums.v[e] = out[i][e / 2][e % 2 * 2 + c];
        reinterpret_cast<Floats<kElements>*>(elements)[units_before(lane) + u] = sums;
      }
    }
  }
};

}  // namespace mpk::attention
