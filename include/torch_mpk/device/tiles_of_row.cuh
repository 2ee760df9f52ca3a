// Tiles of rows that a job makes, computed behind each row, see csrc/kernels/tiles_of_row.h.
#pragma once

#include "torch_mpk/device/tile.cuh"

namespace mpk {

// A warp computes every `step`th tile of the row from `first` on. Tiles, a tile task's struct, finds the row where
// other tiles have their shared memory.
template <class Tiles, uint32_t num_rows, class T>
MPK_DEVICE void compute_tiles_of_row(const Job& job, uint32_t row, const T* data, uint32_t first, uint32_t step,
                                     int lane) {
  __builtin_assume(__isShared(data));
  static_assert(Tiles::template shared_bytes<Tiles>() == 0,
                "a task behind rows has no shared memory: kSharedBytes = 0");
  constexpr uint32_t kOfRow = Tiles::kTiles / num_rows;
  WarpTile threads{lane};
  uint8_t* place = reinterpret_cast<uint8_t*>(const_cast<T*>(data));
  for (uint32_t i = first; i < kOfRow; i += step) Tiles::template compute<Tiles>(threads, job, row * kOfRow + i, place);
}

// A job of rows and their tiles, whose code may need all registers: of a row that all warps share, or of a warp's rows.
template <class V, class C>
MPK_DEVICE void run_rows_of_tiles(C& c, const Job& job) {
  if (!c.await()) return;
  const auto run = [&] {
    run_rows<V>(c, job);
    return c.alive;
  };
  if constexpr (kByWarp<V>)
    c.call(run);
  else
    run();
}

}  // namespace mpk
