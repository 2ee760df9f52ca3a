// prefill_attention: many positions of each sequence attend to the keys and values that they share, softmax in fp32.
//
// The algorithm is FlashAttention-2. The heads of a group, at all positions of a sequence, are rows of queries. A
// worker takes V::kRows rows at a time, and each of its warps takes 16 of them from the first key to the last. Queries,
// running maxima and sums, and results stay in registers. The loader copies tiles of keys and values as boxes, both of
// a tile in one ring entry, and every consumer warp reads every entry. Sums follow the order of positions, so a row's
// bits depend on its query and on what it sees alone.
//
// Where a worker has fewer rows than its warps multiply, warps share the keys: of N warps with the same rows, each
// takes every Nth tile, and the first merges their results.
//
// The number of tiles follows from what the rows of a block see. The loader and each warp find it by themselves. Later
// positions of a causal prompt see more, so blocks are dealt out from the last to the first.
#pragma once

#include "torch_mpk/abi/partition.h"
#include "torch_mpk/device/concepts.cuh"
#include "torch_mpk/device/consumer.cuh"
#include "torch_mpk/device/fragment.cuh"
#include "torch_mpk/device/tasks/attention_scores.cuh"

namespace mpk::prefill_attention {

// The place of a sequence's and group's keys or values in their matrix: a row, and a block of 64 columns, or a column
// where heads are no multiple of 64.
struct Keys {
  const void* map;
  int row, column;
};

// What a variant declares of tiles of queries and keys.
template <class V>
concept Tiles = attention::Scores<V> && requires {
  typename V::T;
  // kHeads query heads share a key head. kSize: of a query and a key; kValueSize: of a value and a result.
  requires Constants<int, V::kGroups, V::kHeads, V::kSize, V::kValueSize>;
  // The most rows of queries that a worker takes at a time, and the positions of an entry.
  requires Constants<int, V::kRows, V::kKeys>;
  // Rows begin at multiples of 16 bytes.
  requires Constants<bool, V::kAlignedQ, V::kAlignedY>;
} && (!V::kHasSinks || attention::HasSinks<V>);

// What it declares of one job.
template <class V>
concept Sizes = Tiles<V> && requires {
  requires Constants<int, V::kBatch, V::kPositions, V::kLength>;
  requires Constants<bool, V::kHasLimit>;
};

// The sliding window: a row sees at most its last kWindow positions; 0: all of them.
template <class V>
concept Windowed = requires { requires Constants<int, V::kWindow>; };

// Keys and values are copied row by row, not in boxes.
template <class V>
concept ByRow = requires(const Job& job) {
  { V::cache_rows(job) } -> Same<int32_t>;
};

template <class V>
concept Limited = requires(const Job& job, uint32_t b, uint32_t s) {
  { V::limit(job, b, s) } -> Same<int64_t>;
};

template <class V>
concept Masked = requires(const Job& job, uint32_t b, uint32_t h, uint32_t s, uint32_t position) {
  { V::mask(job, b, h, s, position) } -> Same<float>;
};

// Operands, for sequence b, group g, head h and position s.
template <class V>
concept Places = requires(const Job& job, uint32_t b, uint32_t g, uint32_t s, uint32_t h) {
  { V::k(job, b, g) } -> Same<Keys>;
  { V::v(job, b, g) } -> Same<Keys>;
  { V::q(job, b, s, h) } -> Same<const typename V::T*>;
  { V::y(job, b, s, h) } -> Same<typename V::T*>;
} && (!V::kHasLimit || Limited<V>) && (!V::kHasMask || Masked<V>);

template <class V>
concept Variant = Sizes<V> && Places<V>;

constexpr int floor_power_of_two(int n) { return n < 2 ? 1 : 2 * floor_power_of_two(n / 2); }

// Keys or values of a tile in shared memory, `size` elements of each position. 16-byte accesses of 8 rows meet
// different banks: boxes are swizzled, and rows that come one by one are padded.
template <class V, int size>
struct TileMatrix {
  static constexpr int kRowBytes = size * int(sizeof(typename V::T));
  static constexpr int kPitch = ByRow<V> ? key_row_pitch(kRowBytes) : kBoxRowBytes;  // from row to row
  static constexpr int kBytes = V::kKeys * (ByRow<V> ? kPitch : boxed_row_bytes(kRowBytes));
  static constexpr int kColumnBytes = V::kKeys * kBoxRowBytes;  // of boxes: from 64 columns to the next
  static constexpr int kSteps = (size + 15) / 16;               // of products along a row, or across it
  static constexpr bool kEndsHalf = size % 16 != 0;             // the last of them has 8 columns
  static_assert(size % 8 == 0 && size <= kLargestHead && (ByRow<V> || kBytes % kBoxAlignment == 0));

