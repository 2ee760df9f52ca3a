// The tile loop that all linears of a kernel with one row of staged x share. Each layer fetches its instructions anew,
// see docs/performance.md, so linears differ in what the table says.
#pragma once

#include "torch_mpk/device/tasks/linear_shape.cuh"

namespace mpk::linear {

template <int n>
struct Constant {
  static constexpr int value = n;
};

// A lane's sums of a chunk of kRows weight rows: even elements and odd ones, each in order.
template <class T, int kRows>
MPK_DEVICE void add_rows(float (&sums)[4][2], const uint4* weights, const uint4* x, int accesses, int lane) {
  constexpr int kVec = kVecSize<T>, kAtOnce = 4 / kRows;
  const auto add = [&](auto count, int first) {
    constexpr int kCount = decltype(count)::value;
    uint4 xs[kCount], ws[kCount][kRows];
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      xs[i] = x[first + 32 * i];
#pragma unroll
      for (int row = 0; row < kRows; row++) ws[i][row] = weights[row * accesses + first + 32 * i];
    }
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      float v[kVec];
      unpack<T>(xs[i], v);
#pragma unroll
      for (int row = 0; row < kRows; row++) {
        float w[kVec];
        unpack<T>(ws[i][row], w);
#pragma unroll
        for (int e = 0; e < kVec; e++) sums[row][e % 2] = fmaf(w[e], v[e], sums[row][e % 2]);
      }
    }
  };
  int j = lane;
#pragma unroll 1
  for (; j + 32 * (kAtOnce - 1) < accesses; j += 32 * kAtOnce) add(Constant<kAtOnce>{}, j);
  if constexpr (kAtOnce > 1)
#pragma unroll 1
    for (; j < accesses; j += 32) add(Constant<1>{}, j);
}

// Calls f(Constant<rows>) for a number of rows that the mask contains.
template <uint32_t mask, int least = 1, class F>
MPK_DEVICE void with_rows(uint32_t rows, F f) {
  constexpr bool kHas = mask >> least & 1, kIsLast = mask >> (least + 1) == 0;
  if constexpr (kHas)
    if (kIsLast || rows == least) return f(Constant<least>{});
  if constexpr (!kIsLast) with_rows<mask, least + 1>(rows, f);
}

// Finishes row n of a tile. values[p]: the sum of part p.
template <class V, class C>
MPK_DEVICE void finish_row(C& c, const Job& job, int segment, uint32_t n, const float (&values)[4],
                           const typename V::Extra& extra) {
  float results[V::kParts];
#pragma unroll
  for (int p = 0; p < V::kParts; p++) results[p] = values[p];
  V::finish(c, job, segment, 0, n, results, extra);
}

