// The loader warp: it publishes the table's rows, and goes through the phases ahead of the consumers.
#pragma once

#include "torch_mpk/device/launch.cuh"

namespace mpk {

// The loader warp's view. All 32 lanes run its code together.
template <class Kernel>
struct Loader : Launch<Kernel>, PhaseClock<Kernel, LoaderStamps> {
  using Config = Kernel;
  int lane;
  RingWriter<Kernel::kSlots, Kernel::kSlotBytes> ring;
  uint32_t phase = 0;
  bool failed = false;

  MPK_DEVICE Loader(const Launch<Kernel>& launch, int lane)
      : Launch<Kernel>(launch),
        lane(lane),
        ring{launch.shared.ring, launch.smem + Kernel::kRingOffset, launch.shared.watchdog, lane} {}

  MPK_DEVICE uint32_t worker(const Job& job) const { return (blockIdx.x + job.row->rotation) % Kernel::kNumWorkers; }

  // A ticket to draw from a counter meanwhile. Lane 0 has it.
  struct Draw {
    uint32_t* from;
    uint32_t ticket;
  };

  // Streams tiles, see fill_ring. False when the launch was aborted: return at once.
  MPK_DEVICE bool fill(const Stream& stream, const uint64_t* data, const MatrixRow* matrices, Span tiles,
                       Draw* draw = nullptr) {
    const uint32_t end = ring.entry + (tiles.end - tiles.begin) * stream.entries;
    if constexpr (kProfiled<Kernel>) this->stamps.bytes += streamed_bytes(stream, *matrices, tiles);
    const bool draws = draw != nullptr && draw->from != nullptr;
    const uint64_t filled = fill_ring(ring, stream, data, matrices, tiles, phase, draws ? draw->from : nullptr);
    if (draws) *draw = {nullptr, static_cast<uint32_t>(filled >> 32)};
    ring.entry = static_cast<uint32_t>(filled);
    failed = ring.entry != end;
    return !failed;
  }

  // A job's own code streams `count` entries of `bytes` in all. fill() returns the next entry, as fill_ring does.
  template <class Fill>
  MPK_DEVICE bool fill_by(uint32_t count, [[maybe_unused]] uint32_t bytes, Fill fill) {
    const uint32_t end = ring.entry + count;
    if constexpr (kProfiled<Kernel>) this->stamps.bytes += bytes;
    ring.entry = fill();
    failed = ring.entry != end;
    return !failed;
  }

  // Loads what the table says of a job. That is all, unless the job has load code of its own. Where warpgroups
  // multiply, that code loads everything, and awaits what it must.
  MPK_DEVICE void load([[maybe_unused]] const Job& job) {
#if MPK_WARPGROUPS == 0
    if (await(job) && job.row->num_matrices != 0) load_matrices(job, *stream_of(job));
#endif
  }

  // Waits for results of this launch that the job's copies depend on. False when the launch was aborted.
  MPK_DEVICE bool await(const Job& job) {
    const uint32_t num_waits = job.row->num_loader_waits;
    const uint64_t* waits = job.refs() + job.row->num_refs;
    if (num_waits != 0) this->stamp(&LoaderStamps::waits);
#pragma unroll 1
    for (uint32_t i = 0; i < num_waits && !failed; i++) {
      const uint32_t event = static_cast<uint32_t>(waits[i]);
      failed = !__all_sync(~0u, wait_event(this->shared.watchdog, this->event(event), this->event_target(), phase,
                                           WarpRole::kLoader, event));
    }
    if (num_waits != 0) {
      this->stamp(&LoaderStamps::awaited);
      ptx::fence_proxy_async();
    }
    return !failed;
  }

