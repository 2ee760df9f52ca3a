// The persistent kernel: roles, phases, and the way out.
//
// One CTA runs on each multiprocessor. Consumer warps go through the phases in order; within a phase each runs
// its share of every job. Where the phase's event is awaited, they then meet at a barrier, and the CTA signals it once;
// otherwise they meet in the next phase, before it overwrites what some of them may still read. A loader warp goes
// through the same phases as far ahead of them as the ring allows, streaming what the jobs will need. Generated code
// supplies a `Kernel`:
//
//   static constexpr int kFullArrivals, kEmptyArrivals;                  // see WarpLayout
//   static constexpr int kNumRows, kNumPhases, kNumWorkers, kSlots, kSlotBytes, kNumOutputs;
//   static constexpr int kRowBytes;                                      // of a row of the table
//   static constexpr int kRowsOffset, kStagedOffset, kRingOffset;        // shared memory, see Shared
//   static constexpr bool kHasBoxes;                                     // some entries of the ring are boxes
//   static constexpr bool kHasWindows;                                   // some jobs use Windows
//   static constexpr int kWindowsOffset;                                 // then
//   static constexpr int64_t kEventsOffset, kTicketsOffset, kStallsOffset, kOutputsOffset;
//   static constexpr int64_t kStampsOffset;                              // 0: not profiled
//   static constexpr int64_t kPolledOffset, kPolledBytes;                // of the workspace, see Launch::polled
//   template <class C> static void compute(C& c, const Job& job);        // a switch over the job's variant
//   template <class L> static void load(L& l, const Job& job);           // what the table does not say
//
// Giving up: a wait that is given up returns false. A consumer warp then sets `failed`, does no more work, and goes on
// to the next barrier of the group, where all learn of it and leave; so no barrier is left waiting.
#pragma once

#include "torch_mpk/device/ring.cuh"
#include "torch_mpk/device/stamps.cuh"
#include "torch_mpk/device/warps.cuh"

namespace mpk {

// In a kernel for racecheck, what `described` and `done` say of rows of the table as barriers, too; otherwise nothing.
struct RowBarriers {
#ifdef MPK_RACECHECK
  uint64_t shown[kPhasesAhead], finished[kPhasesAhead];

  MPK_DEVICE void init() {
    for (int i = 0; i < kPhasesAhead; i++) {
      ptx::mbar_init(&shown[i], 32);
      ptx::mbar_init(&finished[i], kConsumerThreads);
    }
  }
  MPK_DEVICE void show(uint32_t row) { ptx::mbar_arrive(&shown[row % kPhasesAhead]); }
  MPK_DEVICE void finish(uint32_t row) { ptx::mbar_arrive(&finished[row % kPhasesAhead]); }
  MPK_DEVICE void await_shown(uint32_t row) { await(shown, row); }
  MPK_DEVICE void await_finished(uint32_t row) { await(finished, row); }

 private:
  MPK_DEVICE void await(uint64_t* barriers, uint32_t row) {
    while (!ptx::mbar_test(&barriers[row % kPhasesAhead], row / kPhasesAhead & 1)) {
    }
  }
#else
  MPK_DEVICE void init() {}
  MPK_DEVICE void show(uint32_t) {}
  MPK_DEVICE void finish(uint32_t) {}
  MPK_DEVICE void await_shown(uint32_t) {}
  MPK_DEVICE void await_finished(uint32_t) {}
#endif
};

// The fixed part of dynamic shared memory; behind it kPhasesAhead rows of the table (kRowsOffset), the staged
// activations (kStagedOffset), then the ring (kRingOffset).
struct Shared : RowBarriers {
  RingState ring;
  Watchdog watchdog;
  uint32_t described;  // rows of the table that the loader has brought
  uint32_t done;       // rows that the consumers have finished
  uint32_t word;       // for broadcasts within the group
  alignas(16) float partials[2][(kConsumerWarps + 3) / 4 * 4];
  uint64_t run_sums[kSumsKept][kSumsOfRun];  // each below the number of the entry behind its run
  uint64_t data[2];                          // of matrices that a job's own code has the loader stream, see fill_ring
  MatrixRow matrices[2];
};

// The last warp's: the last ones have fewer neighbours to share their scheduler with.
inline constexpr int kPollingThread = kConsumerThreads - 32;

// A job of the running phase, as tasks see it.
struct Job {
  const JobRow* row;
  const LaunchParams* params;
  uint32_t variant;  // the row's
  uint32_t first_ref = 0;

