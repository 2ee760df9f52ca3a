// The same with weights that the loader copies to the ring, as boxes of 16 rows and 256 columns. The loader awaits the
// choice, and finds the chosen experts as consumers do. Each warp has a tile, and the tiles' boxes come in turn. The
// products of a box depend on each other, so this keeps all warps busy while the ring holds one or two boxes for each.
#pragma once

#include "torch_mpk/device/ring.cuh"
#include "torch_mpk/device/tasks/expert_rows.cuh"

namespace mpk::experts {

inline constexpr int kEntryColumns = 256;  // of weights, in a box: elements of 16 bits
inline constexpr int kBoxSteps = kEntryColumns / kStepColumns, kBlocksOfBox = kEntryColumns / kBoxColumns;
inline constexpr uint32_t kBoxBytes = kTileRows * kEntryColumns * 2;
inline constexpr int kBoxDepth = 64;  // rows of a box of weights that are stored as [E, K, N]
static_assert(kBoxDepth * kBoxRowBytes == kBoxBytes);
// Boxes are of whole lines of a row's bytes.
template <class V>
inline constexpr uint32_t kBoxesOfTile =
    Transposed<V> ? (V::kSize + kBoxDepth - 1) / kBoxDepth
                  : (V::kRowBytes / kBoxRowBytes + kBlocksOfBox - 1) / kBlocksOfBox;

// The position in the ring of a box of a worker's tiles.
template <class V>
struct Turns {
  static constexpr uint32_t kWarps = kConsumerWarps, kOfPass = kWarps * kBoxesOfTile<V>;
  uint32_t num_tiles;

  // Tiles of a pass: all have their first box before any has its second.
  MPK_DEVICE uint32_t tiles_of(uint32_t pass) const { return min(kWarps, num_tiles - pass * kWarps); }
  MPK_DEVICE uint32_t entry_of(uint32_t tile, uint32_t box) const {
    const uint32_t pass = tile / kWarps;
    return pass * kOfPass + box * tiles_of(pass) + tile % kWarps;
  }
};

// ---- the loader's part

// An entry with eight rows of each half.
struct Halves {
  const void* map;
  uint32_t tile, upper, lower, block, bytes;

