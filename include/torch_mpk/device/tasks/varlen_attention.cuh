// varlen_attention: ragged sequences attend to themselves and to cached keys and values, softmax in fp32.
//
// It computes prefill_attention's tiles for sequences whose lengths are read in the launch. A block of query rows
// belongs to one sequence, so lengths decide how many blocks there are; at most as many as if each sequence ended a
// block. Tokens behind the last sequence are rows that see nothing. Keys and values are the rows of a cache that a list
// names, then the new tokens' own. The loader copies them row by row, each lane some rows of a tile.
#pragma once

#include "torch_mpk/device/row.cuh"
#include "torch_mpk/device/tasks/prefill_attention.cuh"

namespace mpk::varlen_attention {

namespace prefill = prefill_attention;

// What a variant declares of one job.
template <class V>
concept Sizes = prefill::Tiles<V> && prefill::Windowed<V> && prefill::ByRow<V> && requires {
  // kBlocks: the most blocks of query rows. kEnds: the bounds of sequences, one more than there are sequences.
  requires Constants<int, V::kTokens, V::kBlocks, V::kEnds>;
};

// Operands, for token t, head h, group g and a row of the cache.
template <class V>
concept Places = requires(const Job& job, uint32_t t, uint32_t h, uint32_t g, uint32_t i, int64_t row) {
  { V::q(job, t, h) } -> Same<const typename V::T*>;
  { V::y(job, t, h) } -> Same<typename V::T*>;
  { V::k_new(job, t, g) } -> Same<const typename V::T*>;
  { V::v_new(job, t, g) } -> Same<const typename V::T*>;
  { V::k_cache(job, row, g) } -> Same<const typename V::T*>;
  { V::v_cache(job, row, g) } -> Same<const typename V::T*>;
  { V::num_read(job) } -> Same<int32_t>;  // rows in the list
  { V::row(job, i) } -> Same<int64_t>;
  { V::end_q(job, i) } -> Same<int32_t>;
  { V::end_k(job, i) } -> Same<int32_t>;
};

template <class V>
concept Variant = Sizes<V> && Places<V>;

template <class V>
struct Shape : prefill::Shape<V> {
  static constexpr uint32_t kUnits = V::kBlocks * V::kGroups;
};

MPK_DEVICE uint32_t clamped(int64_t value, uint32_t least, uint32_t most) {
  return value < least ? least : value > most ? most : static_cast<uint32_t>(value);
}

// A block of query rows of a sequence and a group.
template <class V>
struct Unit {
  using T = typename V::T;

  uint32_t group, first;   // row
  uint32_t token, tokens;  // the sequence's first token, and its tokens; 0: there is no such unit
  uint32_t list, cached;   // its first place in the list, and its rows there
  bool is_padding;

  // All lanes of a warp call it with the same number, and get the same result.
  MPK_DEVICE Unit(const Job& job, uint32_t number, uint32_t lane) {
    const uint32_t block = number / V::kGroups;
    group = number - block * V::kGroups;
    tokens = 0;
    uint32_t before = 0;  // blocks of the sequences in front
#pragma unroll 1
    for (uint32_t begin = 0; begin < V::kEnds; begin += 32) {
      const uint32_t i = begin + lane;  // the last bound ends the padding
      const bool exists = i < V::kEnds;
      const uint32_t from = exists ? clamped(V::end_q(job, i), 0, V::kTokens) : 0;
      const uint32_t to = i + 1 < V::kEnds ? clamped(V::end_q(job, i + 1), from, V::kTokens) : V::kTokens;
      const uint32_t blocks = exists ? ((to - from) * V::kHeads + V::kRows - 1) / V::kRows : 0;
      const uint32_t end = warp_sum_so_far(blocks, lane);
      const uint32_t found = __ballot_sync(~0u, block < before + end);
      if (found == 0) {
        before += __shfl_sync(~0u, end, 31);
        continue;
      }
      const int owner = __ffs(found) - 1;
      const uint32_t sequence = begin + owner;
      token = __shfl_sync(~0u, from, owner);
      tokens = __shfl_sync(~0u, to, owner) - token;
      // In falling order of the positions that rows see.
      first = (before + __shfl_sync(~0u, end, owner) - 1 - block) * V::kRows;
      is_padding = sequence + 1 == V::kEnds;
      list = cached = 0;
      if (!is_padding) {
        const uint32_t num_read = V::num_read(job);
        list = clamped(V::end_k(job, sequence), 0, num_read);
        const int64_t keys = int64_t(V::end_k(job, sequence + 1)) - list;
        cached = clamped(keys - tokens, 0, num_read - list);
      }
      return;
    }
  }

  MPK_DEVICE bool exists() const { return tokens > 0; }
  MPK_DEVICE uint32_t num_rows() const { return tokens * V::kHeads; }
  // A power of two, so that all have equally many.
  MPK_DEVICE uint32_t warps_of_rows() const {
    const uint32_t blocks = (min(num_rows() - first, uint32_t(V::kRows)) + kWarpRows - 1) / kWarpRows;
    return 1u << (32 - __clz(blocks - 1));
  }
  MPK_DEVICE const T* q(const Job& job, uint32_t s, uint32_t h) const { return V::q(job, token + s, h); }
  MPK_DEVICE T* y(const Job& job, uint32_t s, uint32_t h) const { return V::y(job, token + s, h); }
  MPK_DEVICE uint32_t limit(const Job&, uint32_t s) const { return limit(s); }

