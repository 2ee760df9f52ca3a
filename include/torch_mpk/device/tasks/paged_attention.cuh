// paged_attention: attention.cuh with keys and values in pages. A row's last position is the one that it writes.
//
// The loader looks up tiles' pages in the table, each lane those of a tile. It tells consumers with each entry which of
// its positions count. So consumers read the table only where they write a new position.
#pragma once

#include "torch_mpk/device/tasks/attention.cuh"

namespace mpk::attention {

// The page of a position below kLength, or negative if it has none.
template <InPages V>
MPK_DEVICE int32_t page_of(const Job& job, uint32_t row, uint32_t position) {
  const int32_t page = *V::page_at(job, row, position / V::kPageSize);
  return page < V::num_pages(job) ? page : -1;
}

// Calls with(begin, end, page) for each run of positions of the tile at `first` that share a page, below `limit`. Pages
// of whole tiles give one run.
template <InPages V, class With>
MPK_DEVICE void for_runs(const Job& job, uint32_t row, uint32_t first, uint32_t limit, With with) {
  const uint32_t all = first < limit ? min(uint32_t(kTile<V>), limit - first) : 0;
  if constexpr (V::kPageSize % kTile<V> == 0) {
    if (all == 0) return;
    if (const int32_t page = page_of<V>(job, row, first); page >= 0) with(0u, all, page);
  } else {
#pragma unroll 1
    for (uint32_t begin = 0, end; begin < all; begin = end) {
      end = min(all, begin + V::kPageSize - (first + begin) % V::kPageSize);
      if (const int32_t page = page_of<V>(job, row, first + begin); page >= 0) with(begin, end, page);
    }
  }
}

template <InPages V>
struct Positions<V> {
  using T = typename V::T;
  using Slot = int32_t;
  MPK_DEVICE explicit Positions(const Job&) {}
  MPK_DEVICE Slot written(const Job& job, uint32_t row) const { return static_cast<Slot>(V::limit(job, row) - 1); }

  static MPK_DEVICE T* in_page(const Job& job, int32_t page, uint32_t group, uint32_t position, bool is_value) {
    T* first = is_value ? V::v_pages(job, page, group) : V::k_pages(job, page, group);
    const uint64_t offset = uint64_t(position % V::kPageSize) * (is_value ? V::kPitchV : V::kPitchK);
    return reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(first) + offset);
  }

  static MPK_DEVICE bool find(const Job& job, uint32_t row, uint32_t group, Slot position, bool is_value, T*& at) {
    const int32_t page = page_of<V>(job, row, static_cast<uint32_t>(position));
    if (page >= 0) at = in_page(job, page, group, static_cast<uint32_t>(position), is_value);
    return page >= 0;
  }

  // Prefetches what a split's copies need first: the line with a row's first pages, and the maps. Otherwise they would
  // cost a trip to memory after the rows' limits. The hardware decides how many pages the line has.
  static MPK_DEVICE void prefetch(const Job& job, int lane) {
#pragma unroll
    for (int row = lane; row < V::kBatch; row += 32) ptx::prefetch_l1(V::page_at(job, row, 0));
    if constexpr (V::kInBoxes)
      if (lane < 2) ptx::prefetch_map(lane == 0 ? V::map_K(job) : V::map_V(job));
  }

  template <class L>
  static MPK_DEVICE bool load(L& l, const Job& job, const KvSplit& split, uint32_t limit);
};

template <InPages V>
struct Live<V> {
  static constexpr bool kAreKnown = false;
  static constexpr uint32_t kAll = ~0u >> (32 - kTile<V>);
  uint32_t bits = 0;  // of each position

  MPK_DEVICE Live(uint32_t, uint32_t) {}
  MPK_DEVICE explicit Live(uint32_t said) : bits(said) {}
  MPK_DEVICE bool has(uint32_t place) const { return (bits >> place & 1) != 0; }
  MPK_DEVICE bool has(int32_t position, uint32_t first) const {
    const uint32_t place = uint32_t(position) - first;
    return place < kTile<V> && has(place);
  }
  MPK_DEVICE bool has_all() const { return bits == kAll; }
  MPK_DEVICE uint32_t num_first() const { return __ffs(~bits) - 1; }
};