  // The address of 16 bytes of a row of a tile, of columns 8 `half` on (0 or 1); then the same 16 k columns further on.
  static MPK_DEVICE ptx::SharedAddress fragment_of(const uint8_t* tile, uint32_t row, uint32_t half) {
    return ptx::smem_addr(tile) + row * kPitch + (ByRow<V> ? half : half ^ row % 8) * 16;
  }
  static MPK_DEVICE ptx::SharedAddress columns_of(ptx::SharedAddress fragment, int k) {
    return ByRow<V> ? fragment + k * 32 : (fragment ^ k % 4 * 32) + k / 4 * kColumnBytes;
  }

  // One lane copies a tile, from row `row` of the matrix on.
  static MPK_DEVICE void start(uint8_t* to, const Keys& keys, int row, uint64_t* full) {
    if constexpr (size % kBoxColumns == 0)
      ptx::box_load(to, keys.map, keys.row + row, keys.column, full, ptx::kEvictNormal);
    else
#pragma unroll
      for (int i = 0; i < size; i += kBoxColumns)
        ptx::columns_load(to + i / kBoxColumns * kColumnBytes, keys.map, keys.row + row, keys.column + i, full,
                          ptx::kEvictNormal);
  }
};

template <class V>
struct Shape {
  using KeyTile = TileMatrix<V, V::kSize>;
  using ValueTile = TileMatrix<V, V::kValueSize>;
  static constexpr int kEntryBytes = KeyTile::kBytes + ValueTile::kBytes;
  // Positions whose scores a warp computes at a time: as many as registers hold beside the results and a mask.
  static constexpr int kWidest = V::kSize > V::kValueSize ? V::kSize : V::kValueSize;
  static constexpr int kFit = floor_power_of_two((V::kHasMask ? 4096 : 8192) / kWidest);
  static constexpr int kAtOnce = V::kKeys < kFit ? V::kKeys : kFit;
  // Whether queries stay in registers; otherwise they stay in the warp's shared memory, through which warps later
  // merge.
  static constexpr bool kKeepsQueries = keeps_queries(V::kSize, V::kValueSize);
  static constexpr int kQueriesPitch = key_row_pitch(KeyTile::kRowBytes);
  static constexpr int kQueriesBytes = kKeepsQueries ? 0 : queries_bytes(V::kSize);
  static constexpr int kWarpBytes = kQueriesBytes > kMergeBytes ? kQueriesBytes : kMergeBytes;
  // A row's maximum is raised only where scores exceed it so far that exponentials would overflow 16 bits, since
  // raising it rescales all results so far. Most rows raise it once or twice.
  static constexpr float kSlack = 8;
  // Whether scores are scaled first: where they are masked or capped, or where a negative scale would turn the largest
  // score into the smallest. Otherwise one multiplication turns a product into an exponent of two.
  static constexpr bool kScaleFirst = V::kHasMask || V::kSoftCap > 0 || !(V::kScale > 0);
  static constexpr float kLog2E = 1.44269504f, kToExponent = kScaleFirst ? kLog2E : V::kScale * kLog2E;
  static constexpr int kStagedBytes = kConsumerWarps * kWarpBytes;

  static_assert(kConsumerWarps % (V::kRows / kWarpRows) == 0 && V::kKeys % kAtOnce == 0 && kAtOnce % 16 == 0);
  static_assert(sizeof(typename V::T) == 2);
};

// Positions that a query sees, masks aside.
template <class V>
MPK_DEVICE uint32_t visible(const Job& job, uint32_t batch, uint32_t position) {
  if constexpr (V::kHasLimit) {
    const int64_t limit = V::limit(job, batch, position);
    return limit < 0 ? 0 : limit > V::kLength ? V::kLength : static_cast<uint32_t>(limit);
  } else {
    return V::kLength;
  }
}

// A block of query rows of a sequence and a group.
template <class V>
struct Unit {
  using T = typename V::T;
  static constexpr int kGroupRows = V::kPositions * V::kHeads;  // of a sequence and a group
  static constexpr int kBlocks = (kGroupRows + V::kRows - 1) / V::kRows;
  static constexpr uint32_t kUnits = uint32_t(kBlocks) * V::kBatch * V::kGroups;