  // Positions that one of its rows sees, from the first tile with such on.
  MPK_DEVICE uint32_t end() const { return limit((min(first + V::kRows, num_rows()) - 1) / V::kHeads); }
  MPK_DEVICE uint32_t first_tile() const {
    const uint32_t least = limit(first / V::kHeads);
    return V::kWindow > 0 && least > V::kWindow ? (least - V::kWindow) / V::kKeys : 0;
  }
  MPK_DEVICE uint32_t end_tile() const { return prefill::tiles_to<V>(end()); }

 private:
  MPK_DEVICE uint32_t limit(uint32_t s) const { return is_padding ? 0 : cached + s + 1; }
};

// Fills the next entry with a tile's keys, then its values. False when the launch was aborted.
template <class V, class L>
MPK_DEVICE bool load_tile(L& l, const Job& job, const Unit<V>& unit, uint32_t tile) {
  using S = Shape<V>;
  constexpr int kSlots = L::Config::kSlots, kEach = V::kKeys / 32;  // rows of a lane
  static_assert(V::kKeys % 32 == 0 && S::kEntryBytes <= L::Config::kSlotBytes);
  auto& w = l.ring;
  const uint32_t first = tile * V::kKeys, end = unit.end(), slot = w.entry % kSlots;
  uint32_t rows[kEach];  // of the cache; loaded before the slot is free
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const uint32_t position = first + 32 * i + l.lane;
    rows[i] = position < unit.cached ? clamped(V::row(job, unit.list + position), 0, V::cache_rows(job) - 1) : 0;
  }
  const bool is_free = spin(
      w.dog, [&] { return ptx::mbar_test(&w.ring.empty[slot], (w.entry / kSlots - 1) & 1); },
      [&] { return stall(l.phase, WarpRole::kLoader, Waiting::kFreeSlot, slot, 0, 0, w.entry); });
  if (!__all_sync(~0u, is_free)) return false;
  uint64_t* full = &w.ring.full[slot];
  uint8_t* to = w.data + slot * L::Config::kSlotBytes;
  constexpr uint32_t kKeyBytes = S::KeyTile::kRowBytes, kValueBytes = S::ValueTile::kRowBytes;
  const uint32_t bytes = min(uint32_t(V::kKeys), end - first) * (kKeyBytes + kValueBytes);
  if (l.lane == 0) ptx::mbar_arrive_expect(full, bytes);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const uint32_t place = 32 * i + l.lane, position = first + place;
    if (position >= end) continue;
    const bool is_cached = position < unit.cached;
    const uint32_t token = is_cached ? 0 : unit.token + position - unit.cached;
    const auto* k = is_cached ? V::k_cache(job, rows[i], unit.group) : V::k_new(job, token, unit.group);
    const auto* v = is_cached ? V::v_cache(job, rows[i], unit.group) : V::v_new(job, token, unit.group);
    ptx::bulk_load(to + place * S::KeyTile::kPitch, k, kKeyBytes, full, ptx::kEvictNormal);
    ptx::bulk_load(to + S::KeyTile::kBytes + place * S::ValueTile::kPitch, v, kValueBytes, full, ptx::kEvictNormal);
  }
  __syncwarp();
  w.entry++;
  if (l.lane == 0) ptx::store_release_cta(&w.ring.issued, w.entry);
  if constexpr (kProfiled<typename L::Config>) l.stamps.bytes += bytes;
  return true;
}

template <class V, class L>
MPK_DEVICE void load(L& l, const Job& job) {
  static_assert(Variant<V>);
  const uint32_t worker = l.worker(job);
#pragma unroll 1
  for (uint32_t turn = 0; turn * L::Config::kNumWorkers < Shape<V>::kUnits; turn++) {
    const uint32_t number = dealt(turn, worker, L::Config::kNumWorkers);
    if (number >= Shape<V>::kUnits) continue;
    const Unit<V> unit(job, number, l.lane);
    if (!unit.exists()) return;  // nor do those with higher numbers
#pragma unroll 1
    for (uint32_t tile = unit.first_tile(); tile < unit.end_tile(); tile++) {
      l.failed = !load_tile<V>(l, job, unit, tile);
      if (l.failed) return;
    }
  }
}

template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  static_assert(Variant<V>);
  if (!c.await()) return;
  const uint32_t worker = c.worker(job);
#pragma unroll 1
  for (uint32_t turn = 0; turn * C::Config::kNumWorkers < Shape<V>::kUnits; turn++) {
    const uint32_t number = dealt(turn, worker, C::Config::kNumWorkers);
    if (number >= Shape<V>::kUnits) continue;
    const Unit<V> unit(job, number, c.lane);
    if (!unit.exists() || !prefill::attend<V>(c, job, unit, unit.first_tile(), unit.end())) return;
  }
}

}  // namespace mpk::varlen_attention
