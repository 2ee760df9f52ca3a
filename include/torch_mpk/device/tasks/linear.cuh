// linear: y[r, n] = sum over k of x[r, k] * weight[n, k], with the weights streamed through the ring, as the table
// says.
//
// A tile is a few complete output rows (rows of the weight); its bytes come as consecutive ring entries ("chunks") of
// at most one slot. It belongs to one warp; with one row of x, runs of its entries are dealt out among the warps, whose
// sums are added in order. Which k a lane takes and in which order it adds depends on k alone, so a value has the same
// bits whatever tile it is part of.
#pragma once

#include "torch_mpk/abi/partition.h"
#include "torch_mpk/device/fragment.cuh"
#include "torch_mpk/device/polled.cuh"

namespace mpk::linear {

// What a variant says of one job.
template <class V>
concept Sizes = requires {
  // The element type of x, weights and results.
  typename V::T;
  // Rows of x, at most 16; K.
  requires Constants<int, V::kBatch, V::kSize>;
  // Linears one after the other in row space, or linears whose row n is computed side by side.
  requires Constants<int, V::kSegments, V::kParts>;
  // Rows a tile has of each part; parts and k that share a chunk.
  requires Constants<int, V::kTileRows, V::kChunkParts, V::kChunkSize>;
  requires Constants<uint32_t, V::kNumTiles>;
  // x stands in shared memory, after row tasks; otherwise it is read where it is, kPitchX elements from row to row.
  requires Constants<bool, V::kStaged, V::kRowTasks> && Constants<int, V::kPitchX>;
  // One row of staged x, whose tiles have up to four sums: see compute_shared.
  requires Constants<bool, V::kSharesLoop>;
  // Workers draw tiles at run time; otherwise they are dealt out beforehand.
  requires Constants<bool, V::kClaimed>;
  // What chains and extras fetch first is known before the phase's events.
  requires Constants<bool, V::kEarly>;
};

// And what it does with a value: bias, epilogue, stores. C: the consumer.
template <class V, class C>
concept Results = Constants<bool, V::kHasExtra> &&  // there is something to preload
                  requires(C& c, const Job& job, int segment, int r, uint32_t n, const float (&sums)[V::kParts],
                           const typename V::Extra& extra) {
                    { V::preload(job, segment, r, n) } -> Same<typename V::Extra>;
                    V::finish(c, job, segment, r, n, sums, extra);
                  };

// Where the sums of workers that share tiles meet, kPartialBytes of each.
template <class V>
concept Meets = Constants<int, V::kPartialBytes> && requires(const Job& job) {
  { V::partials(job) } -> Same<uint8_t*>;
};

template <class V, class C>
concept Variant =
    Sizes<V> && Results<V, C> &&
    requires(const Job& job, int i) {
      { V::first_tile(i) } -> Same<uint32_t>;  // of segment i
      { V::num_rows(i) } -> Same<uint32_t>;
      { V::x(job) } -> Same<const typename V::T*>;
    } && RowChain<typename V::template Chain<WarpThreads<C>>, WarpThreads<C>, typename V::T, uint32_t> &&
    RowChain<typename V::template Chain<CtaThreads<C>>, CtaThreads<C>, typename V::T, uint32_t>;  // bring a row of x

// One whose weights are read without the ring.
template <class V, class C>
concept DirectVariant = Variant<V, C> && requires(const Job& job, int i) {
  { V::weight(job, i) } -> Same<const uint8_t*>;  // of segment or part i
  { V::weight_pitch(i) } -> Same<int64_t>;        // in bytes
};

// The elements of 16 bytes.
template <class T>
MPK_DEVICE void unpack(const uint4& v, float (&f)[kVecSize<T>]) {
  to_floats(reinterpret_cast<const Vec<T, kVecSize<T>>&>(v), f);
}

// Sums each of N values (a power of two up to 32) over the warp; lane l returns the sum of value l / (32 / N). Every
// value goes through the same tree of lanes, whatever N is.
template <int N>
MPK_DEVICE float sum_values(float (&v)[N], int lane) {
#pragma unroll
  for (int m = N, o = 16; o > 0; m /= 2, o /= 2) {
    if (m > 1) {
      const bool upper = lane & o;
#pragma unroll
      for (int i = 0; i < N / 2; i++)
        if (i < m / 2) {
          const float send = upper ? v[i] : v[i + m / 2];
          const float keep = upper ? v[i + m / 2] : v[i];
          v[i] = keep + __shfl_xor_sync(~0u, send, o);
        }
    } else {
      v[0] += __shfl_xor_sync(~0u, v[0], o);
    }
  }
  return v[0];
}

constexpr int next_power_of_two(int n) { return n <= 1 ? 1 : 2 * next_power_of_two((n + 1) / 2); }

// Which of the linears that follow each other in row space a tile is of.
template <class V>
MPK_DEVICE int segment_of(uint32_t tile) {
  int s = 0;
#pragma unroll
  for (int i = 1; i < V::kSegments; i++) s += tile >= V::first_tile(i);
  return s;
}

// What follows from a variant.
template <Sizes V>
struct Shape {
  using T = typename V::T;
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kRows = V::kChunkParts * V::kTileRows;  // weight rows in a chunk
  static constexpr int kChunksAlongK = (V::kSize + V::kChunkSize - 1) / V::kChunkSize;
  static constexpr int kChunks = V::kParts / V::kChunkParts * kChunksAlongK;          // ring entries of a tile
  static constexpr int kSums = kRows * V::kBatch;                                     // that a warp holds
  static constexpr int kRound = kSums <= 32 ? next_power_of_two(kSums) : 32;          // summed over the warp at a time
  static constexpr int kResults = V::kParts * V::kTileRows * V::kBatch;               // of a tile
  static constexpr int kScratchFloats = V::kSharesLoop ? 0 : (kResults + 3) / 4 * 4;  // per warp, before the staged x
  static constexpr int kScratchBytes = kConsumerWarps * kScratchFloats * 4;
  static constexpr int kPitch = (V::kSize * int(sizeof(T)) + 15) / 16 * 16;  // of staged x
  static constexpr int kStagedBytes = kScratchBytes + (V::kStaged ? V::kBatch * kPitch : 0);

