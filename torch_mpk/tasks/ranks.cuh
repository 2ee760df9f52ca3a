// Where a row's values, in ascending order, have used up a limit: their number in nth_largest, their probabilities in
// nucleus. Nothing is sorted: threads keep what lies between two bounds, which come together until that is little
// enough, and search among it. Each thread has always the same elements, so that sums are formed in one order.
#pragma once

#include "torch_mpk/device/tile.cuh"

namespace mpk::tasks {
namespace ranks {

// As unsigned numbers values compare as they do as floats, NaN above all; both zeros are one.
MPK_DEVICE uint32_t order_of(float v) {
  if (v != v) return 0xffffffffu;
  union {
    float value;
    uint32_t bits;
  } u{v + 0.0f};
  return u.bits >> 31 ? ~u.bits : u.bits | 0x80000000u;
}

MPK_DEVICE float value_of(uint32_t order) {
  union {
    uint32_t bits;
    float value;
  } u{order >> 31 ? order & 0x7fffffffu : ~order};
  return u.value;
}

struct Element {
  uint32_t order, index;
};

// Of each thread. Half of the candidates of a row of 151,936 logits are among a few hundred values, in any thread's.
template <class V>
inline constexpr int kKept = V::kN < 8 * 32 ? (V::kN + 31) / 32 : 8;
template <class V>
inline constexpr int kKeptBytes = kKept<V> * kConsumerWarps * 32 * sizeof(Element);

// Calls f(value, index) for a thread's elements, of which it reads 16 bytes at once where they lie so, and two such
// pieces at a time: a row comes from L2, alone on its multiprocessor. More would take registers of the kernel's other
// jobs.
template <class V, class Threads, class T, class F>
MPK_DEVICE void for_each(const Threads& threads, const T* x, F f) {
  constexpr int kMost = 16 / sizeof(T), kReads = 2;
  constexpr int kTogether = V::kN % kMost == 0 && V::X::kAlignment % 16 == 0 ? kMost : 1;
  constexpr int kStep = Threads::kSize * kTogether, kEnd = V::kN;
  struct alignas(kTogether * sizeof(T)) Group {
    T values[kTogether];
  };
  for (int begin = threads.rank * kTogether; begin < kEnd; begin += kStep * kReads) {
    Group groups[kReads];
#pragma unroll
    for (int r = 0; r < kReads; r++)
      if (begin + r * kStep < kEnd) groups[r] = *reinterpret_cast<const Group*>(x + begin + r * kStep);
#pragma unroll
    for (int r = 0; r < kReads; r++) {
      if (begin + r * kStep >= kEnd) break;
#pragma unroll
      for (int i = 0; i < kTogether; i++) f(to_float(groups[r].values[i]), begin + r * kStep + i);
    }
  }
}

// Of the values of a row the one at which the sum of what is less than it, by `weight`, exceeds `limit` for the next.
struct Found {
  uint32_t order;
  float below;    // the sum of what is less
  bool are_kept;  // all elements that are equal to it
  int count;      // that this thread has kept
};

template <class V, class Threads, class T, class Weight>
MPK_DEVICE Found find(Threads& threads, Element* kept, const T* x, uint32_t low, uint32_t high, float limit,
                      Weight weight) {
  Element* mine = kept + threads.rank;
  Found found{low, 0, false, 0};
  while (true) {
    const uint32_t middle = low + (high - low) / 2 + (high - low) % 2;
    float below_low = 0, below_middle = 0;
    int count = 0;
    for_each<V>(threads, x, [&](float value, int index) {
      const uint32_t order = order_of(value);
      const float w = weight(value);
      if (order < low) below_low += w;
      if (order < middle) below_middle += w;
      if (order < low || order > high) return;
      if (count < kKept<V>) mine[count * Threads::kSize] = {order, uint32_t(index)};
      count++;
    });
    found.below = threads.sum(below_low);
    found.are_kept = threads.max(float(count)) <= kKept<V>;
    found.count = count;
    if (found.are_kept || low == high) break;
    if (threads.sum(below_middle) <= limit) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const float below = found.below;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2 + (high - low) % 2;
    float more = 0;
    for (int i = 0; i < found.count; i++) {
      const uint32_t order = mine[i * Threads::kSize].order;
      if (order < middle) more += weight(value_of(order));
    }
    more = below + threads.sum(more);
    if (more <= limit) {
      low = middle;
      found.below = more;
    } else {
      high = middle - 1;
    }
  }
  found.order = low;
  return found;
}

// f(index) for a thread's elements that have this order.
template <class V, class Threads, class T, class F>
MPK_DEVICE void for_each_equal(const Threads& threads, const Element* kept, const T* x, const Found& found, F f) {
  if (found.are_kept) {
    for (int i = 0; i < found.count; i++) {
      const Element& element = kept[i * Threads::kSize + threads.rank];
      if (element.order == found.order) f(int(element.index));
    }
  } else {
    for_each<V>(threads, x, [&](float value, int index) {
      if (order_of(value) == found.order) f(index);
    });
  }
}

}  // namespace ranks

namespace nth_largest {

template <class V>
inline constexpr int kSharedBytes = ranks::kKeptBytes<V>;

template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile&, uint8_t* shared, const T* x, const int64_t* n,
                        T* y) {
  ranks::Element* kept = reinterpret_cast<ranks::Element*>(shared);
  uint32_t most = 0;
  ranks::for_each<V>(threads, x, [&](float value, int) {
    const uint32_t order = ranks::order_of(value);
    most = order > most ? order : most;
  });
  // The n-th largest of the threads' largest is at most that of all.
  uint32_t low = 0, high = 0xffffffffu;
  if (n[0] < Threads::kSize) {
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2 + (high - low) % 2;
      if (threads.sum(most >= middle) > float(n[0])) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
  }
  const auto found =
      ranks::find<V>(threads, kept, x, low, 0xffffffffu, float(V::kN - 1 - n[0]), [](float) { return 1.0f; });
  if (threads.rank == 0) y[0] = cast<T>(ranks::value_of(found.order));
}

}  // namespace nth_largest