  MPK_DEVICE Job(const JobRow* row, const LaunchParams* params) : row(row), params(params), variant(row->variant) {}

  // The same job, seen by code whose references begin with number `first`.
  MPK_DEVICE Job from(uint32_t first) const {
    Job job = *this;
    job.first_ref = first;
    return job;
  }

  MPK_DEVICE const uint64_t* refs() const { return reinterpret_cast<const uint64_t*>(row + 1) + first_ref; }
  template <class T>
  MPK_DEVICE T* pointer(int i) const {
    T* p = reinterpret_cast<T*>(refs()[i]);
    __builtin_assume(__isGlobal(p));
    return p;
  }
  MPK_DEVICE int32_t number(int i) const { return static_cast<int32_t>(refs()[i]); }
};

// What a job that streams matrices has of them; the matrices follow.
MPK_DEVICE const StreamRow* stream_of(const Job& job) {
  return reinterpret_cast<const StreamRow*>(job.refs() + (job.row->num_refs + job.row->num_loader_waits));
}

MPK_DEVICE const uint32_t* waits_of(const PhaseRow* phase) { return reinterpret_cast<const uint32_t*>(phase + 1); }
MPK_DEVICE const JobRow* first_job(const PhaseRow* phase) {
  constexpr uint32_t kWords = kAccessBytes / sizeof(uint32_t);
  return reinterpret_cast<const JobRow*>(waits_of(phase) + (phase->num_waits + kWords - 1) / kWords * kWords);
}
MPK_DEVICE const JobRow* next_job(const JobRow* job) {
  return reinterpret_cast<const JobRow*>(reinterpret_cast<const uint8_t*>(job) + job->bytes);
}

// Until the events of a phase have come. Out of line as the other waits are, see event.cuh. The last phase, which
// advances counters, does not begin where another worker has given up: one that stalled may have signalled since.
MPK_OUT_OF_LINE bool wait_events(const Watchdog& dog, const PhaseRow* waiting, const uint32_t* events, uint32_t target,
                                 uint32_t phase, bool is_last) {
  for (uint32_t i = 0; i < waiting->num_waits; i++) {
    const uint32_t event = waits_of(waiting)[i];
    if (!wait_event(dog, events + event * kEventStride, target, phase, WarpRole::kConsumer, event)) return false;
  }
  return !is_last || ptx::load_relaxed_gpu(&dog.control->aborted) == 0;
}

// Windows onto what some consumer warps bring to shared memory and the others work on: columns of x, or the rows that a
// piece of attention needs.
struct Windows {
  uint64_t full[kWindows], empty[kWindows];

  MPK_DEVICE void init() {
    for (int i = 0; i < kWindows; i++) {
      ptx::mbar_init(&full[i], 32 * kBringingWarps);
      ptx::mbar_init(&empty[i], kConsumerWarps - kBringingWarps);
    }
  }
};

// What both roles know of the launch.
template <class Kernel>
struct Launch {
  const LaunchParams& params;
  void* const* pointers;
  Shared& shared;
  uint8_t* smem;
  uint32_t epoch;

  MPK_DEVICE uint32_t* event(uint32_t phase) const {
    return control_word(Kernel::kEventsOffset) + phase * kEventStride;
  }
  MPK_DEVICE uint32_t* ticket(uint32_t phase) const {
    return control_word(Kernel::kTicketsOffset) + phase * kEventStride;
  }
  MPK_DEVICE uint32_t event_target() const { return (epoch + 1) * Kernel::kNumWorkers; }
  MPK_DEVICE uint32_t* control_word(int64_t offset) const {
    return reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(params.control) + offset);
  }
  // Where a row of the table stands in shared memory.
  MPK_DEVICE uint8_t* place_of(uint32_t row) const {
    return smem + Kernel::kRowsOffset + row % kPhasesAhead * Kernel::kRowBytes;
  }
  // Where polled vectors stand in launches of an epoch like this one.
  MPK_DEVICE uint8_t* polled(uint32_t epoch) const {
    return static_cast<uint8_t*>(params.workspace) + Kernel::kPolledOffset + epoch % 2 * Kernel::kPolledBytes;
  }
  MPK_DEVICE Windows& windows() const { return *reinterpret_cast<Windows*>(smem + Kernel::kWindowsOffset); }
  MPK_DEVICE const uint8_t* table() const { return static_cast<const uint8_t*>(params.table); }
};

