// all_reduce and all_gather over the ranks of a group. Each rank has a GPU of its own, and all launch the same kernel.
//
// A rank pushes its data as tagged words (abi/mailboxes.h) to the mailboxes of all other ranks, and polls its own
// mailbox, which is in its own memory. A worker pushes all of its part before it waits for any word, and has the same
// part on every rank, so ranks cannot deadlock. Words carry their tags, so relaxed stores and loads suffice, at system
// scope. Sums are added in the order of the ranks, so all ranks have the same bits.
//
// V: T, kRanks, kElements, kPolledX, kAlignedX, x(job); kByTurns, kTurns, kPlaceBytes, turn(job), offset(job) and
// kWords, see schedule/mailboxes.h; Extra, preload(job, point). all_reduce: finish(c, job, point, value, extra).
// all_gather: kRow, put(job, index, value).
#pragma once

#include "torch_mpk/abi/mailboxes.h"
#include "torch_mpk/device/polled.cuh"

namespace mpk::exchange {

inline constexpr int kDataBytes = 8;  // two words, which a thread pushes or polls at a time

template <class V>
inline constexpr int kPer = kDataBytes / int(sizeof(typename V::T));  // elements
template <class V>
inline constexpr uint32_t kUnits = V::kElements / kPer<V>;

// Waits for two words of another rank. Their tags differ when the launch was aborted, here or by another rank.
__device__ __noinline__ ulonglong2 wait_words(const Watchdog& dog, const ulonglong2* p, uint32_t tag, uint32_t from,
                                              const uint32_t* aborted, uint32_t ranks, uint32_t phase) {
  uint64_t since = 0;
  ulonglong2 words = ptx::load_relaxed_sys(p);
  for (uint32_t i = 1; differing(words, tag) != 0; words = ptx::load_relaxed_sys(p), i++) {
    if ((i & 4095) != 0) continue;
    const Stall now = stall(phase, WarpRole::kConsumer, Waiting::kRank, from, 0, 0, 0);
    bool is_lost = false;
    for (uint32_t r = 0; r < ranks; r++) is_lost |= ptx::load_relaxed_sys(aborted + r) == kRankAborted;
    if (is_lost) do_abort(dog, now);
    if (is_lost || (since = keep_waiting(dog, now, since)) == 0) return words;
  }
  return words;
}

// See stamps.cuh.
template <class V, class C>
MPK_DEVICE uint32_t* stamps_of_ranks(const C& c) {
  return mpk::stamps_of_ranks<typename C::Config>(c.params.control, c.epoch, c.phase, V::kRanks);
}
template <class V, class C>
MPK_DEVICE void clear_stamps(const C& c) {
  if constexpr (kProfiled<typename C::Config> && V::kRanks > 1)
    if (c.rank == 0)
      for (int r = 0; r < V::kRanks; r++) stamps_of_ranks<V>(c)[r] = 0;
}

template <class V, class C>
struct Mailboxes {
  uint8_t* own;
  uint8_t* const* bases;
  uint32_t rank, tag;
  int64_t place;

  MPK_DEVICE Mailboxes(const C& c, const Job& job)
      : own(nullptr), bases(c.params.mailboxes), rank(c.params.rank), tag(tag_of(c)) {
    if constexpr (V::kRanks > 1) own = bases[rank];
    const uint32_t turn = V::kByTurns ? c.epoch * V::kTurns + V::turn(job) : c.epoch;
    place = kMailboxHeaderBytes + turn % 2 * int64_t(V::kPlaceBytes) + int64_t(V::offset(job)) * kUnitBytes;
  }

  // The words of a unit from rank `from`, in the mailbox at `base`.
  MPK_DEVICE ulonglong2* words(uint8_t* base, uint32_t from, uint32_t unit) const {
    return reinterpret_cast<ulonglong2*>(base + place + int64_t(from) * V::kWords * sizeof(uint64_t)) + unit;
  }
  MPK_DEVICE void push(uint32_t unit, uint2 data) const {
#pragma unroll
    for (int i = 1; i < V::kRanks; i++) {  // each rank begins with another one
      const uint32_t to = (rank + i) % V::kRanks;
      ptx::store_relaxed_sys(words(bases[to], rank, unit), tagged(data.x, data.y, tag));
    }
  }
  // False when the launch was aborted.
  MPK_DEVICE bool take(C& c, uint32_t unit, uint32_t from, uint2& data) const {
    uint32_t since = 0;
    if constexpr (kProfiled<typename C::Config>) since = ptx::clock();
    const ulonglong2 got = wait_words(c.shared.watchdog, words(own, from, unit), tag, from,
                                      reinterpret_cast<const uint32_t*>(own), V::kRanks, c.phase);
    if constexpr (kProfiled<typename C::Config>)
      if (c.rank == 0) stamps_of_ranks<V>(c)[from] += ptx::clock() - since;
    data = make_uint2(static_cast<uint32_t>(got.x), static_cast<uint32_t>(got.y));
    return differing(got, tag) == 0;
  }
};

// This rank's data of a unit. False when the launch was aborted.
template <class V, class C>
MPK_DEVICE bool load_own(C& c, const Job& job, uint32_t unit, uint2& data) {
  if constexpr (V::kPolledX) {
    const uint2 four = wait_four(c.shared.watchdog, reinterpret_cast<const uint2*>(V::x(job)) + unit, c.phase);
    data = make_uint2(~four.x, ~four.y);
    return (absent(four) & kAbsentBits) == 0;
  } else if constexpr (V::kAlignedX) {
    data = reinterpret_cast<const uint2*>(V::x(job))[unit];
    return true;
  } else {
    Vec<typename V::T, kPer<V>> elements;
#pragma unroll
    for (int i = 0; i < kPer<V>; i++) elements.v[i] = V::x(job)[unit * kPer<V> + i];
    data = reinterpret_cast<const uint2&>(elements);
    return true;
  }
}

template <class V>
MPK_DEVICE typename V::T element(const uint2& data, int i) {
  using T = typename V::T;
  static_assert(sizeof(T) == 2 || sizeof(T) == 4);
  const uint32_t word = i * int(sizeof(T)) < 4 ? data.x : data.y;
  if constexpr (sizeof(T) == 4) return *reinterpret_cast<const T*>(&word);
  const uint16_t half = static_cast<uint16_t>(word >> (i % 2 * 16));
  return *reinterpret_cast<const T*>(&half);
}

template <class C>
MPK_DEVICE Span units_of(const C& c, const Job& job, uint32_t units) {
  return static_span(units, c.worker(job), C::Config::kNumWorkers);
}

// Whether each thread has at most one unit.
template <class V, class C>
inline constexpr bool kOnce = (kUnits<V> + C::Config::kNumWorkers - 1) / C::Config::kNumWorkers <= kConsumerThreads;

template <class V>
struct Extras {
  typename V::Extra of[kPer<V>];

