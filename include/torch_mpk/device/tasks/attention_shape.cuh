// What attention's variants declare, where positions lie, and how a split uses shared memory.
#pragma once

#include "torch_mpk/device/fragment.cuh"
#include "torch_mpk/device/polled.cuh"
#include "torch_mpk/device/tasks/attention_scores.cuh"
#include "torch_mpk/device/tasks/attention_splits.cuh"
#include "torch_mpk/device/tasks/linear_shape.cuh"

namespace mpk::attention {

// What a variant declares of one job.
template <class V>
concept Sizes = Scores<V> && requires {
  typename V::T;
  // kSize: of a query and a key; kValueSize: of a value and a result.
  requires Constants<int, V::kBatch, V::kGroups, V::kSize, V::kValueSize, V::kLength, V::kWorkers, V::kTilePositions>;
  // With several rows: the most tiles of a split, and the splits that a long enough row has. Scratch has room for the
  // results of kSplits splits.
  requires Constants<int, V::kSplitTiles, V::kFewSplits, V::kSplits>;
  // kHeads query heads are computed at a time. kPasses such groups share a key-value head, and each streams it anew.
  // kFewHeads divides kHeads, see Spread.
  requires Constants<int, V::kPasses, V::kHeads, V::kFewHeads>;
  requires Constants<bool, V::kHasNew, V::kOverlaps>;
  // Bytes from position to position.
  requires Constants<uint32_t, V::kPitchK, V::kPitchV>;
  // Scratch for the result of a head of a split.
  requires Constants<int, V::kPartialBytes>;
  // y is a polled vector; it is stored.
  requires Constants<bool, V::kPolled, V::kStored>;
  // RowsK is RowsQ, and RowsV fetches rows as RowsQ does, without tasks.
  requires Constants<bool, V::kOneChain>;
  // Limits, the slot and the chains' first operands are known before the phase's events.
  requires Constants<bool, V::kEarly>;
};

template <class V>
concept Masked = requires(const Job& job, uint32_t b, uint32_t h, uint32_t position) {
  { V::mask(job, b, h, position) } -> Same<float>;
};

// Keys and values lie in a cache of each batch row b and group g,
template <class V>
concept InCaches = requires(const Job& job, uint32_t b, uint32_t g) {
  { V::k_cache(job, b, g) } -> Same<typename V::T*>;
  { V::v_cache(job, b, g) } -> Same<typename V::T*>;
  { V::slot(job) } -> Same<int64_t>;
};

// or in pages. Entry m of row b in the table is the page of positions m kPageSize to (m + 1) kPageSize; there is none
// if the entry is not below num_pages.
template <class V>
concept InPages = Constants<int, V::kPageSize> && requires(const Job& job, uint32_t b, int32_t page) {
  requires Constants<bool, V::kInBoxes>;  // keys and values are copied as boxes
  { V::num_pages(job) } -> Same<int32_t>;
  { V::page_at(job, b, b) } -> Same<const int32_t*>;
  { V::k_pages(job, page, b) } -> Same<typename V::T*>;
  { V::v_pages(job, page, b) } -> Same<typename V::T*>;
};

// The result is stored, unless nothing but its tiles is needed.
template <class V>
concept StoresHeads = requires(const Job& job, uint32_t b, uint32_t h) {
  { V::y(job, b, h) } -> Same<typename Choose<V::kPolled, uint16_t*, typename V::T*>::Type>;
};

// Operands, for batch row b, group g and head h.
template <class V>
concept Places = (InCaches<V> || InPages<V>) && requires(const Job& job, uint32_t b, uint32_t h) {
  { V::limit(job, b) } -> Same<int64_t>;
  { V::partials(job) } -> Same<uint8_t*>;
} && (V::kStored ? StoresHeads<V> : HasTiles<V>) && (!V::kHasMask || Masked<V>) && (!V::kHasSinks || HasSinks<V>);

// Stages rows, with the batch row as a parameter, from references that begin at number `first`. C: the consumer.
template <class Rows, class V, class C, auto first>
concept StagesRows =
    Constants<uint32_t, first> &&
    RowChain<typename Rows::template Chain<WarpThreads<C>>, WarpThreads<C>, typename V::T, uint32_t, uint32_t>;

template <class V, class C>
concept StagesNewRows =
    StagesRows<typename V::RowsK, V, C, V::kRefsK> && StagesRows<typename V::RowsV, V, C, V::kRefsV>;

template <class V, class C>
concept Variant =
    Sizes<V> && Places<V> && StagesRows<typename V::RowsQ, V, C, V::kRefsQ> && (!V::kHasNew || StagesNewRows<V, C>);

constexpr int floor_power_of_two(int n) { return n < 2 ? 1 : 2 * floor_power_of_two(n / 2); }

// A warp's result: the unnormalised output, the maximum, the sum of exponentials, padding.
template <class V>
inline constexpr int kPartial = V::kValueSize + 4;

// The positions of a variant, and the one that a row writes first. In caches they lie side by side, the same for all
// rows.
template <class V>
struct Positions {
  using T = typename V::T;
  using Slot = int64_t;
  Slot slot;

  MPK_DEVICE explicit Positions(const Job& job) : slot(V::slot(job)) {}

  // The position that the row writes; outside [0, kLength): none.
  MPK_DEVICE Slot written(const Job&, uint32_t) const { return slot; }

  // Finds the key or value of a position. False if it has none.
  static MPK_DEVICE bool find(const Job& job, uint32_t row, uint32_t group, Slot position, bool is_value, T*& at) {
    T* cache = is_value ? V::v_cache(job, row, group) : V::k_cache(job, row, group);
    at = reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(cache) + position * (is_value ? V::kPitchV : V::kPitchK));
    return true;
  }