  // A row of the table: one access for each lane, or two if rows are long.
  struct Row {
    static constexpr int kAccesses = Kernel::kRowBytes > 32 * kAccessBytes ? 2 : 1;
    uint4 accesses[kAccesses];
    static_assert(sizeof(uint4) == kAccessBytes && Kernel::kRowBytes % kAccessBytes == 0);
    static_assert(Kernel::kRowBytes <= kMaxRowBytes);
  };
  MPK_DEVICE Row load_row(uint32_t number) const {
    Row row{};
    const uint4* from = reinterpret_cast<const uint4*>(this->table() + number * Kernel::kRowBytes);
#pragma unroll
    for (int i = 0; i < Row::kAccesses; i++)
      if (32 * i + lane < Kernel::kRowBytes / kAccessBytes) row.accesses[i] = __ldg(from + 32 * i + lane);
    return row;
  }

  // Writes a row, loaded earlier, to shared memory once its place there is free. Null when the launch was aborted.
  MPK_DEVICE const PhaseRow* publish_row(uint32_t number, const Row& row) {
    Shared& s = this->shared;
    const uint32_t target = number + 1 - kPhasesAhead;
    const uint32_t seen =
        wait_count(s.watchdog, &s.done, target, phase, WarpRole::kLoader, Waiting::kFreeSlot, ring.entry);
    if (!__all_sync(~0u, reached(seen, target))) return nullptr;
    if (number >= kPhasesAhead) s.await_finished(number - kPhasesAhead);
    uint8_t* place = this->place_of(number);
#pragma unroll
    for (int i = 0; i < Row::kAccesses; i++)
      if (32 * i + lane < Kernel::kRowBytes / kAccessBytes)
        reinterpret_cast<uint4*>(place)[32 * i + lane] = row.accesses[i];
    __syncwarp();
    const PhaseRow* phase_row = reinterpret_cast<const PhaseRow*>(place);
    const JobRow* job = first_job(phase_row);
    for (uint32_t j = 0; j < phase_row->num_jobs; j++, job = next_job(job)) {
      uint64_t* refs = reinterpret_cast<uint64_t*>(place + (reinterpret_cast<const uint8_t*>(job + 1) - place));
      for (uint32_t i = lane; i < job->num_refs; i += 32) refs[i] = address(refs[i]);
    }
    __syncwarp();
    s.publish(number);
    if (lane == 0) ptx::store_release_cta(&s.described, number + 1);
    return phase_row;
  }

 private:
  // Loads this worker's tiles of each of a job's matrices.
  MPK_DEVICE void load_matrices(const Job& job, const StreamRow& row) {
    constexpr uint32_t kWorkers = Kernel::kNumWorkers;
    const MatrixRow* matrices = reinterpret_cast<const MatrixRow*>(&row + 1);
    const uint32_t count = job.row->num_matrices, num_tiles = matrices[count - 1].end_tile;
    if constexpr (Kernel::kHasBoxes)
      if (row.stream.chunk_parts == 0) return load_boxes(job, row, matrices);
    const Tickets tickets = row.tickets;
    const bool claimed = tickets.size != 0;
    Span mine = claimed ? Span{} : static_span(num_tiles, worker(job), kWorkers);
    uint32_t ticket = worker(job);  // the worker's own: every kWorkers'th
#pragma unroll 1
    for (uint32_t number = 0;; number++) {
      Draw draw{claimed && number + 1 >= tickets.own ? this->ticket(phase) : nullptr, 0};
      if (number < tickets.own) mine = ticket_tiles(tickets, num_tiles, ticket);
#pragma unroll 1
      for (uint32_t i = 0; i < count; i += row.stream.parts) {
        const Span tiles{max(mine.begin, matrices[i].first_tile), min(mine.end, matrices[i].end_tile)};
        if (tiles.begin < tiles.end && !fill(row.stream, job.refs() + i, matrices + i, tiles, &draw)) return;
      }
      if (!claimed) return;
      ticket += kWorkers;
      if (number + 1 < tickets.own) continue;
      if (draw.from != nullptr) draw.ticket = lane == 0 ? ptx::fetch_add_relaxed_gpu(draw.from, 1) : 0;
      // Each worker draws until it draws in vain once, so the counter advances by a known amount in every launch and is
      // never reset.
      const uint32_t drawn = __shfl_sync(~0u, draw.ticket, 0) - this->epoch * (tickets.drawn + kWorkers);
      if (drawn >= tickets.drawn) return;
      mine = ticket_tiles(tickets, num_tiles, tickets.own * kWorkers + drawn);
    }
  }