  uint32_t batch, group, first;  // row

  // In falling order of the positions that a causal prompt's rows see.
  MPK_DEVICE explicit Unit(uint32_t number) {
    constexpr uint32_t kOfBlock = V::kBatch * V::kGroups;
    const uint32_t block = number / kOfBlock, rest = number - block * kOfBlock;
    first = (kBlocks - 1 - block) * V::kRows;
    batch = rest / V::kGroups;
    group = rest - batch * V::kGroups;
  }

  MPK_DEVICE uint32_t num_rows() const { return kGroupRows; }
  // Warps with rows of their own. The other warps share the keys of these rows.
  MPK_DEVICE uint32_t warps_of_rows() const { return V::kRows / kWarpRows; }
  MPK_DEVICE const T* q(const Job& job, uint32_t s, uint32_t h) const { return V::q(job, batch, s, h); }
  MPK_DEVICE T* y(const Job& job, uint32_t s, uint32_t h) const { return V::y(job, batch, s, h); }
  MPK_DEVICE uint32_t limit(const Job& job, uint32_t s) const { return visible<V>(job, batch, s); }
};

// The tiles that a unit's rows see. All lanes of a warp call it, and get the same result.
template <class V>
MPK_DEVICE uint32_t tiles_of(const Job& job, const Unit<V>& unit, uint32_t lane) {
  using U = Unit<V>;
  uint32_t most = 0;
  if constexpr (V::kHasLimit) {
    constexpr int kEach = ((V::kRows + V::kHeads - 2) / V::kHeads + 32) / 32;  // of its positions
    const uint32_t last = min(unit.first + V::kRows, uint32_t(U::kGroupRows)) - 1;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const uint32_t position = unit.first / V::kHeads + 32 * i + lane;
      if (position <= last / V::kHeads) most = max(most, visible<V>(job, unit.batch, position));
    }
#pragma unroll
    for (int o = 16; o > 0; o /= 2) most = max(most, __shfl_xor_sync(~0u, most, o));
  } else {
    most = V::kLength;
  }
  return (most + V::kKeys - 1) / V::kKeys;
}

// ---- the loader's part

// An entry: keys, then values.
template <class V>
struct Entry {
  using S = Shape<V>;
  Keys k, v;
  uint32_t tile;

  MPK_DEVICE void start(uint8_t* to, uint64_t* full) const {
    const int row = tile * V::kKeys;
    ptx::mbar_arrive_expect(full, S::kEntryBytes);
    S::KeyTile::start(to, k, row, full);
    S::ValueTile::start(to + S::KeyTile::kBytes, v, row, full);
  }
};

template <class V, class L>
MPK_DEVICE void load(L& l, const Job& job) {
  static_assert(Variant<V>);
  const uint32_t worker = l.worker(job);
#pragma unroll 1
  for (uint32_t turn = 0; turn * L::Config::kNumWorkers < Unit<V>::kUnits; turn++) {
    const uint32_t number = dealt(turn, worker, L::Config::kNumWorkers);
    if (number >= Unit<V>::kUnits) continue;
    const Unit<V> unit(number);
    const uint32_t tiles = tiles_of(job, unit, l.lane), end = l.ring.entry + tiles;
    const Keys k = V::k(job, unit.batch, unit.group), v = V::v(job, unit.batch, unit.group);
    l.ring.entry =
        fill_entries(l.ring, tiles, L::Config::kSlots, l.phase, [&](uint32_t tile) { return Entry<V>{k, v, tile}; });
    if constexpr (kProfiled<typename L::Config>) l.stamps.bytes += tiles * Shape<V>::kEntryBytes;
    l.failed = l.ring.entry != end;
    if (l.failed) return;
  }
}

// ---- a warp's rows

