// Sizes of a CTA, its ring and its accesses, which code generation and device code share.
#pragma once

#include <cstdint>

namespace mpk {

// The widest access of a lane. Bulk copies move multiples of it, from and to multiples of it.
inline constexpr int kAccessBytes = 16;

// The registers of a multiprocessor, all of one CTA; what the tasks' code needs of them; the most that a thread may
// have. Threads are charged in units of four warps: of 12 warps each thread gets 168 registers, of 13 only 128.
inline constexpr int kRegisterFile = 65536, kFewestRegisters = 168, kMostRegisters = 255;
constexpr int registers_each(int threads) {
  const int registers = kRegisterFile / ((threads + 127) / 128 * 128) / 8 * 8;
  return registers < kMostRegisters ? registers : kMostRegisters;
}

// Kernels with warpgroups: their number, their warps, and their threads' registers. The loader's warpgroup, of which
// three warps idle, keeps few.
inline constexpr int kWarpgroups = 2, kWarpgroupWarps = 4;
inline constexpr int kMultiplyingRegisters = 216, kLoadingRegisters = 72;
static_assert(32 * kWarpgroupWarps * (kWarpgroups * kMultiplyingRegisters + kLoadingRegisters) <= kRegisterFile);
constexpr int threads_of(int consumer_warps, int loader_warps, bool moves_registers) {
  return 32 * (consumer_warps + (moves_registers ? kWarpgroupWarps : loader_warps));
}

// Slots of the ring. Their size suits the kernel's weight rows, see choose_slot_bytes in csrc/schedule.
inline constexpr int kMinSlotBytes = 8192, kMaxSlotBytes = 12288, kMaxSlots = 28;
inline constexpr int kFewestSlots = 2;
// Where warpgroups compute, a slot holds a step of a tile of products: 128 rows of x and 256 of weights by 64 columns.
inline constexpr int kTileSlotBytes = 48 << 10;
// A tile's rows of x, 64 for each warpgroup; a warp's rows of these; the floats from row to row of a strip, so that
// rows meet different banks. Warps exchange sums in strips, some columns of each part at a time.
inline constexpr int kTileXRows = 64 * kWarpgroups, kWarpRows = 16, kStripPitch = 40;
inline constexpr int kStripBytes = kWarpRows * kStripPitch * 4;  // a warp's
// Row tasks at a tile's end use a strip's place for half of a warp's rows at a time, padded for different banks.
constexpr int64_t row_behind_bytes(int64_t row_bytes) { return kWarpRows / 2 * (row_bytes + 32); }
inline constexpr int kTaggedFloatBytes = 8;  // a sum that another worker polls, see device/tagged.cuh
constexpr int strip_columns(int64_t parts) { return parts == 1 ? 32 : parts == 2 ? 16 : 8; }
// Where warps of attention share the keys of their rows, they merge so many columns of results at a time, beside maxima
// and sums: each lane has a fragment of 16 bytes for every 8 columns, and one more.
inline constexpr int kMergedColumns = 32, kMergeBytes = 32 * 16 * (kMergedColumns / 8 + 1);

// Shared memory: a fixed part of at most so many bytes (see Shared), rows of the table, staged operands, the ring. Each
// begins at a multiple of kSharedAlignment.
inline constexpr int kMaxFixedBytes = 4096, kSharedAlignment = 128;
inline constexpr int kPhasesAhead = 4;          // phases, and table rows, that the loader may be ahead
inline constexpr int kLongestWarpRow = 2048;    // the longest row in bytes that one warp takes, see rows_by_warp
inline constexpr int kLaneRowPad = 64;          // between rows of a warp's lanes, for different banks
inline constexpr int kMaxTileBytes = 96 << 10;  // a tile task's; the ring needs the rest

// Full slots in flight that keep an H200's memory busy. Two thirds of them do not. More do not raise the bandwidth, and
// delay the consumers' polls: with a whole ring of 25 in flight, a poll takes 1.5 microseconds.
constexpr uint32_t entries_in_flight(uint32_t entry_bytes) {
  constexpr uint32_t kMost = 9;
  return entry_bytes <= kMinSlotBytes ? kMost : (kMost * kMinSlotBytes + entry_bytes / 2) / entry_bytes;
}

// Positions of a tile of attention: as many as tensor cores take at once, if their keys fit a ring entry.
constexpr int kv_tile(int row_bytes) {
  int tile = 1;
  while (tile < 16 && 2 * tile * row_bytes <= kMinSlotBytes) tile *= 2;
  return tile;
}

// The sums of a tile's runs of entries wait for each other in shared memory, see linear::compute_shared: kSumsOfRun of
// each run, in a place that follows from the number of the entry behind the run. A place is reused kSumsKept entries
// later. By then the warp that adds up the tile has released entries of a later run, if this holds, since the ring is
// filled in order.
inline constexpr uint32_t kSumsOfRun = 2, kSumsKept = 64;
constexpr bool keeps_sums(uint32_t tile_entries, uint32_t run, uint32_t consumer_warps) {
  return tile_entries + consumer_warps * run <= kSumsKept - kMaxSlots;
}

// Attention of many positions on tensor cores: bytes from row to row of keys or values that are copied row by row, so
// that 8 rows meet different banks; bytes of a row in boxes; and whether a warp keeps its queries in registers, or
// reads them again for each tile of keys.
inline constexpr int kLargestHead = 256;
constexpr int key_row_pitch(int row_bytes) { return ((row_bytes / kAccessBytes + 1) | 1) * kAccessBytes; }
constexpr int boxed_row_bytes(int row_bytes) { return (row_bytes + 127) / 128 * 128; }
constexpr bool keeps_queries(int size, int value_size) { return size / 4 + value_size / 2 <= 144; }
constexpr int queries_bytes(int size) { return kWarpRows * key_row_pitch(2 * size); }

// Attention over latents: the warps that multiply, each 64 columns of latents; the positions of a tile of splits; the
// most tiles of kWarpRows positions in shared memory. Bytes of shared memory: tiles, queries of kWarpRows heads, scores
// of parts of keys, weights, and three floats of each head; where results are merged, two floats of each head and split
// in their place. Bytes of a split's results: two tagged floats of each head, and its latent.
inline constexpr int kLatentWarps = 8, kLatentColumns = 64, kLatentTile = 8, kMostLatentStages = 4;
inline constexpr int kLatentParts = kLatentWarps * 8 / kWarpRows;
constexpr int64_t latent_bytes(int64_t size, int64_t rope, int64_t stages, int64_t row_splits) {
  const int64_t rows = (stages + 1) * kWarpRows * key_row_pitch(static_cast<int>(2 * (size + rope)));
  const int64_t tiles = rows + kWarpRows * (kLatentParts * (kWarpRows + 8) * 4 + key_row_pitch(2 * kWarpRows) + 3 * 4);
  const int64_t merged = row_splits * kWarpRows * 8;
  return tiles > merged ? tiles : merged;
}
constexpr int64_t latent_split_bytes(int64_t size) { return kWarpRows * (2 + size) * kTaggedFloatBytes; }

// Boxes: kBoxColumns columns of some rows of a matrix. A row of a box fills the copy engine's 128-byte swizzle, which
// repeats after kBoxAlignment bytes.
inline constexpr int kBoxColumns = 64, kBoxRowBytes = 128, kBoxAlignment = 1024;

// Pairs of a row and an expert that a warp multiplies, and lists, at a time: groups of eight, as many as it has
// registers for sums of. Without repeated choices an expert has no more pairs than there are rows.
inline constexpr int kPairsOfGroup = 8;
constexpr int listed_pairs(int64_t rows, bool is_transposed) {
  const int64_t groups = (rows + kPairsOfGroup - 1) / kPairsOfGroup, most = is_transposed ? 3 : 6;
  return static_cast<int>(groups < most ? groups : most) * kPairsOfGroup;
}

// Shared memory of linears with several rows of x (see RowsShape): the most stages of x; the producer warps that fill
// them; the floats from row to row of a block's sums, free of bank conflicts.
inline constexpr int kStages = 4, kProducerWarps = 3, kSumPitch = 20;
// Where warpgroups multiply: rows of x of a product; the most columns of a stage; the columns of all stages. Copies of
// 32 KB are faster than more copies of 16 KB (docs/experiments.md).
inline constexpr int kMultipliedRows = 64, kWidestStage = 256, kColumnsAtHand = 512;
constexpr int stages_held(int columns) {
  return kColumnsAtHand / columns < kStages ? kColumnsAtHand / columns : kStages;
}

static_assert(kMinSlotBytes % kAccessBytes == 0 && kMaxSlotBytes % kAccessBytes == 0);
static_assert(kTileSlotBytes % kBoxAlignment == 0);

}  // namespace mpk
