// The declarations of prefill_attention's variants, and the tiles of keys and values in shared memory that follow.
#pragma once

#include "torch_mpk/device/concepts.cuh"
#include "torch_mpk/device/tasks/attention_scores.cuh"
#include "torch_mpk/device/warpgroup.cuh"

namespace mpk::prefill_attention {

// The place of a sequence's and group's keys or values in their matrix: a row, and a block of 64 columns, or a column
// where heads are no multiple of 64.
struct Keys {
  const void* map;
  int row, column;
};

// A variant declares tiles of queries and keys.
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

// It declares the sizes of one job.
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
  // Whether queries stay in registers; otherwise they stay in the warp's shared memory, through which warps later
  // merge.
  static constexpr bool kKeepsQueries = keeps_queries(V::kSize, V::kValueSize);
  // Whether the four warps of a warpgroup multiply together. They take queries from registers, keys and values from
  // boxes. Smaller heads are slower so: they have fewer products for each exponential, and warps by themselves make
  // exponentials while others multiply. Larger ones leave no registers for scores.
  static constexpr bool kByWarpgroups = !ByRow<V> && kKeepsQueries && V::kSize % kBoxColumns == 0 && V::kSize >= 128 &&
                                        V::kValueSize == 128 && V::kRows % kWarpgroupRows == 0;
  static constexpr int kRowsTogether = kByWarpgroups ? kWarpgroupRows : kWarpRows;
  // Positions whose scores a warp computes at a time: as many as registers hold beside the results and a mask.
  static constexpr int kWidest = V::kSize > V::kValueSize ? V::kSize : V::kValueSize;
  static constexpr int kFit = floor_power_of_two((V::kHasMask ? 4096 : 8192) / kWidest);
  static constexpr int kAtOnce = V::kKeys < kFit ? V::kKeys : kFit;
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

}  // namespace mpk::prefill_attention