  // Prefetches, before limits are known. Caches need nothing.
  static MPK_DEVICE void prefetch(const Job&, int) {}

  // Streams a split's tiles: keys and values are a tile's two parts, positions its rows, and `limit` bounds the batch
  // row's. False when the launch was aborted.
  template <class L>
  static MPK_DEVICE bool load(L& l, const Job& job, const KvSplit& split, uint32_t limit);
};

template <class V>
using Slot = typename Positions<V>::Slot;

// The positions of a tile that count. In caches: all below the row's limit.
template <class V>
struct Live {
  static constexpr bool kAreKnown = true;  // not told by the loader; those that count come first
  uint32_t rows;

  MPK_DEVICE Live(uint32_t first, uint32_t limit) : rows(min(uint32_t(kTile<V>), limit - first)) {}
  MPK_DEVICE bool has(uint32_t place) const { return place < rows; }
  MPK_DEVICE bool has(int64_t position, uint32_t first) const {
    return position >= int64_t(first) && position < int64_t(first) + rows;
  }
  MPK_DEVICE bool has_all() const { return rows == kTile<V>; }
  MPK_DEVICE uint32_t num_first() const { return rows; }  // before the first that does not count
};

// Bytes of the partial results of a split.
template <class V>
inline constexpr uint32_t kSplitBytes = V::kHeads * V::kPartialBytes;

// Warps that compute tiles.
template <class V>
inline constexpr int kTileWarps = kConsumerWarps - (V::kOverlaps ? kProducerWarps : 0);

template <Sizes V>
struct Shape {
  using T = typename V::T;
  static constexpr int kHeads = V::kHeads, kSize = V::kSize, kValueSize = V::kValueSize, kTile = attention::kTile<V>;
  static constexpr int kRowBytes = kSize * int(sizeof(T)), kValueBytes = kValueSize * int(sizeof(T));
  static constexpr bool kAlike = kRowBytes == kValueBytes;
  // Keys and values share a ring entry.
  static constexpr bool kTogether = kAlike && 2 * kTile * kRowBytes <= kMinSlotBytes;
  static constexpr int kEntries = kTogether ? 1 : 2;  // of a tile
  static constexpr int kParts = kTogether ? 2 : 1;    // of an entry
  // Overlapping splits poll nothing that more entries in flight would delay.
  static constexpr uint32_t kInFlight = entries_in_flight(kParts * kTile * kRowBytes) * (V::kOverlaps ? 2 : 1);
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kChunks = kSize / kVec, kValueChunks = kValueSize / kVec;  // 16-byte chunks of a row
  static constexpr bool kTensorCores = kHasFragments<T> && kTile % kWarpRows == 0;
  // Worth it where a warp has many tiles. With one row it has one or two, and the code that each layer fetches counts
  // more.
  static constexpr bool kTensorCoreSums = kTensorCores && V::kBatch > 1;
  // A lane's elements of every head's result: kWidth neighbouring ones in each of kSteps.
  static constexpr int kWidth = lane_width<T>(kValueSize);
  static constexpr int kSteps = (kValueSize / kWidth + 31) / 32;
  static MPK_DEVICE bool holds(int step, uint32_t lane) {
    return kValueSize % (32 * kWidth) == 0 || (lane + 32 * step) * kWidth < kValueSize;
  }
  // Rows of values summed at a time: as many as are quick to read together while the code is short.
  static constexpr int kAtATime = floor_power_of_two(32 / kHeads), kRows = kAtATime < kTile ? kAtATime : kTile;
  // Softmax of a tile: a lane has one score of a head, and the warp has kAtOnce heads.
  static constexpr int kAtOnce = 32 / kTile, kRounds = (kHeads + kAtOnce - 1) / kAtOnce;
  // Scores, two heads at a time from tensor cores, then weights [position][kPad]. The row behind them has the factors
  // of earlier results.
  static constexpr int kLeastPad = kTensorCores && kAtOnce < 2 ? 2 : kAtOnce;
  static constexpr int kPad = linear::next_power_of_two(kHeads > kLeastPad ? kHeads : kLeastPad);
  static constexpr int kWeights = ((kTile + 1) * kPad + 3) / 4 * 4;
  static constexpr int kFit = 24 * 1024 / (kConsumerWarps * kPartial<V> * 4);
  // Heads merged at a time.
  static constexpr int kStored = V::kOverlaps || kFit >= kHeads ? kHeads : kFit < 1 ? 1 : kFit;
  // Shared memory from the staged area on: rows of q, a multiple of four for tensor cores, then k_new and v_new.
  static constexpr int kNewRow = kTensorCores ? (kHeads + 3) / 4 * 4 : kHeads;
  // In elements; neighbouring rows begin in different banks.
  static constexpr int kPitch = (kSize > kValueSize ? kSize : kValueSize) + (kTensorCores ? 32 : 0);
  static constexpr int kWeightsOffset = (kNewRow + 2) * kPitch * int(sizeof(T));
  static constexpr int kFloatsOffset = kWeightsOffset + kTileWarps<V> * kWeights * 4;
  static constexpr int kCombineOffset = kFloatsOffset + (kTensorCores ? 0 : kHeads * kSize * 4);
  static constexpr int kStagedOfSplit = kCombineOffset + kTileWarps<V> * kStored * kPartial<V> * 4;
  static constexpr int kBufferBytes = (kStagedOfSplit + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
  static constexpr int kStagedBytes = V::kOverlaps ? 2 * kBufferBytes : kStagedOfSplit;
};

}  // namespace mpk::attention