// An entry of the ring, see fill_entries: a tile's keys, its values, or both.
template <class V, class Writer>
struct PagedEntry {
  const Writer& ring;
  const Job& job;
  uint32_t row, group, first, limit;  // of the tile: its first position
  bool has_values;                    // and no keys, where entries are separate
  uint32_t tile = 0;                  // for the consumers: a bit for each position that counts

  static MPK_DEVICE uint32_t row_bytes(bool is_value) {
    using S = Shape<V>;
    return S::kAlike || !is_value ? S::kRowBytes : S::kValueBytes;
  }

  MPK_DEVICE void copy(uint8_t* to, uint32_t begin, uint32_t end, int32_t page, bool is_value, uint64_t* full) const {
    if constexpr (V::kInBoxes) {  // a box is a tile
      const int row = page * (is_value ? V::kPageRowsV : V::kPageRowsK) + int(first % V::kPageSize);
      const int column = group * (is_value ? V::kGroupColumnsV : V::kGroupColumnsK);
      return ptx::rows_load(to, is_value ? V::map_V(job) : V::map_K(job), row, column, full);
    }
    const auto* from =
        reinterpret_cast<const uint8_t*>(Positions<V>::in_page(job, page, group, first + begin, is_value));
    const uint32_t bytes = row_bytes(is_value);
    ring.copy(to + begin * bytes, from, is_value ? V::kPitchV : V::kPitchK, end - begin, bytes, full);
  }

  MPK_DEVICE void start(uint8_t* to, uint64_t* full) const {
    using S = Shape<V>;
    if constexpr (arch::kHasBulkCopies) {
      const uint32_t rows = !V::kInBoxes ? __popc(tile) : tile != 0 ? S::kTile : 0;
      ptx::mbar_arrive_expect(full, S::kParts * rows * row_bytes(has_values));
    }
    for_runs<V>(job, row, first, limit, [&](uint32_t begin, uint32_t end, int32_t page) {
      copy(to, begin, end, page, has_values, full);
      if constexpr (S::kTogether) copy(to + S::kTile * S::kRowBytes, begin, end, page, true, full);
    });
    if constexpr (!arch::kHasBulkCopies) ptx::copy_async_arrive(full);
  }
};

// Fills the next entries with a split's tiles, and returns the next entry. Out of line, so that the loader's other
// state holds no registers.
template <InPages V, class Writer>
MPK_OUT_OF_LINE uint32_t fill_pages(Writer ring, Job job, KvSplit split, uint32_t limit, uint32_t phase) {
  using S = Shape<V>;
  const uint32_t group = split.group / V::kPasses, count = split.num_tiles * S::kEntries;
  return fill_entries(ring, count, S::kInFlight, phase, [&](uint32_t number) {
    const uint32_t first = (split.first_tile + number / S::kEntries) * S::kTile;
    PagedEntry<V, Writer> entry{
        ring, job, split.row, group, first, number < count ? limit : 0, number % S::kEntries != 0};
    for_runs<V>(job, entry.row, entry.first, entry.limit,
                [&](uint32_t begin, uint32_t end, int32_t) { entry.tile |= ~0u >> (32 - (end - begin)) << begin; });
    return entry;
  });
}

template <InPages V>
template <class L>
MPK_DEVICE bool Positions<V>::load(L& l, const Job& job, const KvSplit& split, uint32_t limit) {
  using S = Shape<V>;
  const uint32_t positions = min(split.num_tiles * S::kTile, limit - split.first_tile * S::kTile);
  return l.fill_by(split.num_tiles * S::kEntries, positions * (S::kRowBytes + S::kValueBytes),
                   [&] { return fill_pages<V>(l.ring, job, split, limit, l.phase); });
}

}  // namespace mpk::attention