  static MPK_DEVICE int chunk_size(int along_k) { return min(V::kChunkSize, V::kSize - along_k * V::kChunkSize); }
};

// Rows first, first + step, ... of x into shared memory, by one group of threads.
template <class V, class C, class Group>
MPK_DEVICE bool stage_rows(C& c, const Job& job, Group group, int first, int step, typename V::T* x) {
  using Chain = typename V::template Chain<Group>;
  constexpr int kPitch = Shape<V>::kPitch / int(sizeof(typename V::T));
  if (!V::kEarly && !c.await()) return false;
  if (first >= V::kBatch) return c.await();
  Chain chain(group, job, first);
  if (V::kEarly && !c.await()) return false;
  for (int r = first;;) {
    chain.bring(group, job, r, x + r * kPitch);
    if ((r += step) >= V::kBatch) return true;
    chain = Chain(group, job, r);
  }
}

// Brings x into shared memory, through the row tasks in front of the linear. False when the launch was given up.
template <class V, class C>
MPK_DEVICE bool stage(C& c, const Job& job, typename V::T* x) {
  bool ok;
  if constexpr (V::kRowTasks && rows_by_warp(Shape<V>::kPitch, V::kBatch)) {
    ok = stage_rows<V>(c, job, WarpThreads<C>(c), c.warp, kConsumerWarps, x);
  } else {
    ok = stage_rows<V>(c, job, CtaThreads<C>(c), 0, 1, x);
  }
  return ok && c.sync();
}

// What a warp has summed of its weight rows' products with the rows of x. Lane l takes pieces l, l + 32, ... of 16
// bytes; value(i, lane) is a lane's share of sum i, which is row i / kBatch of the weights with row i % kBatch of x.
// Either class adds in an order that depends on the piece alone.

// With fused multiply-adds. With one row of x, even and odd elements are summed apart, as compute_shared does.
template <class V>
struct FmaSums {
  using T = typename V::T;
  using S = Shape<V>;
  static constexpr int kApart = V::kBatch == 1 ? 2 : 1;
  float sums[S::kSums][kApart] = {};

