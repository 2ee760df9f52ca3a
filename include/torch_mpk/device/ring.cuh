// The ring of shared-memory slots through which the loader warp streams large operands to consumer warps.
//
// Entries are numbered 0, 1, 2, ... over the whole launch; entry g uses slot g mod slots. The loader fills an entry's
// metadata, starts its copies, and publishes the count `issued`. The consumer warp that owns the entry awaits `issued >
// g`, then the slot's `full` barrier, and frees the slot through its `empty` barrier. Several warps that multiply
// together all do so. A consumer looks at `full` only after the loader has armed it for entry g, so its parity cannot
// be that of an earlier or later round, whichever warps share a slot.
#pragma once

#include "torch_mpk/abi/table.h"
#include "torch_mpk/device/arch/arch.cuh"
#include "torch_mpk/device/event.cuh"

namespace mpk {

struct RingState {
  uint64_t full[kMaxSlots];
  uint64_t empty[kMaxSlots];
  uint32_t tile[kMaxSlots];          // the tile that an entry begins, if tiles are claimed
  uint64_t phase_end[kPhasesAhead];  // phase + 1 in the upper half, entries issued by its end in the lower
  uint32_t issued;
};

inline constexpr int kFillWidth = arch::kHasBulkCopies ? 32 : 1;  // entries that the loader describes at once
// Entries that a round waits for. A round for each small entry would take as long as the memory does.
template <int slot_bytes>
inline constexpr uint32_t kLeastFilled = kFillWidth > 1 && slot_bytes <= kMaxSlotBytes ? 2 : 1;

// Lanes of a warp that arrive at `empty`: all of them for racecheck, see kRacecheck.
inline constexpr uint32_t kLanesThatArrive = ptx::kRacecheck ? 32 : 1;

// Called by all lanes of a warp. They count as `arrivals`.
template <int arrivals = 1>
MPK_DEVICE void arrive_for_warp(uint64_t* bar, int lane) {
  __syncwarp();
  if constexpr (ptx::kRacecheck) {
#pragma unroll 1
    for (int i = 0; i < arrivals; i++) ptx::mbar_arrive(bar);
  } else if (lane == 0) {
    ptx::mbar_arrive_as<arrivals>(bar);
  }
}

// A slot is full once the copy engine has written the expected bytes, or every lane has made its copies. It is empty
// once the consumer that owns the entry arrives.
template <class Kernel>
MPK_DEVICE void init_ring(RingState& ring) {
  static_assert(Kernel::kFullArrivals == (kFillWidth > 1 ? 1 : 32), "the schedule is for another generation");
  for (int i = 0; i < Kernel::kSlots; i++) {
    ptx::mbar_init(&ring.full[i], Kernel::kFullArrivals);
    ptx::mbar_init(&ring.empty[i], Kernel::kEmptyArrivals * kLanesThatArrive);
  }
  for (int i = 0; i < kPhasesAhead; i++) ring.phase_end[i] = 0;
  ring.issued = 0;
  ptx::fence_mbar_init();
}

// The loader's end. All lanes of the warp call all functions, with the same arguments.
template <int slots, int slot_bytes>
struct RingWriter {
  RingState& ring;
  uint8_t* data;
  const Watchdog& dog;
  int lane;
  uint32_t entry = 0;  // the next entry

  MPK_DEVICE void end_phase(uint32_t phase) {
    if (lane == 0) ptx::store_release_cta(&ring.phase_end[phase % kPhasesAhead], (uint64_t(phase + 1) << 32) | entry);
  }

  // Waits for the copies in flight, which must not land in the shared memory of a CTA that has exited.
  MPK_DEVICE void drain() {
    for (uint32_t g = entry > slots ? entry - slots : 0; g < entry; g++)
      while (!ptx::mbar_test(&ring.full[g % slots], (g / slots) & 1)) {
      }
  }

