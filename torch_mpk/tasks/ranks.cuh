// Where a row's values, in ascending order, have used up a limit: their number in nth_largest, their probabilities in
// nucleus. Nothing is sorted: threads keep what lies between two bounds, which come together until that is little
// enough, and search among it. Of parts of the row whose largest value is too small nothing is read: a row comes from
// L2, alone on its multiprocessor, and takes 50 us.
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

MPK_DEVICE uint32_t middle_of(uint32_t low, uint32_t high) { return low + (high - low) / 2 + (high - low) % 2; }

// The last number from `low` to `high` for which it holds; it does for `low`, and for none behind one for which it does
// not.
template <class P>
MPK_DEVICE uint32_t last_where(uint32_t low, uint32_t high, P holds) {
  while (low < high) {
    const uint32_t middle = middle_of(low, high);
    if (holds(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <class V>
constexpr int part_size() {
  if constexpr (V::Peaks::kPresent)
    return V::kN / V::kC;
  else
    return V::kN;
}
template <class V>
inline constexpr int kPartSize = part_size<V>();

struct Element {
  uint32_t order, index;
};

template <class V>
inline constexpr int kKept = V::kN < 8 * 32 ? (V::kN + 31) / 32 : 8;  // of each thread
template <class V>
inline constexpr int kKeptBytes = kKept<V> * kConsumerWarps * 32 * sizeof(Element);

// Calls f(value, index) for some of kCount elements, of which it reads a group of 16 bytes at once where they lie so:
// for those of every `step`-th group from number `first` on, two groups at a time. More would take registers of the
// kernel's other jobs.
template <class V, int kCount, class T, class F>
MPK_DEVICE void for_each_of(const T* x, int first, int step, F f) {
  constexpr int kMost = 16 / sizeof(T), kReads = 2;
  constexpr int kTogether = kCount % kMost == 0 && V::X::kAlignment % 16 == 0 ? kMost : 1;
  struct alignas(kTogether * sizeof(T)) Group {
    T values[kTogether];
  };
  for (int at = first * kTogether; at < kCount; at += step * kTogether * kReads) {
    Group groups[kReads];
#pragma unroll
    for (int r = 0; r < kReads; r++)
      if (at + r * step * kTogether < kCount)
        groups[r] = *reinterpret_cast<const Group*>(x + at + r * step * kTogether);
#pragma unroll
    for (int r = 0; r < kReads; r++) {
      if (at + r * step * kTogether >= kCount) break;
#pragma unroll
      for (int i = 0; i < kTogether; i++) f(to_float(groups[r].values[i]), at + r * step * kTogether + i);
    }
  }
}

// A row, and the largest value of each of its parts, where the operands say that. Sums over it are formed in one order:
// which thread has which elements depends on the row alone.
template <class V, class Threads, class T>
struct Row {
  Threads& threads;
  const T* x;
  const typename V::Peaks::T* peaks;

  // f(value, index) for this thread's elements that may have the order `least` or a higher one, and passed(part) for
  // its parts that have none.
  template <class F, class P>
  MPK_DEVICE void for_each(uint32_t least, F f, P passed) const {
    if constexpr (V::Peaks::kPresent) {
      constexpr int kPart = kPartSize<V>;
      float count = 0;
      for (int part = threads.rank; part < V::kC; part += Threads::kSize)
        count += order_of(to_float(peaks[part])) >= least;
      if (4 * threads.sum(count) <= V::kC) {
        for (int part = threads.rank; part < V::kC; part += Threads::kSize) {
          if (order_of(to_float(peaks[part])) < least) {
            passed(part);
          } else {
            const int begin = part * kPart;
            for_each_of<V, kPart>(x + begin, 0, 1, [&](float value, int index) { f(value, begin + index); });
          }
        }
        return;
      }
    }
    for_each_of<V, V::kN>(x, threads.rank, Threads::kSize, f);
  }

  template <class F>
  MPK_DEVICE void for_each(uint32_t least, F f) const {
    for_each(least, f, [](int) {});
  }

  // f(value, number) for this thread's parts, or elements where there are none.
  template <class F>
  MPK_DEVICE void for_each_peak(F f) const {
    if constexpr (V::Peaks::kPresent) {
      for (int part = threads.rank; part < V::kC; part += Threads::kSize) f(to_float(peaks[part]), part);
    } else {
      for_each(0, f);
    }
  }
};

// Of the values of a row the one at which the sum of what is less than it, by `weight`, exceeds `limit` for the next.
struct Found {
  uint32_t order;
  float below;    // the sum of what is less
  bool are_kept;  // all elements that are equal to it
  int count;      // that this thread has kept
};

template <class V, class Threads, class T, class Weight, class PartWeight>
MPK_DEVICE Found find(const Row<V, Threads, T>& row, Element* kept, uint32_t low, uint32_t high, float limit,
                      Weight weight, PartWeight weight_of_part) {
  Threads& threads = row.threads;
  Element* mine = kept + threads.rank;
  Found found{low, 0, false, 0};
  while (true) {
    const uint32_t middle = middle_of(low, high);
    float below_low = 0, from_low = 0;  // up to the middle
    int count = 0;
    row.for_each(
        low,
        [&](float value, int index) {
          const uint32_t order = order_of(value);
          if (order < low) below_low += weight(value);
          if (order < low || order > high) return;
          if (order < middle) from_low += weight(value);
          if (count < kKept<V>) mine[count * Threads::kSize] = {order, uint32_t(index)};
          count++;
        },
        [&](int part) { below_low += weight_of_part(part); });
    found.below = threads.sum(below_low);
    found.are_kept = threads.max(float(count)) <= kKept<V>;
    found.count = count;
    if (found.are_kept || low == high) break;
    if (found.below + threads.sum(from_low) <= limit) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const float below = found.below;
  found.order = last_where(low, high, [&](uint32_t order) {
    float more = 0;
    for (int i = 0; i < found.count; i++) {
      const uint32_t other = mine[i * Threads::kSize].order;
      if (other < order) more += weight(value_of(other));
    }
    more = below + threads.sum(more);
    if (more <= limit) found.below = more;
    return more <= limit;
  });
  return found;
}

// f(index) for a thread's elements that have this order.
template <class V, class Threads, class T, class F>
MPK_DEVICE void for_each_equal(const Row<V, Threads, T>& row, const Element* kept, const Found& found, F f) {
  if (found.are_kept) {
    for (int i = 0; i < found.count; i++) {
      const Element& element = kept[i * Threads::kSize + row.threads.rank];
      if (element.order == found.order) f(int(element.index));
    }
  } else {
    row.for_each(found.order, [&](float value, int index) {
      if (order_of(value) == found.order) f(index);
    });
  }
}

}  // namespace ranks

namespace nth_largest {

template <class V>
inline constexpr int kSharedBytes = ranks::kKeptBytes<V>;

template <class V, class Threads, class T>
MPK_OUT_OF_LINE void compute(Threads& threads, const typename V::Tile&, uint8_t* shared, const T* x, const int64_t* n,
                             const typename V::Peaks::T* peaks, T* y) {
  const ranks::Row<V, Threads, T> row{threads, x, peaks};
  uint32_t most = 0;
  row.for_each_peak([&](float value, int) {
    const uint32_t order = ranks::order_of(value);
    most = order > most ? order : most;
  });
  // The n-th largest of the threads' largest is at most that of all.
  uint32_t low = 0;
  if (n[0] < Threads::kSize)
    low = ranks::last_where(0, 0xffffffffu, [&](uint32_t order) { return threads.sum(most >= order) > float(n[0]); });
  const auto one = [](float) { return 1.0f; };
  const auto all = [](int) { return float(ranks::kPartSize<V>); };
  const auto found =
      ranks::find(row, reinterpret_cast<ranks::Element*>(shared), low, 0xffffffffu, float(V::kN - 1 - n[0]), one, all);
  if (threads.rank == 0) y[0] = cast<T>(ranks::value_of(found.order));
}

}  // namespace nth_largest

namespace nucleus {

template <class V>
inline constexpr int kSharedBytes = ranks::kKeptBytes<V>;

template <class V, class Threads, class T>
MPK_OUT_OF_LINE void compute(Threads& threads, const typename V::Tile&, uint8_t* shared, const T* x, const float* rest,
                             const typename V::Peaks::T* peaks, const typename V::Sums::T* sums, T* least,
                             int64_t* first) {
  static_assert(V::Peaks::kPresent == V::Sums::kPresent, "nucleus takes peaks and sums together");
  ranks::Element* kept = reinterpret_cast<ranks::Element*>(shared);
  const ranks::Row<V, Threads, T> row{threads, x, peaks};
  float most = -infinity(), total = 0;
  bool is_number = true;
  row.for_each_peak([&](float value, int) {
    is_number &= value == value && value != infinity();
    most = value > most ? value : most;
  });
  most = threads.max(most);
  // Of a part, or of an element where there are none.
  const auto sum_of = [&](float peak, int number) {
    float sum = expf(peak - most);
    if constexpr (V::Sums::kPresent) sum *= sums[number];
    return sum;
  };
  row.for_each_peak([&](float peak, int number) { total += sum_of(peak, number); });
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
  const auto weight_of_part = [&](int part) {
    return is_by_number ? float(ranks::kPartSize<V>) : sum_of(to_float(peaks[part]), part);
  };
  // What has less than an N-th of the limit goes: all of that together does not exceed it, but for rounding.
  const float bound = most + logf(limit / float(V::kN)) - 0.01f;
  const uint32_t high = ranks::order_of(most), low = !is_by_number && bound < most ? ranks::order_of(bound) : 0;
  const auto found = ranks::find(row, kept, low, high, limit, weight, weight_of_part);
  // Of those that are equal the first go, too, but not the last of all.
  float count = 0;
  ranks::for_each_equal(row, kept, found, [&](int) { count++; });
  count = threads.sum(count);
  const float value = ranks::value_of(found.order);
  float gone = floorf((limit - found.below) / weight(value));
  gone = gone > 0 ? (gone < count ? gone : count - 1) : 0;
  const uint32_t stays = ranks::last_where(0, V::kN - 1, [&](uint32_t end) {
    float before = 0;
    ranks::for_each_equal(row, kept, found, [&](int index) { before += index < int(end); });
    return threads.sum(before) <= gone;
  });
  if (threads.rank == 0) {
    least[0] = cast<T>(value);
    first[0] = stays;
  }
}

}  // namespace nucleus
}  // namespace mpk::tasks