  template <class X>
  MPK_DEVICE void add(const uint4 (&weights)[S::kRows], X x) {
#pragma unroll
    for (int r = 0; r < V::kBatch; r++) {
      float v[S::kVec];
      unpack<T>(x(r), v);
#pragma unroll
      for (int row = 0; row < S::kRows; row++) {
        float w[S::kVec];
        unpack<T>(weights[row], w);
#pragma unroll
        for (int e = 0; e < S::kVec; e++) {
          float& sum = sums[row * V::kBatch + r][e % kApart];
          sum = fmaf(w[e], v[e], sum);
        }
      }
    }
  }
  MPK_DEVICE float value(int i, int) const { return kApart == 1 ? sums[i][0] : sums[i][0] + sums[i][1]; }
};

// Whether a variant's products are worth tensor cores, whose use alone makes the whole chip run 8 % slower.
template <class V>
inline constexpr bool kOnTensorCores = kHasFragments<typename V::T> && V::kBatch > 2;

// On tensor cores, which spare unpacking: 8 weights of a lane take one instruction instead of 16. They multiply 16 rows
// by 8 columns, and here there is one row of x at a time. So lanes 4 g to 4 g + 3 put their pieces of two weight rows
// into rows g and g + 8 of the first factor, and their piece of x into column g of the second: of the products, those
// on the two diagonals are wanted.
template <class V>
struct TensorCoreSums {
  using S = Shape<V>;
  static constexpr int kPairs = (S::kRows + 1) / 2;
  SumFragment products[kPairs][V::kBatch] = {};