  MPK_DEVICE Extras(const Job& job, uint32_t unit) {
#pragma unroll
    for (int i = 0; i < kPer<V>; i++) of[i] = V::preload(job, unit * kPer<V> + i);
  }
};

// Adds up a unit of all ranks, and passes the sums on. False when the launch was aborted.
template <class V, class C>
MPK_DEVICE bool add_unit(C& c, const Job& job, const Mailboxes<V, C>& boxes, uint32_t unit, uint2 own,
                         const Extras<V>& extras) {
  float sums[kPer<V>];
#pragma unroll
  for (int r = 0; r < V::kRanks; r++) {
    uint2 data = own;
    if (V::kRanks > 1 && r != int(boxes.rank) && !boxes.take(c, unit, r, data)) return false;
#pragma unroll
    for (int i = 0; i < kPer<V>; i++)
      sums[i] = r == 0 ? to_float(element<V>(data, i)) : sums[i] + to_float(element<V>(data, i));
  }
#pragma unroll
  for (int i = 0; i < kPer<V>; i++) V::finish(c, job, unit * kPer<V> + i, cast<typename V::T>(sums[i]), extras.of[i]);
  return true;
}

template <class V, class C>
MPK_DEVICE void compute_sum(C& c, const Job& job) {
  if (!c.await()) return;
  clear_stamps<V>(c);
  const Mailboxes<V, C> boxes(c, job);
  const Span mine = units_of(c, job, kUnits<V>);
  const uint32_t first = mine.begin + c.rank;
  uint2 own{};
  if constexpr (kOnce<V, C>) {
    if (first >= mine.end) return;
    const Extras<V> extras(job, first);
    if (load_own<V>(c, job, first, own)) {
      boxes.push(first, own);
      c.stamp_first(&PhaseStamps::staged);
      if (add_unit<V>(c, job, boxes, first, own, extras)) return;
    }
    c.failed = true;
  } else {
    for (uint32_t u = first; u < mine.end && !c.failed; u += kConsumerThreads) {
      c.failed = !load_own<V>(c, job, u, own);
      if (!c.failed) boxes.push(u, own);
    }
    c.stamp_first(&PhaseStamps::staged);
    for (uint32_t u = first; u < mine.end && !c.failed; u += kConsumerThreads) {
      const Extras<V> extras(job, u);
      c.failed = !load_own<V>(c, job, u, own) || !add_unit<V>(c, job, boxes, u, own, extras);
    }
  }
}

// Stores a unit of rank `from` in its columns.
template <class V>
MPK_DEVICE void put_unit(const Job& job, uint32_t unit, uint32_t from, const uint2& data) {
  const uint32_t first = unit * kPer<V>, row = first / V::kRow, column = first - row * V::kRow;
#pragma unroll
  for (int i = 0; i < kPer<V>; i++)
    V::put(job, (int64_t(row) * V::kRanks + from) * V::kRow + column + i, element<V>(data, i));
}

template <class V, class C>
MPK_DEVICE void compute_rows(C& c, const Job& job) {
  if (!c.await()) return;
  clear_stamps<V>(c);
  const Mailboxes<V, C> boxes(c, job);
  const Span mine = units_of(c, job, kUnits<V>);
  uint2 data{};
  for (uint32_t u = mine.begin + c.rank; u < mine.end && !c.failed; u += kConsumerThreads) {
    c.failed = !load_own<V>(c, job, u, data);
    if (c.failed) break;
    boxes.push(u, data);
    put_unit<V>(job, u, boxes.rank, data);
  }
  c.stamp_first(&PhaseStamps::staged);
  for (uint32_t u = mine.begin + c.rank; u < mine.end && !c.failed; u += kConsumerThreads)
#pragma unroll
    for (int i = 1; i < V::kRanks; i++) {
      const uint32_t from = (boxes.rank + i) % V::kRanks;
      if (c.failed || !boxes.take(c, u, from, data)) {
        c.failed = true;
      } else {
        put_unit<V>(job, u, from, data);
      }
    }
}

}  // namespace mpk::exchange