  // Copies `rows` rows, `pitch` bytes apart in memory, to a slot, side by side: by the copy engine, or this lane's
  // share.
  MPK_DEVICE void copy(uint8_t* to, const uint8_t* from, uint32_t pitch, uint32_t rows, uint32_t row_bytes,
                       [[maybe_unused]] uint64_t* full) const {
    if (rows != 0 && pitch == row_bytes) {
      row_bytes *= rows;
      rows = 1;
    }
#pragma unroll 1
    for (; rows > 0; rows--, to += row_bytes, from += pitch) {
      if constexpr (arch::kHasBulkCopies)
        ptx::bulk_load(to, from, row_bytes, full);
      else
        for (uint32_t i = lane * 16; i < row_bytes; i += 32 * 16) ptx::copy_async_16(to + i, from + i);
    }
  }
};

// Fills the next `count` entries and publishes them to the consumers, with at most `in_flight` in flight. Returns the
// next entry, short of `count` more when the launch was aborted.
//
// A multiprocessor's share of the bandwidth is a slot every 240 ns. A round of the loop takes the loader longer, since
// consumers evict its instructions. So with the copy engine each lane describes an entry of its own, once for 32
// entries, and a round fills all free slots. Without it all lanes copy parts of one entry.
//
// describe(number): the entry `number` behind the first, for number < count. It has `tile`, and start(to, full), which
// starts its copies.
template <int slots, int slot_bytes, class Describe>
MPK_DEVICE uint32_t fill_entries(RingWriter<slots, slot_bytes>& w, uint32_t count, uint32_t in_flight, uint32_t phase,
                                 Describe describe) {
  static_assert(slots < 32, "a round's entries are bits of a word, and one more");
  RingState& ring = w.ring;
  const uint32_t first = w.entry, mine = kFillWidth == 1 ? 0 : w.lane;
#pragma unroll 1
  for (uint32_t block = 0; block < count; block += kFillWidth) {
    const uint32_t number = block + mine, g = first + number, slot = g % slots, parity = (g / slots - 1) & 1;
    const auto entry = describe(number);
    const uint32_t size = min(uint32_t(kFillWidth), count - block);
    uint64_t* full = &ring.full[slot];
    uint64_t* empty = &ring.empty[slot];
    uint8_t* to = w.data + slot * slot_bytes;
    // All entries before the earlier one have landed by then, so its barrier is at most one round behind.
    const uint32_t earlier = g - in_flight, earlier_parity = (earlier / slots) & 1;
    uint64_t* earlier_full = &ring.full[earlier % slots];
    const bool has_earlier = kFillWidth > 1 && in_flight < slots && g >= in_flight;
    const auto may_fly = [&] { return !has_earlier || ptx::mbar_peek(earlier_full, earlier_parity); };
#pragma unroll 1
    for (uint32_t done = 0; done < size;) {
      // Fills free slots at the front, and waits for the first ones. A new barrier counts as free. The parity says
      // nothing of entries a whole round of the ring ahead.
      const bool is_next = mine - done < min(size - done, uint32_t(slots));
      bool is_free = is_next && ptx::mbar_peek(empty, parity) && may_fly();
      if (!is_free &&
          mine - done < min(kLeastFilled<slot_bytes>, size - done))  // inline: a call would wait for the ticket
        is_free = spin(
            w.dog, [&] { return ptx::mbar_test(empty, parity) && may_fly(); },
            [&] { return stall(phase, WarpRole::kLoader, Waiting::kFreeSlot, slot, 0, 0, g); });
      const uint32_t n = kFillWidth == 1 ? __all_sync(~0u, is_free) : __ffs(~(__ballot_sync(~0u, is_free) >> done)) - 1;
      if (n == 0) return w.entry;
      if (mine - done < n) {
        entry.start(to, full);
        if (kFillWidth > 1 || w.lane == 0) ptx::store_published(&ring.tile[slot], entry.tile);
      }
      __syncwarp();
      done += n;
      w.entry += n;
      if (w.lane == 0) ptx::store_release_cta(&ring.issued, w.entry);
    }
  }
  return w.entry;
}

// Entries whose copies start in two steps. begin_entries starts the copies that need no wait, for at most as many
// entries as there are slots. finish_entries starts the others, and publishes the entries. Each lane has an entry.
// False when the launch was aborted; then nothing is in flight.
template <int slots, int slot_bytes, class Describe>
MPK_DEVICE bool begin_entries(RingWriter<slots, slot_bytes>& w, uint32_t count, uint32_t phase, Describe describe) {
  const uint32_t lane = w.lane, g = w.entry + lane, slot = g % slots, parity = (g / slots - 1) & 1;
  uint8_t* to = w.data + slot * slot_bytes;
  uint64_t* full = &w.ring.full[slot];
  const bool is_free =
      lane >= count || spin(
                           w.dog, [&] { return ptx::mbar_test(&w.ring.empty[slot], parity); },
                           [&] { return stall(phase, WarpRole::kLoader, Waiting::kFreeSlot, slot, 0, 0, g); });
  if (lane < count && is_free) describe(lane).start_weights(to, full);
  if (__all_sync(~0u, is_free)) return true;
  if (lane < count && is_free) {
    describe(lane).start_x(to, full);
    while (!ptx::mbar_test(full, (g / slots) & 1)) {
    }
  }
  return false;
}
template <int slots, int slot_bytes, class Describe>
MPK_DEVICE void finish_entries(RingWriter<slots, slot_bytes>& w, uint32_t count, Describe describe) {
  const uint32_t slot = (w.entry + w.lane) % slots;
  if (w.lane < count) describe(w.lane).start_x(w.data + slot * slot_bytes, &w.ring.full[slot]);
  __syncwarp();
  w.entry += count;
  if (w.lane == 0) ptx::store_release_cta(&w.ring.issued, w.entry);
}

// The lane's entry in fill_ring: its tile, its parts, and the first byte of their rows.
template <int slots, int slot_bytes>
struct Chunk {
  const RingWriter<slots, slot_bytes>& w;
  const Stream& s;
  const uint64_t* data;
  const MatrixRow* matrices;
  uint32_t tile, part, row, rows, pitch, begin, bytes;
  const uint8_t* from;

