// The same with the sum over a row's choices, see csrc/kernels/experts/summed.cpp. A tile is 16 weight rows of every
// expert, and a worker has few tiles. Each warp multiplies the tile's rows of one expert after another, and leaves the
// products in shared memory, where all threads sum them.
#pragma once

#include "torch_mpk/device/points.cuh"
#include "torch_mpk/device/tasks/expert_boxes.cuh"

namespace mpk::experts {

template <class V, class L>
MPK_DEVICE Span sum_tiles_of(const L& l, const Job& job) {
  return static_span(kTilesOfExpert<V>, l.worker(job), L::Config::kNumWorkers);
}

template <class V, class L>
MPK_DEVICE void load_summed(L& l, const Job& job) {
  const Chosen<V> chosen(V::ids(job), l.lane);
  const Span mine = sum_tiles_of<V>(l, job);
  const Turns<V> turns{chosen.count};
  const uint32_t of_tile = chosen.count * kBoxesOfTile<V>, count = (mine.end - mine.begin) * of_tile;
  if (count == 0) return;
  const void* map = V::map(job);
  l.fill_by(count, count * kBoxBytes, [&] {
    return fill_entries(l.ring, count, entries_in_flight(kBoxBytes), l.phase, [&](uint32_t number) {
      const uint32_t all = min(number, count - 1), tile = mine.begin + all / of_tile, at = all % of_tile;
      const uint32_t pass = at / turns.kOfPass, turn = at % turns.kOfPass, size = turns.tiles_of(pass);
      const uint32_t expert = chosen[pass * turns.kWarps + turn % size];
      return Box{map, tile, first_row<V>(expert) + tile * kTileRows, turn / size * kBlocksOfBox, kBoxBytes};
    });
  });
}

// Multiplies a tile's rows of all chosen experts. False when the launch was aborted.
template <class V, class C>
MPK_DEVICE bool multiply_chosen(C& c, const Job& job, const Chosen<V>& chosen, Pairs<V>& pairs, uint32_t tile,
                                uint32_t entry) {
  const Turns<V> turns{chosen.count};
#pragma unroll 1
  for (uint32_t number = c.warp; number < chosen.count; number += kConsumerWarps) {
    pairs.find(job, chosen[number], c.lane);
    const uint32_t stride = turns.tiles_of(number / turns.kWarps);
    if (!multiply_boxes<V>(c, job, pairs, tile * kTileRows, entry + turns.entry_of(number, 0), stride)) return false;
  }
  return true;
}

// V: as for compute_boxes. Results: as for run_reduced_points, with value(job, outer, inner, product).
template <class V, class C>
MPK_DEVICE void compute_summed(C& c, const Job& job) {
  using T = typename V::T;
  if (!c.await()) return;
  T* products = reinterpret_cast<T*>(c.staged() + kConsumerWarps * kListBytes<V>);
  for (int i = c.rank; i < V::kPairs * kTileRows; i += kConsumerThreads)
    if (expert_of<V>(V::ids(job), i / kTileRows) < 0) products[i] = cast<T>(0.0f);
  const Chosen<V> chosen(V::ids(job), c.lane);
  const Span mine = sum_tiles_of<V>(c, job);
  Pairs<V> pairs{reinterpret_cast<uint32_t*>(c.staged() + c.warp * kListBytes<V>), products};
#pragma unroll 1
  for (uint32_t tile = mine.begin; tile < mine.end; tile++) {
    c.failed = !multiply_chosen<V>(c, job, chosen, pairs, tile, c.entry);
    c.entry += chosen.count * kBoxesOfTile<V>;
    if (!c.sync()) return;
    for (int i = c.rank; i < V::kPairs / V::kChoices * kTileRows; i += kConsumerThreads) {
      const int row = i / kTileRows, column = i % kTileRows, outer = row * V::kRows + int(tile) * kTileRows + column;
      const T* of_row = products + row * V::kChoices * kTileRows + column;
      V::finish(job, outer, reduce_short_row<V>([&](int k) { return V::value(job, outer, k, of_row[k * kTileRows]); }));
    }
    if (!c.sync()) return;
  }
}

}  // namespace mpk::experts