  // The same as boxes, with the tiles of all matrices side by side.
  MPK_DEVICE void load_boxes(const Job& job, const StreamRow& row, const MatrixRow* matrices) {
    const uint32_t num_tiles = matrices[job.row->num_matrices - 1].end_tile;
    const uint32_t split = row.stream.entries, group = worker(job) / split, part = worker(job) - group * split;
    const Span mine = shared_span(num_tiles, worker(job), split, Kernel::kNumWorkers);
    Stream stream = row.stream;
    stream.chunks /= split;
#pragma unroll 1
    for (uint32_t first = mine.begin; first < mine.end && !failed; first += row.run) {
      const Span pass{first, min(mine.end, first + row.run)};
      const uint32_t begin = part * stream.chunks, from = group % stream.chunks * stream.rotates;
      uint32_t end = ring.entry + (pass.end - pass.begin) * stream.parts * stream.chunks;
      const auto fill = [&] { return fill_boxes(ring, stream, job.refs(), matrices, pass, begin, from, phase); };
      if constexpr (Kernel::kJoinsBoxes) {
        const bool joins = stream.box_order == kJoined;
        if (joins) end = ring.entry + (pass.end - pass.begin) * stream.chunks;
        ring.entry = joins ? fill_joined_boxes(ring, stream, job.refs(), matrices, pass, begin, from, phase) : fill();
      } else {
        ring.entry = fill();
      }
      failed = ring.entry != end;
      if constexpr (kProfiled<Kernel>)
        for (uint32_t i = 0; i < job.row->num_matrices; i += stream.parts)
          this->stamps.bytes += streamed_bytes(stream, matrices[i], pass) / split;
    }
  }

  MPK_DEVICE uint64_t address(uint64_t ref) const {
    const uint32_t index = ref_index(ref);
    const void* base = index == kMapsIndex        ? this->params.maps
                       : index == kPolledIndex    ? this->polled(this->epoch)
                       : index == kWorkspaceIndex ? this->params.workspace
                       : index == kControlIndex   ? static_cast<const void*>(this->params.control)
                       : index == kNumberIndex    ? nullptr
                                                  : this->pointers[index];
    return reinterpret_cast<uint64_t>(base) + ref_offset(ref);
  }
};

template <class Kernel>
MPK_DEVICE void run_loader(const Launch<Kernel>& launch, int lane) {
  Loader<Kernel> l(launch, lane);
  l.stamp(&LoaderStamps::begin);
  auto next = l.load_row(0);
#pragma unroll 1
  for (uint32_t number = 0; number < Kernel::kNumRows; number++) {
    delay(launch.params.jitter, blockIdx.x, ~number);
    const PhaseRow* row = l.publish_row(number, next);
    if (row == nullptr) break;
    l.stamp_first(&LoaderStamps::described);
    if (number + 1 < Kernel::kNumRows) next = l.load_row(number + 1);
    const JobRow* job = first_job(row);
    const uint32_t num_jobs = row->num_jobs;
    const bool last = row->last != 0;
#pragma unroll 1
    for (uint32_t j = 0; j < num_jobs && !l.failed; j++, job = next_job(job)) {
      l.lane = l.ring.lane = ptx::thread_index() % 32;
      const Job running{job, &launch.params};
      l.load(running);
      if (!l.failed) Kernel::load(l, running);
    }
    if (l.failed) break;
    if (!last) continue;
    l.stamp(&LoaderStamps::loaded);
    l.next_stamps(launch.params.control, launch.epoch, StampPlaces<Kernel>::kLoaders, l.phase, lane == 0);
    l.ring.end_phase(l.phase++);
  }
  l.ring.drain();
}

}  // namespace mpk