// Two elements side by side.
template <bool aligned, class T>
MPK_DEVICE uint32_t load_pair(const T* p) {
  if constexpr (aligned) return *reinterpret_cast<const uint32_t*>(p);
  return to_word(p[0]) | to_word(p[1]) << 16;
}
template <bool aligned, class T>
MPK_DEVICE void store_pair(T* p, uint32_t pair) {
  if constexpr (aligned) {
    *reinterpret_cast<uint32_t*>(p) = pair;
  } else {
    p[0] = from_word<T>(pair);
    p[1] = from_word<T>(pair >> 16);
  }
}

// 16 rows of queries. A lane has parts of two of them, `lane / 4` and the one 8 below, as in fragments (fragment.cuh).
template <class V, class U>
struct Rows {
  using S = Shape<V>;
  using T = typename V::T;
  using KeyTile = typename S::KeyTile;
  using ValueTile = typename S::ValueTile;
  using Scores = SumFragment[S::kAtOnce / 8];
  static constexpr int kFragments = V::kValueSize / 8;  // of results

  const Job& job;
  const U& unit;
  uint32_t first, lane;       // the lane's first row; its lane
  uint32_t limit[2];          // positions that both rows see, but for a mask
  uint32_t least, most;       // fewest and most that the warp's rows see; 0 where it has none
  ptx::SharedAddress staged;  // the lane's row of queries, where registers do not hold it
  ptx::Quad q[S::kKeepsQueries ? KeyTile::kSteps : 1];
  SumFragment out[kFragments] = {};
  float maximum[2], sum[2] = {};  // sum: the lane's part of it

  // `block`: the number of 16 rows within the unit. `place`: the warp's shared memory.
  MPK_DEVICE Rows(const Job& job, const U& unit, uint32_t block, uint32_t lane, uint8_t* place)
      : job(job), unit(unit), first(unit.first + block * kWarpRows + lane / 4), lane(lane) {
    const T* rows[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      rows[i] = unit.q(job, query(i), head(i)) + lane % 4 * 2;
      limit[i] = unit.limit(job, query(i));
      maximum[i] = -infinity();
    }
    load_queries(rows, place);
    least = min(limit[0], limit[1]);
    most = max(limit[0], limit[1]);
#pragma unroll
    for (int o = 4; o < 32; o *= 2) {
      least = min(least, __shfl_xor_sync(~0u, least, o));
      most = max(most, __shfl_xor_sync(~0u, most, o));
    }
    if (unit.first + block * kWarpRows >= unit.num_rows()) most = 0;
  }

