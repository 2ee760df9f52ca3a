// Device code of listed.cpp.
#pragma once

#include "torch_mpk/device/megakernel.cuh"
#include "torch_mpk/device/ring.cuh"
#include "torch_mpk/device/row.cuh"

namespace mpk::listed {

// A worker's places of the list, one for each lane, and those among them that name a row. The loader and the consumers
// each find them.
template <class V>
struct Mine {
  uint32_t place, are_rows, count;
  bool is_mine, is_row;

  MPK_DEVICE Mine(const int64_t* ids, uint32_t worker, uint32_t num_workers, int lane) {
    const Span span = static_span(V::kListed, worker, num_workers);
    place = span.begin + lane;
    is_mine = place < span.end;
    const int64_t id = is_mine ? ids[place] : -1;
    is_row = id >= 0 && id < V::kRows;
    are_rows = __ballot_sync(~0u, is_row);
    count = __popc(are_rows);
  }

  // The place of a row, by its number among those of the worker.
  MPK_DEVICE uint32_t operator[](uint32_t number) const {
    uint32_t rest = are_rows;
    for (; number > 0; number--) rest &= rest - 1;
    return place - threadIdx.x % 32 + __ffs(rest) - 1;
  }
};

template <int slots, int slot_bytes>
struct Row {
  const RingWriter<slots, slot_bytes>& w;
  uint32_t tile;
  const uint8_t* from;
  uint32_t bytes;

  MPK_DEVICE void start(uint8_t* to, uint64_t* full) const {
    if constexpr (arch::kHasBulkCopies) ptx::mbar_arrive_expect(full, bytes);
    w.copy(to, from, bytes, 1, bytes, full);
    if constexpr (!arch::kHasBulkCopies) ptx::copy_async_arrive(full);
  }
};

template <class V, class L>
MPK_DEVICE void load(L& l, const Job& job) {
  using Config = typename L::Config;
  constexpr uint32_t kBytes = V::kSize * sizeof(typename V::T);
  const int64_t* ids = V::ids(job);
  const Mine<V> mine(ids, l.worker(job), Config::kNumWorkers, l.lane);
  if (mine.count == 0) return;
  l.fill_by(mine.count, mine.count * kBytes, [&] {
    return fill_entries(l.ring, mine.count, entries_in_flight(kBytes), l.phase, [&](uint32_t number) {
      const uint32_t place = mine[min(number, mine.count - 1)];
      const auto* from = reinterpret_cast<const uint8_t*>(V::table(job) + ids[place] * V::kPitch);
      return Row<Config::kSlots, Config::kSlotBytes>{l.ring, place, from, kBytes};
    });
  });
}

template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  using T = typename V::T;
  if (!c.await()) return;
  const Mine<V> mine(V::ids(job), c.worker(job), C::Config::kNumWorkers, c.lane);
  for (uint32_t i = c.warp; i < mine.count; i += kConsumerWarps) {
    const uint32_t entry = c.entry + i;
    if (!c.ring.wait(entry, c.phase)) {
      c.failed = true;
      return;
    }
    const T* row = reinterpret_cast<const T*>(c.ring.slot(entry));
    float sum = 0;
    for (int k = c.lane; k < V::kSize; k += 32) sum += to_float(row[k]);
    sum = warp_sum(sum);
    const uint32_t place = c.ring.word_of(entry);
    c.ring.release(entry);
    if (c.lane == 0) V::y(job)[place] = cast<T>(sum);
  }
  if (c.warp == 0 && mine.is_mine && !mine.is_row) V::y(job)[mine.place] = cast<T>(0.0f);
  c.entry += mine.count;
}

}  // namespace mpk::listed
