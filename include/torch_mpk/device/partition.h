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

// The tiles of one worker when they are dealt out beforehand: nearly equal runs.
MPK_HOST_DEVICE Span static_span(uint32_t num_tiles, uint32_t worker, uint32_t num_workers) {
  return {static_cast<uint32_t>(uint64_t(num_tiles) * worker / num_workers),
          static_cast<uint32_t>(uint64_t(num_tiles) * (worker + 1) / num_workers)};
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

// Attention's key-value tiles, lined up by batch row, then group, then position, and cut into one equal piece per
// worker.
struct KvPiece {
  uint32_t length;      // tiles of every piece but the last ones
  uint32_t begin, end;  // this worker's
};

// The part of a piece that lies in one (batch row, group).
struct KvRun {
  uint32_t row, group;
  uint32_t first_tile, num_tiles;  // within the group's tiles
  uint32_t start, total;           // of the group: place in the line, number of tiles

  MPK_HOST_DEVICE bool complete() const { return num_tiles == total; }
  MPK_HOST_DEVICE Span pieces(uint32_t length) const { return {start / length, (start + total - 1) / length + 1}; }
};

// At most two runs of a piece are part of a larger group: the first and the last. Where run's partial result goes.
MPK_HOST_DEVICE uint32_t partial_slot(uint32_t piece, uint32_t length, uint32_t group_start) {
  return 2 * piece + (piece * length < group_start ? 1 : 0);
}

// tiles_of(row): tiles of one group of a batch row, at least 1.
template <class TilesOf>
MPK_HOST_DEVICE KvPiece kv_piece(TilesOf tiles_of, uint32_t rows, uint32_t groups, uint32_t min_length, uint32_t worker,
                                 uint32_t num_workers) {
  uint32_t total = 0;
  for (uint32_t row = 0; row < rows; row++) total += tiles_of(row) * groups;
  const uint32_t equal = (total + num_workers - 1) / num_workers;
  const uint32_t length = equal < min_length ? min_length : equal;
  const uint32_t begin = worker * length < total ? worker * length : total;
  return {length, begin, begin + length < total ? begin + length : total};
}

// The run of the piece that begins at `unit`, a place in the line.
template <class TilesOf>
MPK_HOST_DEVICE KvRun kv_run(TilesOf tiles_of, uint32_t groups, uint32_t unit, uint32_t end) {
  uint32_t row = 0, start = 0, tiles = tiles_of(0);
  while (unit >= start + tiles * groups) {
    start += tiles * groups;
    tiles = tiles_of(++row);
  }
  const uint32_t group = (unit - start) / tiles;
  start += group * tiles;
  const uint32_t stop = start + tiles < end ? start + tiles : end;
  return {row, group, unit - start, stop - unit, start, tiles};
}

}  // namespace mpk