  MPK_DEVICE void load_queries(const T* const (&rows)[2], uint8_t* place) {
    const auto fragment = [&](int k, int i) {
      const bool is_there = !KeyTile::kEndsHalf || k + 1 < KeyTile::kSteps || i < 2;
      return is_there ? load_pair<V::kAlignedQ>(rows[i % 2] + 16 * k + i / 2 * 8) : 0;
    };
    if constexpr (S::kKeepsQueries) {
#pragma unroll
      for (int k = 0; k < KeyTile::kSteps; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) q[k].v[i] = fragment(k, i);
    } else {
      staged = ptx::smem_addr(place) + lane % 16 * S::kQueriesPitch + lane / 16 * 16;
      uint8_t* mine = place + lane / 4 * S::kQueriesPitch + lane % 4 * 4;
#pragma unroll 4
      for (int k = 0; k < KeyTile::kSteps; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          *reinterpret_cast<uint32_t*>(mine + i % 2 * 8 * S::kQueriesPitch + 32 * k + i / 2 * 16) = fragment(k, i);
      __syncwarp();
    }
  }
  MPK_DEVICE ptx::Quad queries(int k) const {
    if constexpr (S::kKeepsQueries)
      return q[k];
    else
      return ptx::load_matrices(staged + 32 * k);
  }

  // Read anew each time, so that values computed from it hold no registers in between.
  static MPK_DEVICE uint32_t lane_anew() { return ptx::thread_index() % 32; }

  // Rows past the end repeat the last one, and are not stored.
  MPK_DEVICE uint32_t row(int i) const { return min(first + 8 * i, unit.num_rows() - 1); }
  MPK_DEVICE uint32_t query(int i) const { return row(i) / V::kHeads; }
  MPK_DEVICE uint32_t head(int i) const { return unit.group * V::kHeads + row(i) % V::kHeads; }

  // Adds a tile, some positions at a time. They need no check if all rows see all of them.
  MPK_DEVICE void attend(const uint8_t* entry, uint32_t tile) {
    uint32_t begin = tile * V::kKeys;
#pragma unroll 1
    for (int part = 0; part < V::kKeys / S::kAtOnce && begin < most; part++) {
      // Where keys and values have one pitch, this takes no register.
      const uint8_t* values = entry + KeyTile::kBytes + part * S::kAtOnce * (ValueTile::kPitch - KeyTile::kPitch);
      if (is_before_window(begin + S::kAtOnce - 1, least)) {
      } else if (V::kHasMask || begin + S::kAtOnce > least || is_before_window(begin, most)) {
        attend_part<true>(entry, values, begin);
      } else {
        attend_part<false>(entry, values, begin);
      }
      begin += S::kAtOnce;
      entry += S::kAtOnce * KeyTile::kPitch;
    }
  }

  // Whether a position lies before the window of a row with this limit.
  static MPK_DEVICE bool is_before_window(uint32_t position, uint32_t limit) {
    if constexpr (Windowed<V>)
      if constexpr (V::kWindow > 0) return position + V::kWindow < limit;
    return false;
  }

  template <bool cut>
  MPK_DEVICE void attend_part(const uint8_t* keys, const uint8_t* values, uint32_t begin) {
    Scores scores = {};
    multiply_keys(scores, keys);
    if constexpr (S::kScaleFirst)
#pragma unroll
      for (SumFragment& fragment : scores)
#pragma unroll
        for (float& score : fragment) score = attention::scored<V>(score);
    if constexpr (cut) hide(scores, begin);
    exponentiate(scores);
    add_values<cut>(scores, values, most - begin);
  }

  // Each load of a warp covers 16 keys by 16 columns: 8 columns of 8 keys, the next 8 columns, then 8 more keys.
  MPK_DEVICE void multiply_keys(Scores& scores, const uint8_t* keys) const {
    const uint32_t lane = lane_anew(), matrix = lane / 8;
    const ptx::SharedAddress from = KeyTile::fragment_of(keys, matrix / 2 * 8 + lane % 8, matrix % 2);
#pragma unroll
    for (int k = 0; k < KeyTile::kSteps; k++) {
      const ptx::SharedAddress columns = KeyTile::columns_of(from, k);
      const ptx::Quad a = queries(k);
#pragma unroll
      for (int n = 0; n < S::kAtOnce / 16; n++) {
        ptx::Quad b = ptx::load_matrices(columns + n * 16 * KeyTile::kPitch);
        if (KeyTile::kEndsHalf && k + 1 == KeyTile::kSteps) b.v[1] = b.v[3] = 0;  // anything may stand behind a key
        ptx::mma<T>(scores[2 * n], a, {b.v[0], b.v[1]});
        ptx::mma<T>(scores[2 * n + 1], a, {b.v[2], b.v[3]});
      }
    }
  }

  // Adds the mask, and hides positions that a row does not see, whatever stands there.
  MPK_DEVICE void hide(Scores& scores, uint32_t begin) const {
    const uint32_t lane = lane_anew();
#pragma unroll
    for (int n = 0; n < S::kAtOnce / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t position = begin + 8 * n + lane % 4 * 2 + i % 2;
        const bool sees = position < limit[i / 2] && !is_before_window(position, limit[i / 2]);
        if constexpr (V::kHasMask)
          if (sees) scores[n][i] += V::mask(job, unit.batch, head(i / 2), query(i / 2), position);
        if (!sees) scores[n][i] = -infinity();
      }
  }

  // Turns scores into exponentials. Rounding is explicit, so a row has the same bits whichever tiles are cut.
  MPK_DEVICE void exponentiate(Scores& scores) {
    raise(scores);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float base = attention::subtrahend(maximum[i]), offset = -base * S::kToExponent;
#pragma unroll
      for (SumFragment& s : scores)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; e++) {
          s[e] = ptx::exp2(S::kScaleFirst ? (s[e] - base) * S::kToExponent : fmaf(s[e], S::kToExponent, offset));
          sum[i] += s[e];
        }
    }
  }

  // Raises each row's maximum by its scores, and rescales the results so far.
  MPK_DEVICE void raise(const Scores& scores) {
    float kept[2] = {1, 1};
    bool raises = false;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float high = maximum[i];
#pragma unroll
      for (const SumFragment& s : scores) high = fmaxf(high, fmaxf(s[2 * i], s[2 * i + 1]));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      if (!((high - maximum[i]) * S::kToExponent > S::kSlack)) continue;
      raises = true;
      kept[i] = factor(maximum[i], high);
      maximum[i] = high;
    }
    if (!__any_sync(~0u, raises)) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      sum[i] *= kept[i];