// A consumer thread's view: the group's barrier, shared memory, the ring. `rank` is the thread's within the group.
template <class Kernel>
struct Consumer : Launch<Kernel>, PhaseClock<Kernel, PhaseStamps> {
  using Config = Kernel;
  int rank, warp, lane;
  // Where all warps multiply together, none owns an entry.
  RingReader<Kernel::kSlots, Kernel::kSlotBytes, MPK_WARPGROUPS == 0 ? Kernel::kEmptyArrivals : 1> ring;
  uint32_t row = 0, phase = 0;
  uint32_t entry = 0;    // the ring entry the running job begins with
  uint32_t window = 0;   // and the window of x
  bool failed = false;   // this warp gave up a wait
  bool alive = true;     // no warp of the group has, as far as the group knows
  bool awaited = false;  // the events of this phase have come
  bool apart = false;    // other warps may not be done with the phase before
  PhaseRow current{};    // the row's, in registers

  MPK_DEVICE Consumer(const Launch<Kernel>& launch, int thread)
      : Launch<Kernel>(launch),
        rank(thread),
        warp(thread / 32),
        lane(thread % 32),
        ring{launch.shared.ring, launch.smem + Kernel::kRingOffset, launch.shared.watchdog, thread % 32} {}

  // The barrier of the consumer group. False, for all of them, when one has given up: return at once.
  MPK_DEVICE bool sync() {
    if (alive) alive = !ptx::barrier_or<kConsumerThreads>(failed);
    return alive;
  }

  // At the beginning of a job: the compiler would otherwise compute what all jobs derive from these once for the whole
  // launch, and spill it.
  MPK_DEVICE void begin_job() {
    rank = ptx::thread_index();
    warp = rank / 32;
    lane = ring.lane = rank % 32;
  }

  // Shared memory for the running job, Kernel::kRingOffset - Kernel::kStagedOffset bytes, aligned to 128.
  MPK_DEVICE uint8_t* staged() const { return this->smem + Kernel::kStagedOffset; }

  // This worker's number as the job sees it.
  MPK_DEVICE uint32_t worker(const Job& job) const { return (blockIdx.x + job.row->rotation) % Kernel::kNumWorkers; }

  // Calls f, which does a job's work out of line, behind await(), and is false when the launch was given up. What is
  // kept from job to job stands in memory meanwhile: f may need all registers, and what the compiler itself moves to
  // memory for that, it leaves there for the whole launch.
  template <class F>
  MPK_DEVICE void call(F f) {
    volatile uint32_t kept[] = {row, phase, entry, window, ring.issued};
    alive = f();
    row = kept[0], phase = kept[1], entry = kept[2], window = kept[3], ring.issued = kept[4];
    failed = apart = false, awaited = true;
    current = *current_row();
  }

  // Waits for the next row of the table; null when the launch was given up.
  MPK_DEVICE const PhaseRow* next_row() {
    const uint32_t target = row + 1;
    uint32_t* described = &this->shared.described;
    if (!__all_sync(~0u, reached(ptx::load_acquire_cta(described), target))) {
      const uint32_t seen =
          wait_count(this->shared.watchdog, described, target, phase, WarpRole::kConsumer, Waiting::kLoader, entry);
      if (!__all_sync(~0u, reached(seen, target))) {
        failed = true;
        sync();
        return nullptr;
      }
    }
    this->shared.await_shown(row);
    current = *current_row();
    return current_row();
  }

  // Until the worker's warps are done with the phase before, and the events of this one have come; once a phase. A job
  // calls it where it first writes to shared memory, or reads what earlier phases of this launch wrote, or may have
  // written since the phase before the last; behind it elements are polled. False when the launch was given up.
  MPK_DEVICE bool await() {
    if (awaited) return alive;
    awaited = true;
    if (apart && !join(0)) return false;
    this->stamp(&PhaseStamps::joined);
    if (current.num_waits != 0) {
      if (rank == kPollingThread)
        failed = !wait_events(this->shared.watchdog, current_row(), this->event(0), this->event_target(), phase,
                              phase + 1 == Kernel::kNumPhases);
      if (!sync()) return false;
    }
    this->stamp(&PhaseStamps::ready);
    return true;
  }

  // Ends a row whose phase goes on.
  MPK_DEVICE bool end_row() {
    if (!sync()) return false;
    this->shared.finish(row);
    if (rank == 0) ptx::store_release_cta(&this->shared.done, row + 1);
    row++;
    return true;
  }