namespace nucleus {

template <class V>
inline constexpr int kSharedBytes = ranks::kKeptBytes<V>;

template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile&, uint8_t* shared, const T* x, const float* rest,
                        T* least, int64_t* first) {
  ranks::Element* kept = reinterpret_cast<ranks::Element*>(shared);
  float most = -infinity(), total = 0;
  bool is_number = true;
  ranks::for_each<V>(threads, x, [&](float value, int) {
    is_number &= value == value && value != infinity();
    most = value > most ? value : most;
  });
  most = threads.max(most);
  ranks::for_each<V>(threads, x, [&](float value, int) { total += expf(value - most); });
  total = threads.sum(total);
  if (threads.sum(!is_number) > 0 || most == -infinity()) {  // probabilities are NaN, and nothing goes
    if (threads.rank == 0) {
      least[0] = cast<T>(-infinity());
      first[0] = 0;
    }
    return;
  }
  // Where nothing goes, not even what has no probability, the least is found by number.
  const bool is_by_number = rest[0] < 0;
  const float limit = is_by_number ? 0.0f : rest[0] * total;
  const auto weight = [&](float value) { return is_by_number ? 1.0f : expf(value - most); };
  // What has less than an N-th of the limit goes: all of that together does not exceed it, but for rounding.
  const float bound = most + logf(limit / float(V::kN)) - 0.01f;
  const uint32_t high = ranks::order_of(most), low = !is_by_number && bound < most ? ranks::order_of(bound) : 0;
  auto found = ranks::find<V>(threads, kept, x, low, high, limit, weight);
  // Of those that are equal the first go, too, but not the last of all.
  float count = 0;
  ranks::for_each_equal<V>(threads, kept, x, found, [&](int) { count++; });
  count = threads.sum(count);
  const float value = ranks::value_of(found.order);
  float gone = floorf((limit - found.below) / weight(value));
  gone = gone > 0 ? (gone < count ? gone : count - 1) : 0;
  int low_index = 0, high_index = V::kN - 1;
  while (low_index < high_index) {
    const int middle = (low_index + high_index + 1) / 2;
    float before = 0;
    ranks::for_each_equal<V>(threads, kept, x, found, [&](int index) { before += index < middle; });
    if (threads.sum(before) <= gone) {
      low_index = middle;
    } else {
      high_index = middle - 1;
    }
  }
  if (threads.rank == 0) {
    least[0] = cast<T>(value);
    first[0] = low_index;
  }
}

}  // namespace nucleus
}  // namespace mpk::tasks
