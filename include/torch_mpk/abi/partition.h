// Who does what: pure functions of sizes, shared by loader, consumers, codegen and tests. Nothing here knows a device.
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

// n / d without a division, which takes 20 instructions where d is no constant: by d's inverse, if n d < 2^32.
MPK_HOST_DEVICE constexpr uint32_t inverse(uint32_t d) { return d == 1 ? 0 : 0xffffffffu / d + 1; }
MPK_HOST_DEVICE uint32_t quotient(uint32_t n, uint32_t inverse_of_d) {
  return inverse_of_d == 0 ? n : static_cast<uint32_t>(uint64_t(n) * inverse_of_d >> 32);
}

// The `index`-th of `count` nearly equal runs of `total` things.
MPK_HOST_DEVICE Span static_span(uint32_t total, uint32_t index, uint32_t count) {
  const uint32_t least = total / count, longer = total % count;
  const uint32_t begin = index * least + (index < longer ? index : longer);
  return {begin, begin + least + (index < longer ? 1 : 0)};
}

// The number of a worker's `turn`-th thing, of things in falling order of size: they are dealt out to and fro.
MPK_HOST_DEVICE uint32_t dealt(uint32_t turn, uint32_t worker, uint32_t workers) {
  return turn * workers + (turn % 2 == 0 ? worker : workers - 1 - worker);
}

// The same where `split` workers each have the same tiles, and of those equal parts of the columns: worker w part
// w % split. Workers that are too few for that have none.
MPK_HOST_DEVICE Span shared_span(uint32_t total, uint32_t worker, uint32_t split, uint32_t workers) {
  const uint32_t group = worker / split, groups = workers / split;
  return group < groups ? static_span(total, group, groups) : Span{0, 0};
}

// Of `warps` warps, those that bring one of `rows` rows to shared memory, where each row has as many.
MPK_HOST_DEVICE constexpr int warps_of_row(int64_t rows, int warps) {
  return rows >= warps ? 1 : warps / static_cast<int>(rows);
}

// Short rows that a warp works on together, each by some of its lanes, as many as it would have one after the other:
// the steps of a row wait for each other.
MPK_HOST_DEVICE constexpr int rows_at_once(int64_t row_bytes, int64_t rows, int64_t warps) {
  constexpr int kMost = 4;
  int at_once = 1;
  while (row_bytes <= 512 && at_once < kMost && rows > at_once * warps) at_once *= 2;
  return at_once;
}

// How a job's tiles are shared out at run time, since memory bandwidth is not shared evenly: `size` tiles a ticket, the
// first `own` tickets of each worker in turn, and `drawn` that whoever is done with those draws: an eighth of all,
// since some workers get an eighth less of the bandwidth than others, and two for each where there are few.
struct Tickets {
  uint32_t size, own, drawn;
};

// A ticket is worth kTicketEntries of the ring: drawing one takes about as long as filling so many.
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

// All workers read the same activations, so each begins with another chunk of them, and goes round.
MPK_HOST_DEVICE uint32_t chunk_at(uint32_t turn, uint32_t first, uint32_t chunks) {
  const uint32_t chunk = turn + first;
  return chunk < chunks ? chunk : chunk - chunks;
}

// Attention's key-value tiles. Those of each (batch row, group) are cut into pieces of one length, of which the last
// may be shorter. The worker of a group's last piece puts their results together: it waits only for pieces that wait
// for none of its own, since the other pieces of a group have lower numbers than its last, and workers take theirs in
// the order of their numbers.
struct KvPiece {
  uint32_t row, group;
  uint32_t first_tile, num_tiles;  // none: there is no such piece
  uint32_t index;                  // among the group's
  uint32_t first;  // the number of the group's first; those of the next are `groups` apart, but the last
  bool is_last;    // of the group's
};

// Tiles of a piece, where there are workers enough: one tile a warp, for eight of them, since two warps a scheduler are
// quicker than three.
inline constexpr uint32_t kKvPieceTiles = 8;

// Of a row that is alone, at most: all workers have equally many.
MPK_HOST_DEVICE constexpr uint32_t kv_max_pieces(uint32_t groups, uint32_t workers) {
  return (groups + workers - 1) / workers * workers;
}

MPK_HOST_DEVICE constexpr uint32_t kv_count(uint32_t tiles, uint32_t length) { return (tiles + length - 1) / length; }

// Tiles of a piece of such a row, at most: `least`, unless that gives more pieces than there are workers. Then as few
// as give no more. `groups`, `least` and `workers` are best constants.
MPK_HOST_DEVICE uint32_t kv_row_length(uint32_t tiles, uint32_t groups, uint32_t least, uint32_t workers) {
  const uint32_t equal = kv_count(tiles, kv_max_pieces(groups, workers) / groups);
  return equal > least ? equal : least;
}

// The same for a row among others, on which its pieces do not depend: they are about equally long, and at most as many
// as kv_own_count says, `few` as far as each has kKvPieceTiles, or as many as it takes for none to have more than
// `most`.
MPK_HOST_DEVICE constexpr uint32_t kv_own_count(uint32_t tiles, uint32_t few, uint32_t most) {
  const uint32_t enough = kv_count(tiles, kKvPieceTiles), needed = kv_count(tiles, most);
  const uint32_t count = enough < few ? enough : few;
  return count > needed ? count : needed;
}

MPK_HOST_DEVICE constexpr uint32_t kv_own_length(uint32_t tiles, uint32_t few, uint32_t most) {
  return kv_count(tiles, kv_own_count(tiles, few, most));
}

// Piece number `number` of a row, whose first one has number `begin` of all.
MPK_HOST_DEVICE KvPiece kv_row_piece(uint32_t row, uint32_t tiles, uint32_t groups, uint32_t length, uint32_t begin,
                                     uint32_t number) {
  const uint32_t index = number / groups, group = number % groups, first = index * length,
                 rest = first < tiles ? tiles - first : 0;
  return {row, group, first, rest < length ? rest : length, index, begin + group, rest <= length};
}

}  // namespace mpk