  template <class X>
  MPK_DEVICE void add(const uint4 (&weights)[S::kRows], X x) {
#pragma unroll
    for (int r = 0; r < V::kBatch; r++) {
      const uint4 column = x(r);
#pragma unroll
      for (int p = 0; p < kPairs; p++) {
        const uint4 a = weights[2 * p], b = 2 * p + 1 < S::kRows ? weights[(2 * p + 1) % S::kRows] : uint4{};
        multiply_pieces<typename V::T>(products[p][r], products[p][r], {a, b}, {column});
      }
    }
  }
  MPK_DEVICE float value(int i, int lane) const {
    const int row = i / V::kBatch, half = row % 2 * 2, g = lane / 4;
    const SumFragment& sums = products[row / 2][i % V::kBatch];
    return lane % 4 == g / 2 ? (g % 2 == 0 ? sums[half] : sums[half + 1]) : 0.0f;
  }
};

// Either of them.
template <class S, class V>
concept Sums = requires(S sums, const S& summed, const uint4 (&weights)[Shape<V>::kRows], uint4 (*x)(int), int i) {
  sums.add(weights, x);  // x(r): the lane's piece of row r
  { summed.value(i, i) } -> Same<float>;
};

// Adds the products of one chunk.
template <class V, Sums<V> Sums>
MPK_DEVICE void multiply(const uint8_t* slot, int chunk_size, const uint4* x, int x_pitch, int lane, Sums& sums) {
  using S = Shape<V>;
  const uint4* weights = reinterpret_cast<const uint4*>(slot);
  constexpr bool kEqual = V::kSize % V::kChunkSize == 0 && V::kChunkSize % (32 * S::kVec) == 0;
  const int pieces = (kEqual ? V::kChunkSize : chunk_size) / S::kVec;
  constexpr int kUnroll = S::kSums <= 2 ? 4 : S::kSums <= 4 ? 2 : 1;
#pragma unroll kUnroll
  for (int i = 0; i < (kEqual ? pieces / 32 : (pieces + 31) / 32); i++) {
    const int j = 32 * i + lane;
    const bool in = kEqual || j < pieces;
    uint4 w[S::kRows];
#pragma unroll
    for (int row = 0; row < S::kRows; row++) w[row] = in ? weights[row * pieces + j] : uint4{};
    sums.add(w, [&](int r) { return in ? x[r * x_pitch + j] : uint4{}; });
  }
}

// What the first round of a tile's results needs from memory.
template <class V>
MPK_DEVICE typename V::Extra preload(const Job& job, uint32_t tile, int lane) {
  const int segment = segment_of<V>(tile);
  const uint32_t row = (tile - V::first_tile(segment)) * V::kTileRows + lane % V::kTileRows;
  if (lane >= V::kTileRows * V::kBatch || row >= V::num_rows(segment)) return {};
  return V::preload(job, segment, lane / V::kTileRows, row);
}

// One tile, from its first ring entry to its stores; false when the launch was given up.
template <class V, class C>
MPK_DEVICE bool compute_tile(C& c, const Job& job, uint32_t tile, uint32_t entry, const uint4* x, int x_pitch,
                             float* scratch, typename V::Extra extra) {
  using S = Shape<V>;
  using T = typename V::T;
  constexpr int kOutputs = V::kTileRows * V::kBatch;
  const int segment = segment_of<V>(tile);
  const uint32_t first_row = (tile - V::first_tile(segment)) * V::kTileRows;
  const uint32_t end_row = V::num_rows(segment);
  auto row_of = [&](int i) { return first_row + i % V::kTileRows; };

#pragma unroll 1
  for (int part = 0; part < V::kParts; part += V::kChunkParts) {
    float* results = scratch + part * V::kTileRows * V::kBatch;
    typename Choose<kOnTensorCores<V>, TensorCoreSums<V>, FmaSums<V>>::Type sums;
    for (int k = 0; k < S::kChunksAlongK; k++, entry++) {
      if (!c.ring.wait(entry, c.phase)) return false;
      multiply<V>(c.ring.slot(entry), S::chunk_size(k), x + k * (V::kChunkSize / S::kVec), x_pitch, c.lane, sums);
      c.ring.release(entry);
    }
    constexpr int kRound = S::kRound;
#pragma unroll
    for (int base = 0; base < S::kSums; base += kRound) {
      float values[kRound];
#pragma unroll
      for (int i = 0; i < kRound; i++) values[i] = base + i < S::kSums ? sums.value(base + i, c.lane) : 0.0f;
      const float sum = sum_values<kRound>(values, c.lane);
      const int i = base + c.lane / (32 / kRound);
      if (c.lane % (32 / kRound) == 0 && i < S::kSums) results[i] = sum;
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int i = c.lane; i < kOutputs; i += 32) {
    const int r = i / V::kTileRows;
    const uint32_t n = row_of(i);
    if (n < end_row) {
      if (i != c.lane) extra = V::preload(job, segment, r, n);
      float results[V::kParts];
#pragma unroll
      for (int p = 0; p < V::kParts; p++) results[p] = scratch[(p * V::kTileRows + i % V::kTileRows) * V::kBatch + r];
      V::finish(c, job, segment, r, n, results, extra);
    }
  }
  __syncwarp();
  return true;
}

// A linear with a tile loop of its own.
template <class V, class C>
MPK_DEVICE void compute_alone(C& c, const Job& job) {
  using S = Shape<V>;
  using T = typename V::T;
  static_assert(S::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  float* scratch = reinterpret_cast<float*>(c.staged()) + c.warp * S::kScratchFloats;
  T* staged = reinterpret_cast<T*>(c.staged() + S::kScratchBytes);
  const uint32_t worker = c.worker(job);
  const Span tiles = V::kClaimed ? Span{} : static_span(V::kNumTiles, worker, C::Config::kNumWorkers);
  const uint32_t count = tiles.end - tiles.begin;
  typename V::Extra extra{};  // of this warp's first tile
  auto preload_first = [&] {
    if (!V::kClaimed && c.warp < count) extra = preload<V>(job, tiles.begin + c.warp, c.lane);
  };
  if constexpr (V::kEarly) preload_first();
  const uint4* x = reinterpret_cast<const uint4*>(V::kStaged ? staged : V::x(job));
  constexpr int kPitchX = (V::kStaged ? S::kPitch : V::kPitchX * int(sizeof(T))) / 16;
  if constexpr (V::kStaged) {
    if (!stage<V>(c, job, staged)) return;
    c.stamp_first(&PhaseStamps::staged);
  } else if (!c.await()) {
    return;
  }
  if constexpr (!V::kEarly) preload_first();
#pragma unroll 1
  for (uint32_t i = c.warp;; i += kConsumerWarps) {
    const uint32_t entry = c.entry + i * S::kChunks;
    uint32_t tile = tiles.begin + i;
    if constexpr (V::kClaimed) {
      tile = c.ring.next_tile(entry, c.phase);
      if (tile == kNoTile) {
        c.entry = c.ring.phase_end(c.phase);
        return;
      }
      if (tile == kGivenUp) {
        c.failed = true;
        return;
      }
      extra = preload<V>(job, tile, c.lane);
    } else {
      if (i >= count) break;
      if (i >= kConsumerWarps) extra = preload<V>(job, tile, c.lane);
    }
    if (!compute_tile<V>(c, job, tile, entry, x, kPitchX, scratch, extra)) {
      c.failed = true;
      return;
    }
  }
  c.entry += count * S::kChunks;
}

// ---- one row of x in shared memory: the tile loop that all such linears of a kernel share
//
// Instructions that a phase executes are fetched anew in each layer, see docs/performance.md. So what linears differ in
// is read from the table.

template <int n>
struct Constant {
  static constexpr int value = n;
};

// A lane's products of a chunk of kRows weight rows, of even elements and odd ones, each in the order of elements.
template <class T, int kRows>
MPK_DEVICE void add_rows(float (&sums)[4][2], const uint4* weights, const uint4* x, int pieces, int lane) {
  constexpr int kVec = kVecSize<T>, kAtOnce = 4 / kRows;
  const auto add = [&](auto count, int first) {
    constexpr int kCount = decltype(count)::value;
    uint4 xs[kCount], ws[kCount][kRows];
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      xs[i] = x[first + 32 * i];
#pragma unroll
      for (int row = 0; row < kRows; row++) ws[i][row] = weights[row * pieces + first + 32 * i];
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
  for (; j + 32 * (kAtOnce - 1) < pieces; j += 32 * kAtOnce) add(Constant<kAtOnce>{}, j);
  if constexpr (kAtOnce > 1)
#pragma unroll 1
    for (; j < pieces; j += 32) add(Constant<1>{}, j);
}

// f(Constant<rows>), where `rows` is one of those whose bits the mask has.
template <uint32_t mask, int least = 1, class F>
MPK_DEVICE void with_rows(uint32_t rows, F f) {
  constexpr bool kHas = mask >> least & 1, kIsLast = mask >> (least + 1) == 0;
  if constexpr (kHas)
    if (kIsLast || rows == least) return f(Constant<least>{});
  if constexpr (!kIsLast) with_rows<mask, least + 1>(rows, f);
}

// What a variant makes of the sums of its tile's row n, those of part p being values[p].
template <class V, class C>
MPK_DEVICE void finish_row(C& c, const Job& job, int segment, uint32_t n, const float (&values)[4],
                           const typename V::Extra& extra) {
  float results[V::kParts];
#pragma unroll
  for (int p = 0; p < V::kParts; p++) results[p] = values[p];
  V::finish(c, job, segment, 0, n, results, extra);
}

// Brings x to shared memory; false when the launch was given up.
template <class V, class C>
MPK_DEVICE bool prepare(C& c, const Job& job) {
  static_assert(Variant<V, C>);
  using S = Shape<V>;
  static_assert(S::kStagedBytes <= C::Config::kRingOffset - C::Config::kStagedOffset, "codegen staged too much");
  if (!stage<V>(c, job, reinterpret_cast<typename V::T*>(c.staged()))) return false;
  c.stamp_first(&PhaseStamps::staged);
  return true;
}

// The linears that share the loop, when there is only one.
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

// The sum of the run that ends before `entry`, below that number, once its warp has published it; below another when
// the launch was given up.
__device__ __noinline__ uint64_t run_sum(const Watchdog& dog, const uint64_t* sum, uint32_t entry, uint32_t phase) {
  uint64_t word = 0;
  spin(
      dog, [&] { return (word = ptx::load_acquire_cta(sum)) >> 32 == entry; },
      [&] { return stall(phase, WarpRole::kConsumer, Waiting::kSum, phase, uint32_t(word >> 32), entry, entry); });
  return word;
}

// The matrices of a job's tiles, which a warp takes in the order of their numbers.
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

// The warp of a tile's last run adds up the tile: lane l returns sum l / 8, which is a row of a part, part by part.
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

// The linears that share the loop: of whichever the job is one.
template <class L, class C>
concept Sharing =
    requires(C& c, const Job& job, int segment, uint32_t n, const float (&values)[4], const typename L::Extra& extra) {
      typename L::T;
      requires Constants<uint32_t, L::kRowCounts>;  // the numbers of rows that chunks have, as bits
      { L::has_extra(job) } -> Same<bool>;          // whether there is anything to preload
      { L::prepare(c, job) } -> Same<bool>;         // see prepare
      { L::preload(job, segment, n) } -> Same<typename L::Extra>;
      L::finish(c, job, segment, n, values, extra);  // see finish_row
    };

// What the table says, and where the first run stands, is read before x is awaited.
template <class L, class C>
MPK_DEVICE void compute_shared(C& c, const Job& job) {
  static_assert(Sharing<L, C>);
  using T = typename L::T;
  const StreamRow& row = *stream_of(job);
  const MatrixRow* matrices = reinterpret_cast<const MatrixRow*>(&row + 1);
  const Stream s = row.stream;
  const bool claimed = row.tickets.size != 0;
  const Span tiles = static_span(matrices[job.row->num_matrices - 1].end_tile, c.worker(job),
                                 C::Config::kNumWorkers);  // if not claimed
  const uint32_t run = row.run, in_chunk = s.tile_rows * s.chunk_parts, step = kConsumerWarps * run;
  const uint32_t count = (tiles.end - tiles.begin) * s.entries;
  // The run begins with the worker's entry i, which is entry of_tile of its tile number `whole`, and with that chunk of
  // its row. Warps take turns.
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
    if (tile == kGivenUp) c.failed = true;
    if (tile >= kGivenUp) return;
    segments.find(tile);
    const uint32_t lane = c.lane;
    n = (tile - segments.first_tile) * s.tile_rows + lane;
    has_row = lane < s.tile_rows && n < segments.num_rows;
  };
  // Before x is awaited the loader can issue as many entries as the ring has slots. Runs of drawn tiles are of one
  // entry.
  constexpr bool kFindsEarly = C::Config::kSlots >= kConsumerWarps;
  if (kFindsEarly) find();
  if (!L::prepare(c, job)) return;
  if (!kFindsEarly) find();
  const uint4* x = reinterpret_cast<const uint4*>(c.staged());
  float sums[4][2] = {};
  uint32_t in_run = 0;  // of the run's entries the next
#pragma unroll 1
  while (tile < kGivenUp) {
    const uint32_t entry = c.entry + i + in_run;
    if (!c.ring.has(entry) && !c.ring.wait_longer(entry, c.phase)) {
      c.failed = true;
      return;
    }
    const bool is_last = of_tile + run == s.entries;  // of the tile's runs
    typename L::Extra extra{};
    if (has_extra && is_last && in_run + 1 == run && has_row) extra = L::preload(job, segments.segment, n);
    const uint32_t begin = (chunk + in_run) * s.chunk_bytes;  // of the chunk in its rows
    const uint4* weights = reinterpret_cast<const uint4*>(c.ring.slot(entry));
    const int pieces = min(s.chunk_bytes, s.row_bytes - begin) / 16;
    with_rows<L::kRowCounts>(in_chunk, [&](auto rows) {
      add_rows<T, decltype(rows)::value>(sums, weights, x + begin / 16, pieces, c.lane);
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

// ---- the consumers' part

template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  static_assert(Variant<V, C>);
  if constexpr (V::kSharesLoop) {
    compute_shared<Only<V>>(c, job);
  } else {
    compute_alone<V>(c, job);
  }
}

// Weights whose rows are not multiples of 16 bytes: no ring, each warp reads rows where they are.
template <class V, class C>
MPK_DEVICE void compute_direct(C& c, const Job& job) {
  static_assert(DirectVariant<V, C>);
  using S = Shape<V>;
  using T = typename V::T;
  T* x = reinterpret_cast<T*>(c.staged() + S::kScratchBytes);
  if (!stage<V>(c, job, x)) return;
  const uint32_t worker = c.worker(job);
  for (uint32_t tile = worker + c.warp * C::Config::kNumWorkers; tile < V::kNumTiles;
       tile += kConsumerWarps * C::Config::kNumWorkers) {
    const int segment = segment_of<V>(tile);
    const uint32_t n = tile - V::first_tile(segment);
    for (int r = 0; r < V::kBatch; r++) {
      float results[V::kParts];
#pragma unroll
      for (int p = 0; p < V::kParts; p++) {
        const int which = V::kParts > 1 ? p : segment;
        const T* row = reinterpret_cast<const T*>(V::weight(job, which) + n * V::weight_pitch(which));
        float sum = 0;
        for (int k = c.lane; k < V::kSize; k += 32)
          sum = fmaf(to_float(row[k]), to_float(x[r * (S::kPitch / int(sizeof(T))) + k]), sum);
        results[p] = warp_sum(sum);
      }
      if (c.lane == 0) V::finish(c, job, segment, r, n, results, V::preload(job, segment, r, n));
    }
  }
}

}  // namespace mpk::linear