  MPK_DEVICE void start(uint8_t* to, uint64_t* full) const {
    if constexpr (arch::kHasBulkCopies) ptx::mbar_arrive_expect(full, s.chunk_parts * rows * bytes);
    w.copy(to, from, pitch, rows, bytes, full);
#pragma unroll 1
    for (uint32_t p = 1; p < s.chunk_parts; p++) {
      const uint32_t next_pitch = matrices[part + p].pitch;
      w.copy(to + p * s.tile_rows * bytes,
             reinterpret_cast<const uint8_t*>(data[part + p] + uint64_t(row) * next_pitch + begin), next_pitch, rows,
             bytes, full);
    }
    if constexpr (!arch::kHasBulkCopies) ptx::copy_async_arrive(full);
  }
};

// Fills the next entries with tiles. `matrices` and their addresses, `data`, stand in shared memory, one for every
// part. Returns the next entry, short of the tiles' end when the launch was aborted. Lane 0's upper half is what it
// drew meanwhile from the counter `tickets`, if there is one, since an answer takes over a microsecond. Out of line:
// all streams use it, and the loader's instructions compete with the consumers' for the cache. So jobs supply sizes,
// not code.
template <int slots, int slot_bytes>
MPK_OUT_OF_LINE uint64_t fill_ring(RingWriter<slots, slot_bytes> w, Stream s, const uint64_t* data,
                                   const MatrixRow* matrices, Span tiles, uint32_t phase, uint32_t* tickets) {
  uint32_t ticket = 0;
  if (tickets != nullptr && w.lane == 0) ticket = ptx::fetch_add_relaxed_gpu(tickets, 1);
  const uint32_t count = (tiles.end - tiles.begin) * s.entries;
  const uint32_t end = fill_entries(w, count, s.in_flight, phase, [&](uint32_t number) {
    uint32_t tile = tiles.begin + number, part = 0, begin = 0;
    if (s.entries != 1) {
      const uint32_t whole = quotient(number, s.by_entries), rest = number - whole * s.entries;
      const uint32_t chunks = quotient(rest, s.by_chunks);
      tile = tiles.begin + whole;
      part = chunks * s.chunk_parts;
      begin = (rest - chunks * s.chunks) * s.chunk_bytes;
    }
    const uint32_t row = (tile - matrices->first_tile) * s.tile_rows, num_rows = matrices->num_rows;
    const uint32_t rows = row < num_rows ? min(s.tile_rows, num_rows - row) : 0;
    const uint32_t bytes = min(s.chunk_bytes, s.row_bytes - begin);
    const uint32_t pitch = number < count ? matrices[part].pitch : 0;
    const uint8_t* from =
        reinterpret_cast<const uint8_t*>((number < count ? data[part] : 0) + uint64_t(row) * pitch + begin);
    return Chunk<slots, slot_bytes>{w, s, data, matrices, tile, part, row, rows, pitch, begin, bytes, from};
  });
  return uint64_t(ticket) << 32 | end;
}

struct Box {
  const void* map;
  uint32_t tile, row, block, bytes;

