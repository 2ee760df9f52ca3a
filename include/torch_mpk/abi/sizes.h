// Sizes of a CTA, its ring and its accesses that code generation reckons with and device code is written for.
#pragma once

#include <cstdint>

namespace mpk {

// The widest access of a lane; bulk copies move multiples of it. What is read or copied so begins at multiples of it.
inline constexpr int kAccessBytes = 16;

// Registers of a multiprocessor, which one CTA shares out; what the tasks' code needs of them; and what each of a CTA's
// threads may have, for threads are charged in units of four warps: of 12 warps 168, of 13 only 128.
inline constexpr int kRegisterFile = 65536, kFewestRegisters = 168, kMostRegisters = 255;
constexpr int registers_each(int threads) {
  const int registers = kRegisterFile / ((threads + 127) / 128 * 128) / 8 * 8;
  return registers < kMostRegisters ? registers : kMostRegisters;
}

// Where warpgroups compute, each of four warps: so many of them, and registers that a thread of theirs has, for which
// the loader's warpgroup, of which three warps have nothing to do, keeps but a few.
inline constexpr int kWarpgroups = 2, kWarpgroupWarps = 4;
inline constexpr int kMultiplyingRegisters = 216, kLoadingRegisters = 72;
static_assert(32 * kWarpgroupWarps * (kWarpgroups * kMultiplyingRegisters + kLoadingRegisters) <= kRegisterFile);
constexpr int threads_of(int consumer_warps, int loader_warps, bool moves_registers) {
  return 32 * (consumer_warps + (moves_registers ? kWarpgroupWarps : loader_warps));
}

// Slots of the ring. A kernel's are as large as its weights' rows fill best, see choose_slot_bytes in csrc/schedule.
inline constexpr int kMinSlotBytes = 8192, kMaxSlotBytes = 12288, kMaxSlots = 28;
inline constexpr int kFewestSlots = 2;
// Where warpgroups compute, a slot holds a step of a tile of products: 128 rows of x and 256 of weights by 64 columns.
inline constexpr int kTileSlotBytes = 48 << 10;
// Rows of x of a tile, 64 for each warpgroup, and of these a warp's, whose sums meet in shared memory: strips of some
// columns of each part that is combined, kStripPitch floats from row to row, in other banks.
inline constexpr int kTileXRows = 64 * kWarpgroups, kWarpRows = 16, kStripPitch = 40;
inline constexpr int kStripBytes = kWarpRows * kStripPitch * 4;  // of a warp
// Rows that row tasks take as a tile ends stand in the place of a strip, half of a warp's at a time, in other banks.
constexpr int64_t row_behind_bytes(int64_t row_bytes) { return kWarpRows / 2 * (row_bytes + 32); }
inline constexpr int kTaggedFloatBytes = 8;  // of a sum that another worker polls, see device/tagged.cuh
constexpr int strip_columns(int64_t parts) { return parts == 1 ? 32 : parts == 2 ? 16 : 8; }
// Where warps of attention share the keys of its rows, they hand each other so many columns of results at a time, and
// with them maxima and sums: of each lane fragments of 16 bytes, one for every 8 columns, and one more.
inline constexpr int kUnitedColumns = 32, kUnitedBytes = 32 * 16 * (kUnitedColumns / 8 + 1);

// Shared memory: a fixed part (see Shared) of so many bytes at most, rows of the table, what jobs stage, the ring. Each
// begins at a multiple of kSharedAlignment.
inline constexpr int kMaxFixedBytes = 4096, kSharedAlignment = 128;
inline constexpr int kPhasesAhead = 4;          // phases, and rows of the table, that the loader may be ahead
inline constexpr int kLongestWarpRow = 2048;    // bytes of a row that one warp may work on, see rows_by_warp
inline constexpr int kLaneRowPad = 64;          // between rows that a warp's lanes work on, in other banks
inline constexpr int kMaxTileBytes = 96 << 10;  // of a tile task: the ring needs the rest

// Entries in flight: of full slots, what keeps an H200's memory busy. With two thirds of them it is not, and more do
// not come sooner: they queue in front of what the consumers poll, which takes 1.5 microseconds with all of a ring
// of 25.
constexpr uint32_t entries_in_flight(uint32_t entry_bytes) {
  constexpr uint32_t kMost = 9;
  return entry_bytes <= kMinSlotBytes ? kMost : (kMost * kMinSlotBytes + entry_bytes / 2) / entry_bytes;
}

// Positions of a tile of attention's keys and values: as many as the tensor cores take at once, if their keys fit an
// entry of the ring.
constexpr int kv_tile(int row_bytes) {
  int tile = 1;
  while (tile < 16 && 2 * tile * row_bytes <= kMinSlotBytes) tile *= 2;
  return tile;
}

// Sums of a tile's runs of entries wait in shared memory for each other, see linear::compute_shared: kSumsOfRun of
// each, in a place that the number of the entry behind the run gives. When the entry kSumsKept later has come, the warp
// that added up the tile has released entries of a later run, if this holds, since the ring is filled in order.
inline constexpr uint32_t kSumsOfRun = 2, kSumsKept = 64;
constexpr bool keeps_sums(uint32_t tile_entries, uint32_t run, uint32_t consumer_warps) {
  return tile_entries + consumer_warps * run <= kSumsKept - kMaxSlots;
}

// Attention of many positions by tensor cores: bytes from row to row of keys or values that come by themselves, of
// which 8 are to lie in different banks; bytes of a row that comes in boxes; and whether a warp keeps its queries in
// registers, beside results, or reads them again for each tile of keys.
inline constexpr int kLargestHead = 256;
constexpr int key_row_pitch(int row_bytes) { return ((row_bytes / kAccessBytes + 1) | 1) * kAccessBytes; }
constexpr int boxed_row_bytes(int row_bytes) { return (row_bytes + 127) / 128 * 128; }
constexpr bool keeps_queries(int size, int value_size) { return size / 4 + value_size / 2 <= 144; }
constexpr int queries_bytes(int size) { return kWarpRows * key_row_pitch(2 * size); }

// Boxes: kBoxColumns columns of some rows of a matrix after the other, so that a row has as many bytes as the copy
// engine's swizzle works on, which repeats after kBoxAlignment bytes.
inline constexpr int kBoxColumns = 64, kBoxRowBytes = 128, kBoxAlignment = 1024;

// How linear's variant for several rows uses shared memory (see RowsShape): windows onto x that it holds at most, the
// warps that bring them, and floats from row to row of a block's sums, so that they meet no bank conflicts.
inline constexpr int kWindows = 4, kBringingWarps = 3, kSumPitch = 20;
// Rows of x that warpgroups multiply boxes of weights with; columns that a window of theirs has at most, and that all
// of them have. Copies of 32 KB come faster than more of 16 (docs/experiments.md).
inline constexpr int kMultipliedRows = 64, kWidestWindow = 256, kColumnsAtHand = 512;
constexpr int windows_held(int columns) {
  return kColumnsAtHand / columns < kWindows ? kColumnsAtHand / columns : kWindows;
}

static_assert(kMinSlotBytes % kAccessBytes == 0 && kMaxSlotBytes % kAccessBytes == 0);
static_assert(kTileSlotBytes % kBoxAlignment == 0);

}  // namespace mpk
