// Who does what: pure functions of sizes, shared by loader, consumers, codegen and tests. Nothing here knows a device.
#pragma once

#include "torch_mpk/abi.h"

#ifdef __CUDACC__
#define MPK_HOST_DEVICE __host__ __device__ inline
#else
#define MPK_HOST_DEVICE inline
#endif

namespace mpk {

struct Span {
  uint32_t begin, end;
};

// The `index`-th of `count` nearly equal runs of `total` things.
MPK_HOST_DEVICE Span static_span(uint32_t total, uint32_t index, uint32_t count) {
  const uint32_t least = total / count, longer = total % count;
  const uint32_t begin = index * least + (index < longer ? index : longer);
  return {begin, begin + least + (index < longer ? 1 : 0)};
}

// Tickets that workers draw for tiles: of four tiles each, near the end of two, then of one, so that all finish
// together.
struct Tickets {
  uint32_t quads, pairs, singles;
};

MPK_HOST_DEVICE constexpr Tickets make_tickets(uint32_t num_tiles, uint32_t num_workers) {
  const uint32_t singles = num_tiles < 2 * num_workers ? num_tiles : 2 * num_workers;
  const uint32_t rest = num_tiles - singles;
  const uint32_t pairs = rest < 4 * num_workers ? rest / 2 : 2 * num_workers;
  const uint32_t quads = (rest - 2 * pairs) / 4;
  return {quads, pairs, num_tiles - 4 * quads - 2 * pairs};
}

MPK_HOST_DEVICE Span ticket_tiles(const Tickets& t, uint32_t ticket) {
  if (ticket < t.quads) return {4 * ticket, 4 * ticket + 4};
  const uint32_t pair = ticket - t.quads;
  if (pair < t.pairs) return {4 * t.quads + 2 * pair, 4 * t.quads + 2 * pair + 2};
  const uint32_t single = 4 * t.quads + 2 * t.pairs + (pair - t.pairs);
  return {single, single + 1};
}

// Attention's key-value tiles. Those of each (batch row, group) are cut into pieces of nearly equal length; the pieces
// of all, in the order of row, group and position, are dealt out to the workers. The worker that finishes the last of a
// group's pieces puts their partial results together.
struct KvPiece {
  uint32_t row, group;
  uint32_t first_tile, num_tiles;
  uint32_t index, count;  // of the group's pieces
  uint32_t first;         // the number of the group's first piece among all
};

// Tiles of a piece, at most, and the pieces of all.
struct KvCut {
  uint32_t length, pieces;
};

MPK_HOST_DEVICE uint32_t kv_count(uint32_t tiles, uint32_t length) { return (tiles + length - 1) / length; }

// tiles_of(row): the tiles of a group of that batch row, at least 1.
template <class TilesOf>
MPK_HOST_DEVICE uint32_t kv_pieces(TilesOf tiles_of, uint32_t rows, uint32_t groups, uint32_t length) {
  uint32_t pieces = 0;
  for (uint32_t row = 0; row < rows; row++) pieces += kv_count(tiles_of(row), length) * groups;
  return pieces;
}

MPK_HOST_DEVICE constexpr uint32_t kv_max_pieces(uint32_t rows, uint32_t groups, uint32_t workers) {
  return (rows * groups + workers - 1) / workers * workers;
}

// Tiles of a piece, at most. Up to `alone` tiles are one piece: what a few more tiles take is less than what it takes
// to put pieces together. Otherwise there are as many pieces as there are workers, but each has at least `least` tiles.
template <class TilesOf>
MPK_HOST_DEVICE uint32_t kv_length(TilesOf tiles_of, uint32_t rows, uint32_t groups, uint32_t least, uint32_t alone,
                                   uint32_t workers) {
  const uint32_t max_pieces = kv_max_pieces(rows, groups, workers);
  uint32_t total = 0, most = 0;
  for (uint32_t row = 0; row < rows; row++) {
    const uint32_t tiles = tiles_of(row);
    total += tiles * groups;
    most = tiles > most ? tiles : most;
  }
  if (most <= alone) return most;
  const uint32_t equal = kv_count(total, max_pieces);
  uint32_t length = equal > least ? equal : least;
  while (kv_pieces(tiles_of, rows, groups, length) > max_pieces) length += 1 + length / 16;
  return length;
}

// Piece number `number` of all.
template <class TilesOf>
MPK_HOST_DEVICE KvPiece kv_piece(TilesOf tiles_of, uint32_t groups, uint32_t length, uint32_t number) {
  uint32_t row = 0, first = 0, tiles = tiles_of(0), count = kv_count(tiles, length);
  while (number >= first + count * groups) {
    first += count * groups;
    tiles = tiles_of(++row);
    count = kv_count(tiles, length);
  }
  const uint32_t group = (number - first) / count;
  first += group * count;
  const Span span = static_span(tiles, number - first, count);
  return {row, group, span.begin, span.end - span.begin, number - first, count, first};
}

}  // namespace mpk