  MPK_DEVICE void start(uint8_t* to, uint64_t* full) const {
    ptx::mbar_arrive_expect(full, bytes);
    ptx::box_load(to, map, row, block, full);
  }
};

// The boxes of a tile's parts, which have `maps`.
struct JoinedBoxes {
  const uint64_t* maps;
  uint32_t parts, tile, row, block, bytes;  // bytes: of a box

  MPK_DEVICE void start(uint8_t* to, uint64_t* full) const {
    ptx::mbar_arrive_expect(full, parts * bytes);
#pragma unroll 1
    for (uint32_t p = 0; p < parts; p++)
      ptx::box_load(to + p * bytes, reinterpret_cast<const void*>(maps[p]), row, block, full);
  }
};

// Where the tiles from `first` on have their matrices: advances `matrix` to the first part's of a tile, and returns
// the tile's first row.
MPK_DEVICE uint32_t find_matrix(const Stream& s, const MatrixRow* matrices, uint32_t tile, uint32_t& matrix) {
#pragma unroll 1
  while (tile >= matrices[matrix].end_tile) matrix += s.parts;
  return (tile - matrices[matrix].first_tile) * s.tile_rows;
}

// The same with boxes, in the order of `s`, for `s.chunks` chunks of a row from number `begin` on. They start at chunk
// `first` and wrap around. `maps`: addresses of the matrices' maps.
template <int slots, int slot_bytes>
MPK_OUT_OF_LINE uint32_t fill_boxes(RingWriter<slots, slot_bytes> w, Stream s, const uint64_t* maps,
                                    const MatrixRow* matrices, Span tiles, uint32_t begin, uint32_t first,
                                    uint32_t phase) {
  const uint32_t boxes = (tiles.end - tiles.begin) * s.parts, count = boxes * s.chunks;
  return fill_entries(w, count, s.in_flight, phase, [&](uint32_t number) {
    const bool by_rows = s.box_order != kByChunks;
    const uint32_t at = min(number, count - 1), inner = by_rows ? s.chunks : boxes;
    const uint32_t outer = at / inner, rest = at - outer * inner;
    const uint32_t box = by_rows ? outer : rest, turn = by_rows ? rest : outer;
    const uint32_t chunk = begin + chunk_at(turn, first, s.chunks), tile = box / s.parts;
    uint32_t matrix = 0;
    const uint32_t row = find_matrix(s, matrices, tiles.begin + tile, matrix);
    const void* map = reinterpret_cast<const void*>(maps[matrix + box - tile * s.parts]);
    return Box{map, tiles.begin + tile, row, chunk * (s.chunk_bytes / 128), s.tile_rows * s.chunk_bytes};
  });
}

// The same where the parts' boxes are joined.
template <int slots, int slot_bytes>
MPK_OUT_OF_LINE uint32_t fill_joined_boxes(RingWriter<slots, slot_bytes> w, Stream s, const uint64_t* maps,
                                           const MatrixRow* matrices, Span tiles, uint32_t begin, uint32_t first,
                                           uint32_t phase) {
  const uint32_t boxes = tiles.end - tiles.begin, count = boxes * s.chunks;
  return fill_entries(w, count, s.in_flight, phase, [&](uint32_t number) {
    const uint32_t at = min(number, count - 1), turn = at / boxes, tile = tiles.begin + at - turn * boxes;
    uint32_t matrix = 0;
    const uint32_t row = find_matrix(s, matrices, tile, matrix);
    return JoinedBoxes{maps + matrix,
                       s.parts,
                       tile,
                       row,
                       (begin + chunk_at(turn, first, s.chunks)) * (s.chunk_bytes / 128),
                       s.tile_rows * s.chunk_bytes};
  });
}

// Whether the phase ends before entry g.
MPK_DEVICE bool ends_before(const RingState& ring, uint32_t g, uint32_t phase) {
  const uint64_t end = ptx::load_acquire_cta(&ring.phase_end[phase % kPhasesAhead]);
  return (end >> 32) == phase + 1 && reached(g, static_cast<uint32_t>(end));
}

// In place of a claimed tile: there is none, or the launch was aborted.
inline constexpr uint32_t kNoTile = ~0u, kAborted = ~0u - 1;

// For claimed tiles: waits until entry g has been issued for this phase, or the phase has ended before it. The loader
// publishes a phase's end before it issues entries of the next phase. Returns the entry's tile, and in the upper half
// the count of issued entries; the warp has seen `issued`. Out of line, as wait_entry is.
template <int slots>
MPK_OUT_OF_LINE uint64_t next_tile(const RingState& ring, const Watchdog& dog, uint32_t g, uint32_t phase,
                                   uint32_t issued) {
  if (!reached(issued, g + 1)) {
    uint32_t seen = 0;
    spin(
        dog, [&] { return reached(seen = ptx::load_acquire_cta(&ring.issued), g + 1) || ends_before(ring, g, phase); },
        [&] { return stall(phase, WarpRole::kConsumer, Waiting::kLoader, phase, seen, g + 1, g); });
    if (!__all_sync(~0u, reached(seen, g + 1) || ends_before(ring, g, phase))) return kAborted;
    issued = __shfl_sync(~0u, seen, 0);  // lanes must agree, or some would skip the vote above
  }
  return uint64_t(issued) << 32 | (ends_before(ring, g, phase) ? kNoTile : ptx::load_published(&ring.tile[g % slots]));
}

// Waits until entry g, which is certain to come, is issued and its data has landed. `issued`: the count that the warp
// has seen. Returns the count seen now, or one below the entry when the launch was aborted. All lanes call it. Out of
// line: every tile of every task uses it.
template <int slots>
MPK_OUT_OF_LINE uint32_t wait_entry(RingState& ring, const Watchdog& dog, uint32_t g, uint32_t phase, uint32_t issued) {
  if (!reached(issued, g + 1)) {
    const uint32_t seen = wait_count(dog, &ring.issued, g + 1, phase, WarpRole::kConsumer, Waiting::kLoader, g);
    if (!__all_sync(~0u, reached(seen, g + 1))) return g;
    issued = __shfl_sync(~0u, seen, 0);  // lanes must agree
  }
  const uint32_t slot = g % slots, parity = (g / slots) & 1;
  bool there = ptx::mbar_test(&ring.full[slot], parity);
  if (!there)
    there = wait_barrier(dog, &ring.full[slot], parity, phase, WarpRole::kConsumer, Waiting::kFullSlot, slot, g);
  return __all_sync(~0u, there) ? issued : g;
}

// A consumer warp's end. All lanes call all functions. `arrivals`: those of a warp that owns an entry.
template <int slots, int slot_bytes, int arrivals>
struct RingReader {
  RingState& ring;
  uint8_t* data;
  const Watchdog& dog;
  int lane;
  uint32_t issued = 0;  // what the warp has seen of ring.issued

