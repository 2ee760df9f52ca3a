// How work is partitioned: pure functions of sizes, which loader, consumers, codegen and tests share. Nothing here
// depends on a device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MPK_HOST_DEVICE __host__ __device__ inline
#else
#define MPK_HOST_DEVICE inline
#endif

namespace mpk {

struct Span {
  uint32_t begin, end;
};

// n / d without a division, which takes 20 instructions where d is not constant: multiplies by d's inverse. Exact if n
// d < 2^32.
MPK_HOST_DEVICE constexpr uint32_t inverse(uint32_t d) { return d == 1 ? 0 : 0xffffffffu / d + 1; }
MPK_HOST_DEVICE uint32_t quotient(uint32_t n, uint32_t inverse_of_d) {
  return inverse_of_d == 0 ? n : static_cast<uint32_t>(uint64_t(n) * inverse_of_d >> 32);
}

// The `index`-th of `count` nearly equal runs of `total` items.
MPK_HOST_DEVICE Span static_span(uint32_t total, uint32_t index, uint32_t count) {
  const uint32_t least = total / count, longer = total % count;
  const uint32_t begin = index * least + (index < longer ? index : longer);
  return {begin, begin + least + (index < longer ? 1 : 0)};
}

// The number of a worker's `turn`-th item, if items in falling order of size are dealt out to and fro.
MPK_HOST_DEVICE uint32_t dealt(uint32_t turn, uint32_t worker, uint32_t workers) {
  return turn * workers + (turn % 2 == 0 ? worker : workers - 1 - worker);
}

// The tiles of a worker, where `split` workers share tiles and each takes an equal part of the columns: worker w has
// part w % split. Workers left over have none.
MPK_HOST_DEVICE Span shared_span(uint32_t total, uint32_t worker, uint32_t split, uint32_t workers) {
  const uint32_t group = worker / split, groups = workers / split;
  return group < groups ? static_span(total, group, groups) : Span{0, 0};
}

// The warps of `warps` that stage a row together, where all `rows` rows get equally many.
MPK_HOST_DEVICE constexpr int warps_of_row(int64_t rows, int warps) {
  return rows >= warps ? 1 : warps / static_cast<int>(rows);
}

// Short rows that a warp takes at once, each by some of its lanes, since the steps of a row wait for each other: at
// most as many as it would have one after the other.
MPK_HOST_DEVICE constexpr int rows_at_once(int64_t row_bytes, int64_t rows, int64_t warps) {
  constexpr int kMost = 4;
  int at_once = 1;
  while (row_bytes <= 512 && at_once < kMost && rows > at_once * warps) at_once *= 2;
  return at_once;
}

// How a job's tiles are shared out at run time, since bandwidth is not shared evenly. A ticket is `size` tiles. The
// first `own` tickets of each worker are its own, in turn; workers that have finished these draw the other `drawn`
// tickets. An eighth is drawn, since some workers get an eighth less bandwidth than others, but at least two for each
// worker.
struct Tickets {
  uint32_t size, own, drawn;
};

// A ticket has kTicketEntries entries of the ring: drawing one takes as long as filling so many.
inline constexpr uint32_t kTicketEntries = 8;

MPK_HOST_DEVICE Tickets make_tickets(uint32_t num_tiles, uint32_t entries, uint32_t num_workers) {
  const uint32_t size = entries < kTicketEntries ? kTicketEntries / entries : 1;
  const uint32_t count = (num_tiles + size - 1) / size, each = count / num_workers;
  const uint32_t own = each > 2 ? each - (each / 8 > 2 ? each / 8 : 2) : 0;
  return {size, own, count - own * num_workers};
}

MPK_HOST_DEVICE Span ticket_tiles(const Tickets& t, uint32_t num_tiles, uint32_t ticket) {
  const uint32_t begin = ticket * t.size, end = begin + t.size;
  return {begin, end < num_tiles ? end : num_tiles};
}

// All workers read the same activations, so each begins with another chunk, and wraps around.
MPK_HOST_DEVICE uint32_t chunk_at(uint32_t turn, uint32_t first, uint32_t chunks) {
  const uint32_t chunk = turn + first;
  return chunk < chunks ? chunk : chunk - chunks;
}

// A split of attention's key-value tiles. The tiles of each (batch row, group) are cut into splits of one length; the
// last may be shorter. The worker of a group's last split merges the group's results. Waits have no cycle: the other
// splits of a group have lower numbers than its last, and workers take splits in ascending order.
struct KvSplit {
  uint32_t row, group;
  uint32_t first_tile, num_tiles;  // 0: there is no such split
  uint32_t index;                  // within the group
  uint32_t first;  // number of the group's first split; the others follow `groups` apart, but for the last
  bool is_last;    // the last of the group
};

// Tiles of a split, if there are workers enough: one tile for each of eight warps, since two warps a scheduler are
// faster than three.
inline constexpr uint32_t kKvSplitTiles = 8;

// The most splits of a single row: all workers have equally many.
MPK_HOST_DEVICE constexpr uint32_t kv_max_splits(uint32_t groups, uint32_t workers) {
  return (groups + workers - 1) / workers * workers;
}

MPK_HOST_DEVICE constexpr uint32_t kv_count(uint32_t tiles, uint32_t length) { return (tiles + length - 1) / length; }

// The most tiles of a split of a single row: `least`, unless that gives more splits than kv_max_splits. Then as few as
// avoid that. `groups`, `least` and `workers` are best constants.
MPK_HOST_DEVICE uint32_t kv_row_length(uint32_t tiles, uint32_t groups, uint32_t least, uint32_t workers) {
  const uint32_t equal = kv_count(tiles, kv_max_splits(groups, workers) / groups);
  return equal > least ? equal : least;
}

// Splits of a row among other rows, on which its splits do not depend. They are about equally long: `few` splits as
// long as each has kKvSplitTiles tiles, and enough that none has more than `most`.
MPK_HOST_DEVICE constexpr uint32_t kv_own_count(uint32_t tiles, uint32_t few, uint32_t most) {
  const uint32_t enough = kv_count(tiles, kKvSplitTiles), needed = kv_count(tiles, most);
  const uint32_t count = enough < few ? enough : few;
  return count > needed ? count : needed;
}

MPK_HOST_DEVICE constexpr uint32_t kv_own_length(uint32_t tiles, uint32_t few, uint32_t most) {
  return kv_count(tiles, kv_own_count(tiles, few, most));
}

// Split number `number` of a row whose first split has number `begin` of all.
MPK_HOST_DEVICE KvSplit kv_row_split(uint32_t row, uint32_t tiles, uint32_t groups, uint32_t length, uint32_t begin,
                                     uint32_t number) {
  const uint32_t index = number / groups, group = number % groups, first = index * length,
                 rest = first < tiles ? tiles - first : 0;
  return {row, group, first, rest < length ? rest : length, index, begin + group, rest <= length};
}

}  // namespace mpk