#pragma unroll
      for (SumFragment& o : out) {
        o[2 * i] *= kept[i];
        o[2 * i + 1] *= kept[i];
      }
    }
  }

  // Each load of a warp covers 16 positions by 16 columns, transposed: 8 positions of 8 columns, the next 8 positions,
  // then 8 more columns. With `cut`, values from number `count` on count as zero: anything may stand there, and a
  // weight of 0 would make NaN of it.
  template <bool cut>
  MPK_DEVICE void add_values(const Scores& weights, const uint8_t* values, uint32_t count) {
    const uint32_t lane = lane_anew(), matrix = lane / 8;
    const ptx::SharedAddress from = ValueTile::fragment_of(values, matrix % 2 * 8 + lane % 8, matrix / 2);
#pragma unroll
    for (int k = 0; k < S::kAtOnce / 16; k++) {
      const auto pair = [&](int n, int i) { return round_pair<T>(weights[n][i], weights[n][i + 1]); };
      const ptx::Quad a{pair(2 * k, 0), pair(2 * k, 2), pair(2 * k + 1, 0), pair(2 * k + 1, 2)};
      const uint32_t position = 16 * k + lane % 4 * 2;
      const uint32_t keeps[2] = {kept_of(position, count), kept_of(position + 8, count)};
#pragma unroll
      for (int n = 0; n < ValueTile::kSteps; n++) {
        ptx::Quad b = ptx::load_matrices_transposed(ValueTile::columns_of(from, n) + k * 16 * ValueTile::kPitch);
        if constexpr (cut)
#pragma unroll
          for (int i = 0; i < 4; i++) b.v[i] &= keeps[i % 2];
        ptx::mma<T>(out[2 * n], a, {b.v[0], b.v[1]});
        if (2 * n + 1 < kFragments) ptx::mma<T>(out[2 * n + 1], a, {b.v[2], b.v[3]});
      }
    }
  }
  static MPK_DEVICE uint32_t kept_of(uint32_t position, uint32_t count) {
    return (position < count ? 0xffff : 0) | (position + 1 < count ? 0xffff0000 : 0);
  }

  // Merges the results of the warps that share rows, through shared memory, in their order, into the first warp's.
  // Their numbers are `stride` apart. False when the launch was aborted.
  template <class C>
  MPK_DEVICE bool merge(C& c, uint32_t stride) {
    constexpr int kAtATime = kMergedColumns / 8, kPlace = S::kWarpBytes / int(sizeof(float4));
    float4* mine = reinterpret_cast<float4*>(c.staged()) + c.warp * kPlace + c.lane;
    const bool is_first = c.warp < stride;
    const auto for_others = [&](auto f) {
      const float4* theirs = mine;
#pragma unroll 1
      for (uint32_t other = c.warp + stride; other < kConsumerWarps; other += stride) {
        theirs += stride * kPlace;
        f(theirs, theirs[kAtATime * 32]);
      }
    };
    float high[2] = {maximum[0], maximum[1]}, kept[2];
    if (!is_first) mine[kAtATime * 32] = {maximum[0], maximum[1], sum[0], sum[1]};
#pragma unroll
    for (int begin = 0; begin < kFragments; begin += kAtATime) {
      const int end = kFragments - begin < kAtATime ? kFragments - begin : kAtATime;
      if (!is_first)
#pragma unroll
        for (int n = 0; n < end; n++) {
          const SumFragment& o = out[begin + n];
          mine[n * 32] = {o[0], o[1], o[2], o[3]};
        }
      if (!c.sync()) return false;
      if (is_first) {
        if (begin == 0) {
          for_others([&](const float4*, const float4& of) {
            high[0] = fmaxf(high[0], of.x);
            high[1] = fmaxf(high[1], of.y);
          });
#pragma unroll
          for (int i = 0; i < 2; i++) sum[i] *= kept[i] = factor(maximum[i], high[i]);
          for_others([&](const float4*, const float4& of) {
            sum[0] = fmaf(factor(of.x, high[0]), of.z, sum[0]);
            sum[1] = fmaf(factor(of.y, high[1]), of.w, sum[1]);
          });
        }
#pragma unroll
        for (int n = 0; n < end; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) out[begin + n][i] *= kept[i / 2];
        for_others([&](const float4* theirs, const float4& of) {
          const float factors[2] = {factor(of.x, high[0]), factor(of.y, high[1])};
#pragma unroll
          for (int n = 0; n < end; n++) {
            const float4 v = theirs[n * 32];
            SumFragment& o = out[begin + n];
            o[0] = fmaf(factors[0], v.x, o[0]);
            o[1] = fmaf(factors[0], v.y, o[1]);
            o[2] = fmaf(factors[1], v.z, o[2]);
            o[3] = fmaf(factors[1], v.w, o[3]);
          }
        });
      }
      if (!c.sync()) return false;  // all have been read
    }
#pragma unroll
    for (int i = 0; i < 2; i++) maximum[i] = high[i];
    return true;
  }
  // The factor of sums of exponentials when their maximum changes.
  static MPK_DEVICE float factor(float from, float to) {
    return ptx::exp2((from - attention::subtrahend(to)) * S::kToExponent);
  }

  // Stores results, rounded. Rows that saw nothing give zero or NaN.
  MPK_DEVICE void store() {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      sum[i] += __shfl_xor_sync(~0u, sum[i], 1);
      sum[i] += __shfl_xor_sync(~0u, sum[i], 2);
      if (first + 8 * i >= unit.num_rows()) continue;
      float kept = 1;
      if constexpr (V::kHasSinks)
        kept = attention::add_sink<T>(V::sink(job, head(i)), maximum[i] * (S::kScaleFirst ? 1.0f : V::kScale), sum[i]);
      const float inverse = V::kZeroWithoutKeys && sum[i] == 0 ? 0.0f : __fdividef(kept, sum[i]);
      T* y = unit.y(job, query(i), head(i)) + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kFragments; n++)
        store_pair<V::kAlignedY>(y + 8 * n, round_pair<T>(out[n][2 * i] * inverse, out[n][2 * i + 1] * inverse));
    }
  }
};

