// Timestamps of a profiled kernel's warps, see abi/control.h. In other kernels this is neither code nor data.
#pragma once

#include "torch_mpk/abi/control.h"
#include "torch_mpk/abi/table.h"
#include "torch_mpk/device/ptx.cuh"

namespace mpk {

// Byte offsets of the stamps of a launch.
template <class Kernel>
struct StampPlaces {
  static constexpr int64_t kPhases = phase_stamps_offset(Kernel::kNumWorkers);
  static constexpr int64_t kLoaders = loader_stamps_offset(Kernel::kNumWorkers, Kernel::kNumPhases);
  static constexpr int64_t kLaunchBytes = launch_stamps_bytes(Kernel::kNumWorkers, Kernel::kNumPhases);

  static MPK_DEVICE uint8_t* of_launch(Control* control, uint32_t epoch) {
    return reinterpret_cast<uint8_t*>(control) + Kernel::kStampsOffset + epoch % kLaunchesKept * kLaunchBytes;
  }
  static MPK_DEVICE WorkerStamps& of_worker(Control* control, uint32_t epoch) {
    return reinterpret_cast<WorkerStamps*>(of_launch(control, epoch))[blockIdx.x];
  }
};

template <class Kernel>
inline constexpr bool kProfiled = Kernel::kStampsOffset != 0;

// For each rank, the cycles for which a worker has waited for it in a phase.
template <class Kernel>
MPK_DEVICE uint32_t* stamps_of_ranks(Control* control, uint32_t epoch, uint32_t phase, int ranks) {
  uint8_t* all = reinterpret_cast<uint8_t*>(control) + Kernel::kStampsOffset +
                 kLaunchesKept * StampPlaces<Kernel>::kLaunchBytes +
                 epoch % kLaunchesKept * rank_stamps_bytes(Kernel::kNumWorkers, Kernel::kNumPhases, ranks);
  return reinterpret_cast<uint32_t*>(all) + (int64_t(blockIdx.x) * Kernel::kNumPhases + phase) * ranks;
}

// A moment by both clocks. The shared one may stand still for a microsecond: this is where it has just moved on.
MPK_DEVICE void read_clocks(uint64_t& ns, uint32_t& cycles) {
  const uint64_t before = ptx::global_time_ns();
  do ns = ptx::global_time_ns();
  while (ns == before);
  cycles = ptx::clock();
}

// One thread of the worker calls it before all other stamps of the launch.
template <class Kernel>
MPK_DEVICE void stamp_begin(Control* control, uint32_t epoch) {
  if constexpr (kProfiled<Kernel>) {
    WorkerStamps& stamps = StampPlaces<Kernel>::of_worker(control, epoch);
    read_clocks(stamps.begin_ns, stamps.begin);
  }
}

// One thread calls it after all other stamps, if the worker has completed the launch.
template <class Kernel>
MPK_DEVICE void stamp_end(Control* control, uint32_t epoch) {
  if constexpr (kProfiled<Kernel>) {
    WorkerStamps& stamps = StampPlaces<Kernel>::of_worker(control, epoch);
    read_clocks(stamps.end_ns, stamps.end);
    stamps.launch = epoch + 1;
  }
}

// The bytes of the tiles that belong to a matrix, in all its parts.
MPK_DEVICE uint32_t streamed_bytes(const Stream& stream, const MatrixRow& matrix, Span tiles) {
  if (tiles.end <= matrix.first_tile) return 0;
  const uint32_t begin = (max(tiles.begin, matrix.first_tile) - matrix.first_tile) * stream.tile_rows;
  const uint32_t end = min((tiles.end - matrix.first_tile) * stream.tile_rows, matrix.num_rows);
  return begin < end ? (end - begin) * stream.row_bytes * stream.parts : 0;
}

// A role's stamps of the running phase.
template <class Kernel, class Stamps, bool profiled = kProfiled<Kernel>>
struct PhaseClock {
  Stamps stamps{};

  MPK_DEVICE void stamp(uint32_t Stamps::* when) { stamps.*when = ptx::clock(); }
  MPK_DEVICE void stamp_first(uint32_t Stamps::* when) {
    if (stamps.*when == 0) stamp(when);
  }
  // Begins the next phase. After the last job of a phase, one thread stores the stamps at this offset of the launch's.
  MPK_DEVICE void next_stamps(Control* control, uint32_t epoch, int64_t offset, uint32_t phase, bool leaves) {
    Stamps* all = reinterpret_cast<Stamps*>(StampPlaces<Kernel>::of_launch(control, epoch) + offset);
    if (leaves) all[blockIdx.x * Kernel::kNumPhases + phase] = stamps;
    stamps = {};
    stamp(&Stamps::begin);
  }
};

template <class Kernel, class Stamps>
struct PhaseClock<Kernel, Stamps, false> {
  MPK_DEVICE void stamp(uint32_t Stamps::*) {}
  MPK_DEVICE void stamp_first(uint32_t Stamps::*) {}
  MPK_DEVICE void next_stamps(Control*, uint32_t, int64_t, uint32_t, bool) {}
};

}  // namespace mpk
