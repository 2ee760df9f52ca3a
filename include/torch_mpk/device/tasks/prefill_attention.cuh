// prefill_attention: many positions of each sequence attend to the keys and values that they share, softmax in fp32.
//
// The algorithm is FlashAttention-2. The heads of a group, at all positions of a sequence, are rows of queries. A
// worker takes V::kRows rows at a time, and each of its warps takes 16 of them from the first key to the last. Queries,
// running maxima and sums, and results stay in registers. The loader copies tiles of keys and values as boxes, both of
// a tile in one ring entry, and every consumer warp reads every entry. Sums follow the order of positions, so a row's
// bits depend on its query and on what it sees alone. With heads of 128 a warpgroup's four warps multiply together.
//
// Where a worker has fewer rows than its warps multiply, warps share the keys: of N warps with the same rows, each
// takes every Nth tile, and the first merges their results.
//
// The number of tiles follows from what the rows of a block see. The loader and each warp find it by themselves. Later
// positions of a causal prompt see more, so blocks are dealt out from the last to the first.
#pragma once

#include "torch_mpk/abi/partition.h"
#include "torch_mpk/device/consumer.cuh"
#include "torch_mpk/device/tasks/prefill_warpgroups.cuh"

namespace mpk::prefill_attention {

// A block of query rows of a sequence and a group.
template <class V>
struct Unit {
  using T = typename V::T;
  static constexpr int kGroupRows = V::kPositions * V::kHeads;  // of a sequence and a group
  static constexpr int kBlocks = (kGroupRows + V::kRows - 1) / V::kRows;
  static constexpr uint32_t kUnits = uint32_t(kBlocks) * V::kBatch * V::kGroups;

  uint32_t batch, group, first;  // row

  // In falling order of the positions that a causal prompt's rows see.
  MPK_DEVICE explicit Unit(uint32_t number) {
    constexpr uint32_t kOfBlock = V::kBatch * V::kGroups;
    const uint32_t block = number / kOfBlock, rest = number - block * kOfBlock;
    first = (kBlocks - 1 - block) * V::kRows;
    batch = rest / V::kGroups;
    group = rest - batch * V::kGroups;
  }

  MPK_DEVICE uint32_t num_rows() const { return kGroupRows; }
  // Warps with rows of their own. The other warps share the keys of these rows.
  MPK_DEVICE uint32_t warps_of_rows() const { return V::kRows / kWarpRows; }
  MPK_DEVICE const T* q(const Job& job, uint32_t s, uint32_t h) const { return V::q(job, batch, s, h); }
  MPK_DEVICE T* y(const Job& job, uint32_t s, uint32_t h) const { return V::y(job, batch, s, h); }
  MPK_DEVICE uint32_t limit(const Job& job, uint32_t s) const { return visible<V>(job, batch, s); }
};

// The positions that a unit's rows see. All lanes of a warp call it, and get the same result.
template <class V>
MPK_DEVICE uint32_t end_of(const Job& job, const Unit<V>& unit, uint32_t lane) {
  using U = Unit<V>;
  uint32_t most = 0;
  if constexpr (V::kHasLimit) {
    constexpr int kEach = ((V::kRows + V::kHeads - 2) / V::kHeads + 32) / 32;  // of its positions
    const uint32_t last = min(unit.first + V::kRows, uint32_t(U::kGroupRows)) - 1;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const uint32_t position = unit.first / V::kHeads + 32 * i + lane;
      if (position <= last / V::kHeads) most = max(most, visible<V>(job, unit.batch, position));
    }
#pragma unroll
    for (int o = 16; o > 0; o /= 2) most = max(most, __shfl_xor_sync(~0u, most, o));
  } else {
    most = V::kLength;
  }
  return most;
}

// Tiles up to a position.
template <class V>
MPK_DEVICE uint32_t tiles_to(uint32_t end) {
  return (end + V::kKeys - 1) / V::kKeys;
}

// ---- the loader's part

// An entry: keys, then values.
template <class V>
struct Entry {
  using S = Shape<V>;
  Keys k, v;
  uint32_t tile;

  MPK_DEVICE void start(uint8_t* to, uint64_t* full) const {
    const int row = tile * V::kKeys;
    ptx::mbar_arrive_expect(full, S::kEntryBytes);
    S::KeyTile::start(to, k, row, full);
    S::ValueTile::start(to + S::KeyTile::kBytes, v, row, full);
  }
};