  // The tile that entry g begins, or kNoTile, or kAborted.
  MPK_DEVICE uint32_t next_tile(uint32_t g, uint32_t phase) {
    look(g);
    if (reached(issued, g + 1))
      return ends_before(ring, g, phase) ? kNoTile : ptx::load_published(&ring.tile[g % slots]);
    const uint64_t found = mpk::next_tile<slots>(ring, dog, g, phase, issued);
    issued = static_cast<uint32_t>(found >> 32);
    return static_cast<uint32_t>(found);
  }

  // Updates the count, unless the warp knows that entry g has been issued.
  MPK_DEVICE void look(uint32_t g) {
    if (!reached(issued, g + 1)) issued = __shfl_sync(~0u, ptx::load_acquire_cta(&ring.issued), 0);
  }

  // Whether the data of entry g has landed.
  MPK_DEVICE bool has(uint32_t g) {
    look(g);
    return __all_sync(~0u, reached(issued, g + 1) && ptx::mbar_peek(&ring.full[g % slots], (g / slots) & 1));
  }

  // Whether that of several entries has, of which the last one is issued last.
  template <int count>
  MPK_DEVICE bool has(const uint32_t (&entries)[count]) {
    look(entries[count - 1]);
    bool are_there = reached(issued, entries[count - 1] + 1);
#pragma unroll
    for (uint32_t g : entries) are_there &= ptx::mbar_peek(&ring.full[g % slots], (g / slots) & 1);
    return __all_sync(~0u, are_there);
  }