  // Ends the last row of a phase.
  MPK_DEVICE bool end_phase() {
    if (!await()) return false;
    this->stamp(&PhaseStamps::computed);
    this->next_stamps(this->params.control, this->epoch, StampPlaces<Kernel>::kPhases, phase, rank == 0);
    const uint32_t signal = current.signal;
    if (signal & kPublishes) ptx::fence_proxy_async();
    row++;
    phase++;
    awaited = false;
    apart = true;
    return (signal == 0 && phase < Kernel::kNumPhases) || join(signal);
  }

 private:
  // All warps are done with the phase before.
  MPK_DEVICE bool join(uint32_t signal) {
    apart = false;
    if (!sync()) return false;
    this->shared.finish(row - 1);
    if (rank == 0) {
      delay(this->params.jitter, blockIdx.x, 2 * row - 1);
      if (signal & kReleases) ptx::add_release_gpu(this->event(phase - 1), 1);
      ptx::store_release_cta(&this->shared.done, row);
    }
    return true;
  }

  MPK_DEVICE const PhaseRow* current_row() const { return reinterpret_cast<const PhaseRow*>(this->place_of(row)); }
};

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

  // A ticket to draw meanwhile, from a counter until it is drawn; lane 0 has it.
  struct Draw {
    uint32_t* from;
    uint32_t ticket;
  };

  // Streams tiles, see fill_ring; false when the launch was given up: return at once.
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

  // Has a job's own code stream `count` entries of `bytes` in all: fill() gives the next entry, as fill_ring does.
  template <class Fill>
  MPK_DEVICE bool fill_by(uint32_t count, [[maybe_unused]] uint32_t bytes, Fill fill) {
    const uint32_t end = ring.entry + count;
    if constexpr (kProfiled<Kernel>) this->stamps.bytes += bytes;
    ring.entry = fill();
    failed = ring.entry != end;
    return !failed;
  }

  // Loads what the table says of a job: all there is to load, unless it has code for the rest. Where warpgroups
  // multiply that code loads everything, and awaits what it must.
  MPK_DEVICE void load([[maybe_unused]] const Job& job) {
#if MPK_WARPGROUPS == 0
    if (await(job) && job.row->num_matrices != 0) load_matrices(job, *stream_of(job));
#endif
  }

  // Until what the launch computes, and the job's copies depend on, is there; false when the launch was given up.
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

  // A row of the table, one access and, of long rows, another for each lane.
  struct Row {
    static constexpr int kPieces = Kernel::kRowBytes > 32 * kAccessBytes ? 2 : 1;
    uint4 pieces[kPieces];
    static_assert(sizeof(uint4) == kAccessBytes && Kernel::kRowBytes % kAccessBytes == 0);
    static_assert(Kernel::kRowBytes <= kMaxRowBytes);
  };
  MPK_DEVICE Row load_row(uint32_t number) const {
    Row row{};
    const uint4* from = reinterpret_cast<const uint4*>(this->table() + number * Kernel::kRowBytes);
#pragma unroll
    for (int i = 0; i < Row::kPieces; i++)
      if (32 * i + lane < Kernel::kRowBytes / kAccessBytes) row.pieces[i] = __ldg(from + 32 * i + lane);
    return row;
  }

  // Brings a row, loaded earlier, into shared memory once its place there is free. Null when the launch was given up.
  MPK_DEVICE const PhaseRow* publish_row(uint32_t number, const Row& row) {
    Shared& s = this->shared;
    const uint32_t target = number + 1 - kPhasesAhead;
    const uint32_t seen =
        wait_count(s.watchdog, &s.done, target, phase, WarpRole::kLoader, Waiting::kFreeSlot, ring.entry);
    if (!__all_sync(~0u, reached(seen, target))) return nullptr;
    if (number >= kPhasesAhead) s.await_finished(number - kPhasesAhead);
    uint8_t* place = this->place_of(number);
#pragma unroll
    for (int i = 0; i < Row::kPieces; i++)
      if (32 * i + lane < Kernel::kRowBytes / kAccessBytes)
        reinterpret_cast<uint4*>(place)[32 * i + lane] = row.pieces[i];
    __syncwarp();
    const PhaseRow* phase_row = reinterpret_cast<const PhaseRow*>(place);
    const JobRow* job = first_job(phase_row);
    for (uint32_t j = 0; j < phase_row->num_jobs; j++, job = next_job(job)) {
      uint64_t* refs = reinterpret_cast<uint64_t*>(place + (reinterpret_cast<const uint8_t*>(job + 1) - place));
      for (uint32_t i = lane; i < job->num_refs; i += 32) refs[i] = address(refs[i]);
    }
    __syncwarp();
    s.show(number);
    if (lane == 0) ptx::store_release_cta(&s.described, number + 1);
    return phase_row;
  }

 private:
  // Of each of a job's matrices the tiles that are this worker's.
  MPK_DEVICE void load_matrices(const Job& job, const StreamRow& row) {
    constexpr uint32_t kWorkers = Kernel::kNumWorkers;
    const MatrixRow* matrices = reinterpret_cast<const MatrixRow*>(&row + 1);
    const uint32_t count = job.row->num_matrices, num_tiles = matrices[count - 1].end_tile;
#if MPK_ARCH >= 900
    if constexpr (Kernel::kHasBoxes)
      if (row.stream.chunk_parts == 0) return load_boxes(job, row, matrices);
#endif
    const Tickets tickets = row.tickets;
    const bool claimed = tickets.size != 0;
    Span mine = claimed ? Span{} : static_span(num_tiles, worker(job), kWorkers);
    uint32_t ticket = worker(job);  // of a worker's own: every kWorkers'th
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

#if MPK_ARCH >= 900
  // The same as boxes, tiles of all matrices side by side.
  MPK_DEVICE void load_boxes(const Job& job, const StreamRow& row, const MatrixRow* matrices) {
    const uint32_t num_tiles = matrices[job.row->num_matrices - 1].end_tile;
    const uint32_t split = row.stream.entries, group = worker(job) / split, part = worker(job) - group * split;
    const Span mine = shared_span(num_tiles, worker(job), split, Kernel::kNumWorkers);
    Stream stream = row.stream;
    stream.chunks /= split;
#pragma unroll 1
    for (uint32_t first = mine.begin; first < mine.end && !failed; first += row.run) {
      const Span pass{first, min(mine.end, first + row.run)};
      const uint32_t end = ring.entry + (pass.end - pass.begin) * stream.parts * stream.chunks;
      ring.entry = fill_boxes(ring, stream, job.refs(), matrices, pass, part * stream.chunks,
                              group % stream.chunks & -stream.chunks_of_x, phase);
      failed = ring.entry != end;
      if constexpr (kProfiled<Kernel>)
        for (uint32_t i = 0; i < job.row->num_matrices; i += stream.parts)
          this->stamps.bytes += streamed_bytes(stream, matrices[i], pass) / split;
    }
  }
#endif

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

// What the next launch polls: the one before this has read it.
template <class Kernel>
MPK_DEVICE void clear_polled(const Launch<Kernel>& launch) {
  uint4* pieces = reinterpret_cast<uint4*>(launch.polled(launch.epoch + 1));
  constexpr uint32_t kStep = Kernel::kNumWorkers * kConsumerThreads;
#pragma unroll 1
  for (uint32_t i = blockIdx.x * kConsumerThreads + threadIdx.x; i < Kernel::kPolledBytes / 16; i += kStep)
    pieces[i] = uint4{};
}

template <class Kernel>
MPK_DEVICE void run_consumer(Consumer<Kernel>& c) {
  if (c.rank == 0) stamp_begin<Kernel>(c.params.control, c.epoch);
  clear_polled(c);
  c.stamp(&PhaseStamps::begin);
  while (c.row < Kernel::kNumRows) {
    const PhaseRow* row = c.next_row();
    if (row == nullptr) return;
    delay(c.params.jitter, blockIdx.x, 2 * c.row);
    const JobRow* job = first_job(row);
#pragma unroll 1
    for (uint32_t j = 0; j < c.current.num_jobs; j++, job = next_job(job)) {
      if (j > 0 && !c.sync()) return;  // the previous job's staged data is no longer read
      c.begin_job();
      Kernel::compute(c, Job{job, &c.params});
      if (!c.alive) return;
    }
    if (c.current.last == 0 ? !c.end_row() : !c.end_phase()) return;
  }
  if (c.rank == 0) stamp_end<Kernel>(c.params.control, c.epoch);
}

// The last CTA to leave closes the launch: all others have finished. Called by all consumer threads.
template <class Kernel>
MPK_DEVICE void leave(Consumer<Kernel>& c) {
  Control& control = *c.params.control;
  c.failed = false;  // all threads come here past the same barrier, whether the launch was completed or given up
  c.alive = true;
  if (c.rank == 0)
    c.shared.word = ptx::fetch_inc_acq_rel_gpu(&control.exited, Kernel::kNumWorkers - 1) == Kernel::kNumWorkers - 1;
  c.sync();
  if (c.shared.word == 0) return;
  if (c.rank == 0) control.started = 0;
  if (ptx::load_acquire_gpu(&control.aborted) == 0) {
    if (c.rank == 0) control.epoch = c.epoch + 1;
    return;
  }
  const OutputRow* outputs = reinterpret_cast<const OutputRow*>(c.table() + Kernel::kOutputsOffset);
  for (int i = 0; i < Kernel::kNumOutputs; i++) {
    const OutputRow out = outputs[i];
    uint8_t* data = static_cast<uint8_t*>(c.pointers[out.index]);
    for (uint64_t b = c.rank * out.element; b < out.bytes; b += kConsumerThreads * out.element) {
      if (out.element == 2) *reinterpret_cast<uint16_t*>(data + b) = static_cast<uint16_t>(out.nan);
      if (out.element == 4) *reinterpret_cast<uint32_t*>(data + b) = static_cast<uint32_t>(out.nan);
      if (out.element == 8) *reinterpret_cast<uint64_t*>(data + b) = out.nan;
    }
  }
  __threadfence_system();
  c.sync();
  if (c.rank == 0) ptx::store_release_sys(c.params.host_abort, 1);
}

template <class Kernel>
MPK_DEVICE void run(const LaunchParams& params, void* const* pointers) {
  extern __shared__ __align__(1024) uint8_t smem[];
  Shared& shared = *reinterpret_cast<Shared*>(smem);
  static_assert(sizeof(Shared) <= kMaxFixedBytes, "the schedule leaves less room for the fixed shared memory");
  static_assert(Kernel::kRowsOffset % kAccessBytes == 0 && Kernel::kStagedOffset % kAccessBytes == 0);
  static_assert(Kernel::kSlotBytes >= kMinSlotBytes && Kernel::kSlotBytes <= kTileSlotBytes);
  static_assert(Kernel::kSlotBytes % kAccessBytes == 0 && Kernel::kRingOffset % kAccessBytes == 0);
  static_assert(Kernel::kSlots <= kMaxSlots);
  static_assert(!Kernel::kHasBoxes ||
                (Kernel::kSlotBytes % kBoxAlignment == 0 && Kernel::kRingOffset % kBoxAlignment == 0));
  static_assert(Kernel::kEventsOffset == kEventsOffset && Kernel::kTicketsOffset % kEventBytes == 0);
  static_assert(Kernel::kStallsOffset % alignof(StallRecord) == 0 &&
                Kernel::kStampsOffset % alignof(WorkerStamps) == 0);
  static_assert(Kernel::kOutputsOffset % alignof(OutputRow) == 0);
  if (threadIdx.x == 0) {
    init_ring<Kernel>(shared.ring);
    if constexpr (Kernel::kHasWindows) reinterpret_cast<Windows*>(smem + Kernel::kWindowsOffset)->init();
    shared.init();
    uint8_t* control = reinterpret_cast<uint8_t*>(params.control);
    shared.watchdog = {params.control, reinterpret_cast<StallRecord*>(control + Kernel::kStallsOffset) + blockIdx.x,
                       params.watchdog_ns, Kernel::kNumWorkers};
    ptx::add_relaxed_gpu(&params.control->started, 1);
    shared.described = shared.done = 0;
  }
  for (uint32_t i = threadIdx.x; i < kSumsKept * kSumsOfRun; i += kThreads)
    shared.run_sums[i / kSumsOfRun][i % kSumsOfRun] = 0;
  const uint32_t epoch = ptx::load_relaxed_gpu(&params.control->epoch);
  const bool aborted = ptx::load_relaxed_gpu(&params.control->aborted) != 0;  // by an earlier launch: run nothing
  const Launch<Kernel> launch{params, pointers, shared, smem, epoch};
  const bool skip = __syncthreads_or(aborted);
  const int warp = threadIdx.x / 32;
  if (warp >= kConsumerWarps) {
#if MPK_WARPGROUPS > 0
    ptx::give_up_registers<kLoadingRegisters>();
#endif
    if (!skip && warp == kConsumerWarps) run_loader(launch, threadIdx.x % 32);
    return;
  }
#if MPK_WARPGROUPS > 0
  ptx::take_registers<kMultiplyingRegisters>();
#endif
  Consumer<Kernel> c(launch, threadIdx.x);
  if (!skip) run_consumer(c);
  leave(c);
}

}  // namespace mpk