// Stages x in shared memory; false when the launch was aborted.
template <class V, class C>
MPK_DEVICE bool prepare(C& c, const Job& job) {
  static_assert(Variant<V, C>);
  using S = Shape<V>;
  static_assert(S::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  if (!stage<V>(c, job, reinterpret_cast<typename V::T*>(c.staged()))) return false;
  c.stamp_first(&PhaseStamps::staged);
  return true;
}

// The single linear that shares the loop.
template <class V>
struct Only {
  using T = typename V::T;
  using Extra = typename V::Extra;
  static constexpr uint32_t kRowCounts = 1 << Shape<V>::kRows;
  static MPK_DEVICE bool has_extra(const Job&) { return V::kHasExtra; }
  template <class C>
  static MPK_DEVICE bool prepare(C& c, const Job& job) {
    return linear::prepare<V>(c, job);
  }
  static MPK_DEVICE Extra preload(const Job& job, int segment, uint32_t n) { return V::preload(job, segment, 0, n); }
  template <class C>
  static MPK_DEVICE void finish(C& c, const Job& job, int segment, uint32_t n, const float (&values)[4],
                                const Extra& extra) {
    finish_row<V>(c, job, segment, n, values, extra);
  }
};

// Waits for the sum of the run that ends before `entry`. Its lower word is then that number; another when the launch
// was aborted.
__device__ __noinline__ uint64_t run_sum(const Watchdog& dog, const uint64_t* sum, uint32_t entry, uint32_t phase) {
  uint64_t word = 0;
  spin(
      dog, [&] { return (word = ptx::load_acquire_cta(sum)) >> 32 == entry; },
      [&] { return stall(phase, WarpRole::kConsumer, Waiting::kSum, phase, uint32_t(word >> 32), entry, entry); });
  return word;
}

// The matrices of a job's tiles. A warp takes tiles in ascending order.
struct Segments {
  const MatrixRow* matrix;
  uint32_t parts;
  uint32_t first_tile, end_tile, num_rows;
  int segment = 0;

  MPK_DEVICE Segments(const MatrixRow* matrices, uint32_t parts) : matrix(matrices), parts(parts) { read(); }

  MPK_DEVICE void find(uint32_t tile) {
#pragma unroll 1
    for (; tile >= end_tile; segment++) {
      matrix += parts;
      read();
    }
  }

 private:
  MPK_DEVICE void read() { first_tile = matrix->first_tile, end_tile = matrix->end_tile, num_rows = matrix->num_rows; }
};

// The warp with a tile's last run adds up the tile. Lane l returns sum l / 8, a row of a part, part by part.
template <class C>
MPK_DEVICE float tile_sum(C& c, const Stream& s, uint32_t run, uint32_t first_entry) {
  static_assert(kSumsOfRun == 2, "one or two rows in a chunk");
  const uint32_t number = c.lane / 8;
  const bool in_pairs = s.tile_rows * s.chunk_parts == 2;
  const uint32_t begin = (in_pairs ? number / 2 : number) * s.chunks;
  float total = 0;
  if (begin < s.entries)
#pragma unroll 1
    for (uint32_t end = begin + run; end <= begin + s.chunks; end += run) {
      const uint32_t entry = first_entry + end;
      const uint64_t* sum = &c.shared.run_sums[entry % kSumsKept][in_pairs ? number % 2 : 0];
      uint64_t word = ptx::load_acquire_cta(sum);
      if (word >> 32 != entry) word = run_sum(c.shared.watchdog, sum, entry, c.phase);
      if (word >> 32 != entry) c.failed = true;
      total += float_of(word);
    }
  return total;
}

// All linears that share the loop; the job says which one runs.
template <class L, class C>
concept Sharing =
    requires(C& c, const Job& job, int segment, uint32_t n, const float (&values)[4], const typename L::Extra& extra) {
      typename L::T;
      requires Constants<uint32_t, L::kRowCounts>;  // the row counts of chunks, as bits
      { L::has_extra(job) } -> Same<bool>;          // whether there is anything to preload
      { L::prepare(c, job) } -> Same<bool>;         // see prepare
      { L::preload(job, segment, n) } -> Same<typename L::Extra>;
      L::finish(c, job, segment, n, values, extra);  // see finish_row
    };

// Read before x is awaited: the table's entries, and the place of the first run.
template <class L, class C>
MPK_DEVICE void compute_shared(C& c, const Job& job) {
  static_assert(Sharing<L, C>);
  using T = typename L::T;
  const StreamRow& row = *stream_of(job);
  const MatrixRow* matrices = reinterpret_cast<const MatrixRow*>(&row + 1);
  const Stream s = row.stream;
  const bool claimed = row.tickets.size != 0;
  const Span tiles = static_span(matrices[job.row->num_matrices - 1].end_tile, c.worker(job),
                                 C::Config::kNumWorkers);  // if tiles are assigned statically
  const uint32_t run = row.run, in_chunk = s.tile_rows * s.chunk_parts, step = kConsumerWarps * run;
  const uint32_t count = (tiles.end - tiles.begin) * s.entries;
  // The run begins with the worker's entry i, which is entry of_tile of its tile number `whole`, and with that chunk of
  // the row. Warps take runs in turn.
  uint32_t i = c.warp * run, whole = c.warp, of_tile = 0, whole_step = kConsumerWarps, of_tile_step = 0, chunk = 0,
           chunk_step = 0;
  if (run != s.entries) {
    whole = quotient(i, s.by_entries), of_tile = i - whole * s.entries;
    whole_step = quotient(step, s.by_entries), of_tile_step = step - whole_step * s.entries;
    chunk = of_tile - quotient(of_tile, s.by_chunks) * s.chunks;
    chunk_step = of_tile_step - quotient(of_tile_step, s.by_chunks) * s.chunks;
  }
  Segments segments(matrices, s.parts);
  const bool has_extra = L::has_extra(job);
  uint32_t tile = 0, n = 0;  // the lane's row
  bool has_row = false;
  const auto find = [&] {
    tile = tiles.begin + whole;
    if (claimed)
      tile = c.ring.next_tile(c.entry + i, c.phase);
    else if (i < count)
      c.ring.look(c.entry + i);
    else
      tile = kNoTile;
    if (tile == kAborted) c.failed = true;
    if (tile >= kAborted) return;
    segments.find(tile);
    const uint32_t lane = c.lane;
    n = (tile - segments.first_tile) * s.tile_rows + lane;
    has_row = lane < s.tile_rows && n < segments.num_rows;
  };
  // Before x is awaited, the loader can issue an entry for each slot of the ring, except the entries that its last
  // round waits for together. Drawn tiles have runs of one entry.
  constexpr bool kFindsEarly = C::Config::kSlots - (kLeastFilled<C::Config::kSlotBytes> - 1) >= kConsumerWarps;
  if (kFindsEarly) find();
  if (!L::prepare(c, job)) return;
  if (!kFindsEarly) find();
  const uint4* x = reinterpret_cast<const uint4*>(c.staged());
  float sums[4][2] = {};
  uint32_t in_run = 0;  // the next entry of the run
#pragma unroll 1
  while (tile < kAborted) {
    const uint32_t entry = c.entry + i + in_run;
    if (!c.ring.has(entry) && !c.ring.wait_longer(entry, c.phase)) {
      c.failed = true;
      return;
    }
    const bool is_last = of_tile + run == s.entries;  // the last run of the tile
    typename L::Extra extra{};
    if (has_extra && is_last && in_run + 1 == run && has_row) extra = L::preload(job, segments.segment, n);
    const uint32_t begin = (chunk + in_run) * s.chunk_bytes;  // of the chunk in its rows
    const uint4* weights = reinterpret_cast<const uint4*>(c.ring.slot(entry));
    const int accesses = min(s.chunk_bytes, s.row_bytes - begin) / 16;
    with_rows<L::kRowCounts>(in_chunk, [&](auto rows) {
      add_rows<T, decltype(rows)::value>(sums, weights, x + begin / 16, accesses, c.lane);
    });
    c.ring.release(entry);
    if (++in_run < run) continue;
    in_run = 0;
    float each[4];
#pragma unroll
    for (int t = 0; t < 4; t++) {
      each[t] = sums[t][0] + sums[t][1];
      sums[t][0] = sums[t][1] = 0;
    }
    float total = sum_values<4>(each, c.lane);  // lanes 8 t to 8 t + 7 have row t of the chunk
    if (run != s.entries) {
      const uint32_t t = c.lane / 8, end = entry + 1;
      if (c.lane % 8 == 0 && t < in_chunk)
        ptx::store_relaxed_cta(&c.shared.run_sums[end % kSumsKept][t], uint64_t(end) << 32 | __float_as_uint(total));
      if (is_last) total = tile_sum(c, s, run, end - s.entries);
    }
    if (is_last) {
      float values[4];
#pragma unroll
      for (int p = 0; p < 4; p++) values[p] = __shfl_sync(~0u, total, (p * s.tile_rows + c.lane) * 8 % 32);
      if (has_row) L::finish(c, job, segments.segment, n, values, extra);
    }
    i += step;
    if (!claimed && i >= count) break;
    whole += whole_step, of_tile += of_tile_step, chunk += chunk_step;
    if (of_tile >= s.entries) of_tile -= s.entries, whole++;
    if (chunk >= s.chunks) chunk -= s.chunks;
    find();
  }
  if (!c.failed) c.entry = claimed ? c.ring.phase_end(c.phase) : c.entry + count;
}

}  // namespace mpk::linear