  MPK_DEVICE void start(uint8_t* to, uint64_t* full) const {
    ptx::mbar_arrive_expect(full, bytes);
    ptx::box_load(to, map, upper, block, full);
    ptx::box_load(to + bytes / 2, map, lower, block, full);
  }
};

// entry(tile, expert, row, box): the entry with a box of a tile, whose first row is `row`, see first_weight_row.
template <class V, class L, class Entry>
MPK_DEVICE void load_entries(L& l, const Job& job, Entry entry) {
  const Chosen<V> chosen(V::ids(job), l.lane);
  const Span mine = tiles_of<V>(chosen, l.worker(job), L::Config::kNumWorkers);
  const Turns<V> turns{mine.end - mine.begin};
  const uint32_t count = turns.num_tiles * kBoxesOfTile<V>;
  if (count == 0) return;
  l.fill_by(count, count * kBoxBytes, [&] {
    return fill_entries(l.ring, count, entries_in_flight(kBoxBytes), l.phase, [&](uint32_t number) {
      const uint32_t at = min(number, count - 1), pass = at / turns.kOfPass, turn = at % turns.kOfPass;
      const uint32_t size = turns.tiles_of(pass), box = turn / size;
      const uint32_t tile = mine.begin + pass * turns.kWarps + turn % size;
      const uint32_t expert = chosen[tile / kTilesOfExpert<V>], row = tile % kTilesOfExpert<V> * kTileSize<V>;
      return entry(tile, expert, row, box);
    });
  });
}

// Where an expert's weights begin among those of all experts.
template <class V>
MPK_DEVICE uint32_t first_row(uint32_t expert) {
  if constexpr (Transposed<V>)
    return expert * uint32_t(V::kExpertPitch / V::kDepthPitch);
  else
    return expert * uint32_t(V::kExpertPitch / V::kRowPitch);
}

template <class V, class L>
MPK_DEVICE void load_boxes(L& l, const Job& job) {
  const void* map = V::map(job);
  load_entries<V>(l, job, [&](uint32_t tile, uint32_t expert, uint32_t row, uint32_t box) {
    if constexpr (Transposed<V>)
      return Box{map, tile, first_row<V>(expert) + box * kBoxDepth, row / kBoxColumns, kBoxBytes};
    else
      return Box{map, tile, first_row<V>(expert) + row, box * kBlocksOfBox, kBoxBytes};
  });
}

template <class V, class L>
MPK_DEVICE void load_halves(L& l, const Job& job) {
  const void* map = V::map(job);
  load_entries<V>(l, job, [&](uint32_t tile, uint32_t expert, uint32_t row, uint32_t box) {
    const uint32_t first = first_row<V>(expert), block = box * kBlocksOfBox;
    return Halves{map,   tile,     first + first_weight_row<V>(row, false), first + first_weight_row<V>(row, true),
                  block, kBoxBytes};
  });
}

// ---- the consumers' part

// Where the lower eight rows of a tile begin in an entry.
template <class V>
inline constexpr int kLowerRows = Halved<V> ? int(kBoxBytes) / 2 : 8 * kBoxRowBytes;

// A lane's fragment of a box. A box holds 64 columns of all its rows, then the next 64. The copy engine swizzles
// accesses of 16 bytes by the row. Halves are boxes of their own.
template <class V>
MPK_DEVICE RowFragment read_box(const uint8_t* slot, int step, int lane) {
  const int row = lane / 4, access = (step % 2 * 4 + lane % 4) ^ row;
  const uint8_t* from = slot + step / 2 * (V::kBoxRows * kBoxRowBytes) + row * kBoxRowBytes + access * 16;
  return {*reinterpret_cast<const uint4*>(from), *reinterpret_cast<const uint4*>(from + kLowerRows<V>)};
}

// Has the report of a stall name the tile whose box this warp has waited for in vain, if it is the entry's. Only the
// launch knows it.
template <class V, class C>
MPK_DEVICE void report_tile(const C& c, const Pairs<V>& pairs, uint32_t row, uint32_t entry) {
  StallRecord& record = *c.shared.watchdog.stall;
  __syncwarp();  // any lane may have written it
  const Stall& stall = record.stall;
  const bool is_of_entry = stall.waiting == Waiting::kFullSlot || stall.waiting == Waiting::kLoader;
  if (c.lane != 0 || !is_of_entry || stall.entry != entry) return;
  record.expert = pairs.expert + 1;
  record.tile = row / kTileSize<V>;
}

// Multiplies a tile with all pairs. Its boxes stand `stride` entries apart, from `entry` on. False when the launch was
// aborted.
template <class V, class C>
MPK_DEVICE bool multiply_boxes(C& c, const Job& job, Pairs<V>& pairs, uint32_t row, uint32_t entry, uint32_t stride) {
  TileSums<V> sums(job, pairs, c.lane);
#pragma unroll 1
  for (uint32_t box = 0; box < kBoxesOfTile<V>; box++, entry += stride) {
    if (!c.ring.wait(entry, c.phase)) {
      report_tile(c, pairs, row, entry);
      return false;
    }
    const uint8_t* slot = c.ring.slot(entry);
#pragma unroll kGroups < V>> 4 ? 4 : kBoxSteps
    for (int s = 0; s < kBoxSteps; s++) {
      const int step = box * kBoxSteps + s;
      if (V::kSize % kEntryColumns != 0 && step >= V::kSize / kStepColumns) continue;
      sums.add(read_box<V>(slot, s, c.lane), step);
    }
    c.ring.release(entry);
  }
  sums.store(job, pairs, row, c.lane);
#pragma unroll 1
  while (pairs.find_next(job, c.lane)) multiply_listed<1>(job, pairs, row, c.lane);
  return true;
}

// V: as for compute_rows, and map(job), the map of all experts' weights, whose boxes have kBoxRows.
template <class V, class C>
MPK_DEVICE void compute_boxes(C& c, const Job& job) {
  if (!c.await()) return;
  const uint32_t num_tiles =
      for_each_tile<V>(c, job, [&](Pairs<V>& pairs, uint32_t row, uint32_t tile, uint32_t num_tiles) {
        const Turns<V> turns{num_tiles};
        const uint32_t entry = c.entry + turns.entry_of(tile, 0), stride = turns.tiles_of(tile / turns.kWarps);
        c.failed = !multiply_boxes<V>(c, job, pairs, row, entry, stride);
        return !c.failed;
      });
  c.entry += num_tiles * kBoxesOfTile<V>;
}

}  // namespace mpk::experts