// A unit's tiles [begin, end), in the loader's order. False when the launch was aborted.
template <class V, class U, class C>
MPK_DEVICE bool attend(C& c, const Job& job, const U& unit, uint32_t begin, uint32_t end) {
  static_assert(Shape<V>::kEntryBytes <= C::Config::kSlotBytes && C::Config::kEmptyArrivals == kConsumerWarps);
  const uint32_t blocks = unit.warps_of_rows(), parts = kConsumerWarps / blocks;  // parts: of the keys
  Rows<V, U> rows(job, unit, c.warp % blocks, c.lane, c.staged() + c.warp * Shape<V>::kWarpBytes);
#pragma unroll 1
  for (uint32_t tile = begin; tile < end; tile++) {
    if (!c.ring.wait(c.entry, c.phase)) {
      c.failed = true;
      return false;
    }
    if ((tile - begin) % parts == c.warp / blocks) rows.attend(c.ring.slot(c.entry), tile);
    c.ring.release_share(c.entry++);
  }
  if (parts > 1 && !rows.merge(c, blocks)) return false;
  if (c.warp < blocks) rows.store();
  return true;
}

template <class V, class C>
MPK_DEVICE void compute(C& c, const Job& job) {
  static_assert(Variant<V>);
  if (!c.await()) return;
  const uint32_t worker = c.worker(job);
#pragma unroll 1
  for (uint32_t turn = 0; turn * C::Config::kNumWorkers < Unit<V>::kUnits; turn++) {
    const uint32_t number = dealt(turn, worker, C::Config::kNumWorkers);
    if (number >= Unit<V>::kUnits) continue;
    const Unit<V> unit(number);
    if (!attend<V>(c, job, unit, 0, tiles_of(job, unit, c.lane))) return;
  }
}

}  // namespace mpk::prefill_attention