template <class V, class L>
MPK_DEVICE void load(L& l, const Job& job) {
  static_assert(Variant<V>);
  const uint32_t worker = l.worker(job);
#pragma unroll 1
  for (uint32_t turn = 0; turn * L::Config::kNumWorkers < Unit<V>::kUnits; turn++) {
    const uint32_t number = dealt(turn, worker, L::Config::kNumWorkers);
    if (number >= Unit<V>::kUnits) continue;
    const Unit<V> unit(number);
    const uint32_t tiles = tiles_to<V>(end_of(job, unit, l.lane)), end = l.ring.entry + tiles;
    const Keys k = V::k(job, unit.batch, unit.group), v = V::v(job, unit.batch, unit.group);
    l.ring.entry =
        fill_entries(l.ring, tiles, L::Config::kSlots, l.phase, [&](uint32_t tile) { return Entry<V>{k, v, tile}; });
    if constexpr (kProfiled<typename L::Config>) l.stamps.bytes += tiles * Shape<V>::kEntryBytes;
    l.failed = l.ring.entry != end;
    if (l.failed) return;
  }
}

// Sets the last tile's values from number `count` on to zero: anything may stand there, and a weight of 0 would make
// NaN of it. All warps call it; false when the launch was aborted.
template <class V, class C>
MPK_DEVICE bool clear_values(C& c, uint8_t* entry, uint32_t count) {
  using ValueTile = typename Shape<V>::ValueTile;
  constexpr uint32_t kRowWords = kBoxRowBytes / sizeof(uint4), kWords = V::kKeys * kRowWords;  // of a box
  uint4* words = reinterpret_cast<uint4*>(entry + Shape<V>::KeyTile::kBytes);
#pragma unroll 1
  for (uint32_t i = count * kRowWords + c.rank; i < kWords; i += kConsumerThreads)
#pragma unroll
    for (int box = 0; box < ValueTile::kBytes / ValueTile::kColumnBytes; box++) words[box * kWords + i] = {};
  ptx::fence_proxy_async_shared();
  return c.sync();
}

// A unit's tiles from number `begin` on, up to position `end`, in the loader's order. A warp whose wait aborts goes on
// with whatever stands in the ring, since the other warps of its warpgroup cannot multiply without it. False when all
// know that the launch was aborted.
template <class V, class U, class C>
MPK_DEVICE bool attend(C& c, const Job& job, const U& unit, uint32_t begin, uint32_t end) {
  using S = Shape<V>;
  static_assert(S::kEntryBytes <= C::Config::kSlotBytes && C::Config::kEmptyArrivals == kConsumerWarps);
  const uint32_t blocks = unit.warps_of_rows(), parts = kConsumerWarps / blocks;  // parts: of the keys
  using RowsOfWarp = typename Choose<S::kByWarpgroups, RowsTogether<V, U>, Rows<V, U>>::Type;
  RowsOfWarp rows(job, unit, c.warp % blocks, c.lane, c.staged() + c.warp * S::kWarpBytes);
  // Whether an entry is kept while the next is attended, as warpgroups do that share no keys.
  const uint32_t keeps = S::kByWarpgroups && parts == 1;
  static_assert(C::Config::kSlots > 1);
  const uint32_t tiles = tiles_to<V>(end);
#pragma unroll 1
  for (uint32_t tile = begin; tile < tiles; tile++) {
    if (!c.failed && !c.ring.wait(c.entry, c.phase)) c.failed = true;
    uint8_t* entry = c.ring.slot(c.entry++);
    if constexpr (S::kByWarpgroups)
      if ((tile + 1) * V::kKeys > end && !clear_values<V>(c, entry, end % V::kKeys)) return false;
    if (parts == 1 || (tile - begin) % parts == c.warp / blocks) rows.attend(entry, tile);
    if (!keeps) rows.finish();
    if (tile >= begin + keeps) c.ring.release_share(c.entry - 1 - keeps);
  }
  rows.finish();
  if (keeps && begin < tiles) c.ring.release_share(c.entry - 1);
  if (parts > 1 && !rows.merge(c, blocks)) return false;
  if (c.warp < blocks && !c.failed) rows.store();
  return true;
}

template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  static_assert(Variant<V>);
  if (!c.await()) return;
  const uint32_t worker = c.worker(job);
#pragma unroll 1
  for (uint32_t turn = 0; turn * C::Config::kNumWorkers < Unit<V>::kUnits; turn++) {
    const uint32_t number = dealt(turn, worker, C::Config::kNumWorkers);
    if (number >= Unit<V>::kUnits) continue;
    const Unit<V> unit(number);
    if (!attend<V>(c, job, unit, 0, end_of(job, unit, c.lane))) return;
  }
}

}  // namespace mpk::prefill_attention