  // Waits for the data of entry g, which is certain to come.
  MPK_DEVICE bool wait(uint32_t g, uint32_t phase) { return has(g) || wait_longer(g, phase); }
  MPK_DEVICE bool wait_longer(uint32_t g, uint32_t phase) {
    issued = wait_entry<slots>(ring, dog, g, phase, issued);
    return reached(issued, g + 1);
  }
  // The same without a call, see spin_here.
  MPK_DEVICE bool wait_here(uint32_t g, uint32_t phase) {
    const bool there = spin_here(
        dog, [&] { return has(g); },
        [&] { return stall(phase, WarpRole::kConsumer, Waiting::kFullSlot, g % slots, 0, 0, g); });
    return __all_sync(~0u, there);
  }

  MPK_DEVICE uint8_t* slot(uint32_t g) const { return data + (g % slots) * slot_bytes; }

  // What the loader wrote for entry g in place of a tile's number. The entry's data has landed.
  MPK_DEVICE uint32_t word_of(uint32_t g) const { return ptx::load_published(&ring.tile[g % slots]); }

  // The entries issued by the end of a phase that next_tile has found ended.
  MPK_DEVICE uint32_t phase_end(uint32_t phase) const {
    return static_cast<uint32_t>(ptx::load_published(&ring.phase_end[phase % kPhasesAhead]));
  }

  MPK_DEVICE uint64_t* empty(uint32_t g) const { return &ring.empty[g % slots]; }
  MPK_DEVICE void release(uint32_t g) { arrive_for_warp<arrivals>(empty(g), lane); }
  // Releases an entry that several warps read, each of which does: those that multiply together, or share it.
  MPK_DEVICE void release_share(uint32_t g) { arrive_for_warp(empty(g), lane); }
};

}  // namespace mpk
