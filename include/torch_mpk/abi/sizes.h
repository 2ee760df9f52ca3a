// Sizes of a CTA, its ring and its accesses that code generation reckons with and device code is written for.
#pragma once

#include <cstdint>

namespace mpk {

// The widest access of a lane; bulk copies move multiples of it. What is read or copied so begins at multiples of it.
inline constexpr int kAccessBytes = 16;

// The warps of a CTA. Threads are charged registers in units of 128 threads: 12 warps may have 168 registers each, 13
// only 128, and the tasks need more.
inline constexpr int kConsumerWarps = 11;
inline constexpr int kConsumerThreads = 32 * kConsumerWarps;
inline constexpr int kLoaderWarps = 1;
inline constexpr int kThreads = kConsumerThreads + 32 * kLoaderWarps;

// Slots of the ring. A kernel's are as large as its weights' rows fill best, see choose_slot_bytes in csrc/schedule.
inline constexpr int kMinSlotBytes = 8192, kMaxSlotBytes = 12288, kMaxSlots = 28;
inline constexpr int kFewestSlots = 2;

// Shared memory: a fixed part (see Shared) of so many bytes at most, rows of the table, what jobs stage, the ring. Each
// begins at a multiple of kSharedAlignment.
inline constexpr int kMaxFixedBytes = 4096, kSharedAlignment = 128;
inline constexpr int kPhasesAhead = 4;          // phases, and rows of the table, that the loader may be ahead
inline constexpr int kLongestWarpRow = 2048;    // bytes of a row that one warp may work on, see rows_by_warp
inline constexpr int kMaxTileBytes = 96 << 10;  // of a tile task: the ring needs the rest

// Entries in flight: of full slots, what keeps an H200's memory busy. With two thirds of them it is not, and more do
// not come sooner: they queue in front of what the consumers poll, which takes 1.5 microseconds with all of a ring
// of 25.
constexpr uint32_t entries_in_flight(uint32_t entry_bytes) {
  constexpr uint32_t kMost = 9;
  return entry_bytes <= kMinSlotBytes ? kMost : (kMost * kMinSlotBytes + entry_bytes / 2) / entry_bytes;
}

// Sums of a tile's runs of entries wait in shared memory for each other, see linear::compute_shared: kSumsOfRun of
// each, in a place that the number of the entry behind the run gives. When the entry kSumsKept later has come, the warp
// that added up the tile has released entries of a later run, if this holds, since the ring is filled in order.
inline constexpr uint32_t kSumsOfRun = 2, kSumsKept = 64;
constexpr bool keeps_sums(uint32_t tile_entries, uint32_t run) {
  return tile_entries + kConsumerWarps * run <= kSumsKept - kMaxSlots;
}

static_assert(kMinSlotBytes % kAccessBytes == 0 && kMaxSlotBytes % kAccessBytes == 0);

}  // namespace mpk
