// Finds where a row's values, in ascending order, use up a limit: their number in nth_largest, their probabilities in
// nucleus. Nothing is sorted. Threads keep the values between two bounds, and search among them. If these are too many,
// sums of bins between the bounds narrow the bounds first. Parts of the row whose largest value is too small are not
// read.
#pragma once

#include "torch_mpk/device/tile.cuh"

namespace mpk::tasks {
namespace ranks {

// An order of values as unsigned numbers: that of floats, with NaN above all, and both zeros equal.
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

// The last number from `low` to `high` for which the predicate holds. It holds for `low`, and once it fails it fails
// for all higher numbers.
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
inline constexpr int kKept = V::kN < 8 * 32 ? (V::kN + 31) / 32 : 8;  // of a thread
inline constexpr int kBins = 1024;

// Sums of weights, at most 1, as integers, so that their order does not matter. They are in halves, which shared memory
// adds in place.
struct BinSums {
  static constexpr float kUnit = 1ull << 40;
  uint32_t low[kBins], high[kBins];

  static MPK_DEVICE uint64_t units_of(float weight) {  // never 0
    return static_cast<uint64_t>(weight * kUnit) + (weight > 0);
  }
  MPK_DEVICE void add(int bin, float weight) {
    const uint64_t units = units_of(weight);
    const uint32_t mine = static_cast<uint32_t>(units), before = atomicAdd(&low[bin], mine);
    const uint32_t more = static_cast<uint32_t>(units >> 32) + (before + mine < mine);
    if (more != 0) atomicAdd(&high[bin], more);
  }
  MPK_DEVICE uint64_t units(int bin) const { return uint64_t(high[bin]) << 32 | low[bin]; }
};

// The values that all threads keep, if few enough to compare each with all others. In a search, threads would wait for
// each other at every step.
struct List {
  static constexpr uint32_t kMost = 256;
  uint32_t count, best, least, below_bits, index;
  uint32_t orders[kMost], indices[kMost];
  uint64_t units[kMost];
};

// Each thread's kept values, or sums of bins; and the list.
template <class V>
inline constexpr int kKeptBytes = kKept<V> * kConsumerWarps * 32 * sizeof(Element);
template <class V>
inline constexpr int kListOffset = kKeptBytes<V> > int(sizeof(BinSums)) ? kKeptBytes<V> : int(sizeof(BinSums));
template <class V>
inline constexpr int kRoomBytes = kListOffset<V> + int(sizeof(List));

// Calls f(value, index) for some of kCount elements: those of every `step`-th group from number `first` on. It reads a
// group of 16 bytes at once if aligned, and several groups are in flight together.
template <class V, int kCount, class T, class F>
MPK_DEVICE void for_each_of(const T* x, int first, int step, F f) {
  constexpr int kMost = 16 / sizeof(T);
  constexpr int kTogether = kCount % kMost == 0 && V::X::kAlignment % 16 == 0 ? kMost : 1;
  constexpr int kOfLane = kCount / kTogether / 32, kReads = kOfLane < 2 ? 1 : kOfLane < 4 ? 2 : arch::kReadsTogether;
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

// A row, and the peak of each of its parts if the operands have peaks. Sums have one order: the row alone decides which
// thread has which elements.
template <class V, class Threads, class T>
struct Row {
  Threads& threads;
  const T* x;
  const typename V::Peaks::T* peaks;

  // Whether few parts have the order `least` or a higher one.
  MPK_DEVICE bool has_few(uint32_t least) const {
    if constexpr (V::Peaks::kPresent) {
      float count = 0;
      for (int part = threads.rank; part < V::kC; part += Threads::kSize)
        count += order_of(to_float(peaks[part])) >= least;
      return 4 * threads.sum(count) < V::kC;
    } else {
      return false;
    }
  }

  // Calls f(value, index) for this thread's elements that may have the order `least` or a higher one, and passed(part)
  // for its parts without any. If few parts have some, each is a warp's.
  template <class F, class P>
  MPK_DEVICE void for_each(uint32_t least, bool are_few, F f, P passed) const {
    if constexpr (V::Peaks::kPresent) {
      constexpr int kPart = kPartSize<V>;
      if (are_few) {
        const int lane = threads.rank % 32;
        for (int first = threads.rank - lane; first < V::kC; first += Threads::kSize) {
          const int part = first + lane;
          const bool is_there = part < V::kC, is_read = is_there && order_of(to_float(peaks[part])) >= least;
          if (is_there && !is_read) passed(part);
          for (uint32_t rest = __ballot_sync(~0u, is_read); rest != 0; rest &= rest - 1) {
            const int begin = (first + __ffs(rest) - 1) * kPart;
            for_each_of<V, kPart>(x + begin, lane, 32, [&](float value, int index) { f(value, begin + index); });
          }
        }
        return;
      }
    }
    for_each_of<V, V::kN>(x, threads.rank, Threads::kSize, f);
  }

  // Calls f(value, number) for this thread's parts, or elements if there are none.
  template <class F>
  MPK_DEVICE void for_each_peak(F f) const {
    if constexpr (V::Peaks::kPresent) {
      for (int part = threads.rank; part < V::kC; part += Threads::kSize) f(to_float(peaks[part]), part);
    } else {
      for_each_of<V, V::kN>(x, threads.rank, Threads::kSize, f);
    }
  }
};

// The value of a row at which the sum, by `weight`, of lesser values would next exceed `limit`.
struct Found {
  uint32_t order;
  float below;              // the sum of lesser values
  int count;                // kept by this thread
  bool are_kept;            // all equal elements are kept,
  bool are_listed = false;  // and listed
};

// The values between two bounds.
struct Range {
  uint32_t low, high;
};

// A range in bins: equal ranges of values, or of orders if there are no values.
struct Bins {
  uint32_t low, shift = 0;
  float first, scale;

  MPK_DEVICE explicit Bins(Range range) : low(range.low), first(value_of(low)) {
    const float length = value_of(range.high) - first;
    scale = length > 1e-30f && length < 1e30f ? kBins / length : 0.0f;
    while ((range.high - low) >> shift >= kBins) shift++;
  }

  MPK_DEVICE uint32_t of(uint32_t order) const {
    return scale == 0 ? (order - low) >> shift : min(uint32_t((value_of(order) - first) * scale), uint32_t(kBins - 1));
  }
};

struct Seen {
  float below;  // this thread's sum of lesser values
  int count;    // of this thread's elements between the bounds
};

// Goes through a row, and keeps a thread's elements between the bounds, as far as it has room, or adds all threads'
// elements to bins. One function does both, since it is long.
template <class V, class Threads, class T, class Weight, class PartWeight>
MPK_DEVICE Seen look(Row<V, Threads, T> row, uint8_t* room, Range range, bool are_few, bool is_for_bins, Weight weight,
                     PartWeight weight_of_part) {
  const Bins bins(range);
  Element* mine = reinterpret_cast<Element*>(room) + row.threads.rank;
  Seen seen{0, 0};
  row.for_each(
      range.low, are_few,
      [&](float value, int index) {
        const uint32_t order = order_of(value);
        if (order > range.high) return;
        if (order < range.low) {
          seen.below += weight(value);
        } else if (!is_for_bins) {
          if (seen.count < kKept<V>) mine[seen.count * Threads::kSize] = {order, uint32_t(index)};
          seen.count++;
        } else {
          reinterpret_cast<BinSums*>(room)->add(bins.of(order), weight(value));
        }
      },
      [&](int part) { seen.below += weight_of_part(part); });
  return seen;
}

// The bin in which the limit is met, as bounds. `below`: the sum of values below all bins.
template <class Threads>
MPK_DEVICE Range narrowed(Threads& threads, const BinSums& sums, Range range, float below, float limit) {
  const Bins bins(range);
  int last = 0;  // this thread's last bin with a value
  for (int i = threads.rank; i < kBins; i += Threads::kSize)
    if (sums.units(i) != 0) last = i;
  const uint32_t bin = last_where(0, threads.max(float(last)), [&](uint32_t end) {
    uint64_t before = 0;
    for (int i = threads.rank; i < int(end); i += Threads::kSize) before += sums.units(i);
    return below + threads.sum(float(before) / BinSums::kUnit) <= limit;
  });
  if (bin > 0) range.low = last_where(range.low, range.high, [&](uint32_t order) { return bins.of(order) < bin; }) + 1;
  range.high = last_where(range.low, range.high, [&](uint32_t order) { return bins.of(order) <= bin; });
  return range;
}

// By a search among the kept values. All of them may seem to be dropped, since earlier sums were rounded otherwise.
template <class Threads, class Weight>
MPK_DEVICE void find_kept(Threads& threads, const Element* mine, Found& found, Range range, float limit,
                          Weight weight) {
  const float below = found.below;
  const auto goes = [&](uint32_t order) {  // lesser values
    float more = 0;
    for (int i = 0; i < found.count; i++) {
      const uint32_t other = mine[i * Threads::kSize].order;
      if (other < order) more += weight(value_of(other));
    }
    more = below + threads.sum(more);
    if (more <= limit) found.below = more;
    return more <= limit;
  };
  const auto has_from = [&](uint32_t order) {
    bool has = false;
    for (int i = 0; i < found.count; i++) has |= mine[i * Threads::kSize].order >= order;
    return threads.max(has) > 0;
  };
  found.order = last_where(range.low, range.high, goes);
  if (!has_from(found.order)) {
    found.order = last_where(range.low, found.order, has_from);
    goes(found.order);
  }
}

// By comparing each with all.
template <class Threads, class Weight>
MPK_DEVICE void find_listed(Threads& threads, const Element* mine, List& list, Found& found, float limit,
                            Weight weight) {
  if (threads.rank == 0) {
    list.count = list.best = 0;
    list.least = 0xffffffffu;
  }
  threads.sync();
  for (int i = 0; i < found.count; i++) {
    const Element element = mine[i * Threads::kSize];
    const uint32_t place = atomicAdd(&list.count, 1);
    list.orders[place] = element.order;
    list.indices[place] = element.index;
    list.units[place] = BinSums::units_of(weight(value_of(element.order)));
  }
  threads.sync();
  uint32_t order = 0, least = 0xffffffffu;  // of this thread's
  float below = 0, below_least = 0;
  for (uint32_t i = threads.rank; i < list.count; i += Threads::kSize) {
    uint64_t less = 0;
#pragma unroll 4
    for (uint32_t j = 0; j < list.count; j++)
      if (list.orders[j] < list.orders[i]) less += list.units[j];
    const float sum = found.below + float(less) / BinSums::kUnit;
    if (sum <= limit && list.orders[i] >= order) {
      order = list.orders[i];
      below = sum;
    }
    if (list.orders[i] < least) {
      least = list.orders[i];
      below_least = sum;
    }
  }
  atomicMax(&list.best, order);
  atomicMin(&list.least, least);
  threads.sync();
  found.order = list.best > 0 ? list.best : list.least;  // none may seem to be dropped, by the same rounding
  if (order == found.order || least == found.order)      // all write the same value
    atomicExch(&list.below_bits, __float_as_uint(order == found.order ? below : below_least));
  threads.sync();
  found.below = __uint_as_float(list.below_bits);
}

// `has_many`: the bounds probably contain more than threads can keep, unless few parts have any.
template <class V, class Threads, class T, class Weight, class PartWeight>
MPK_DEVICE Found find(const Row<V, Threads, T>& row, uint8_t* room, Range range, bool has_many, float limit,
                      Weight weight, PartWeight weight_of_part) {
  Threads& threads = row.threads;
  const Element* mine = reinterpret_cast<const Element*>(room) + threads.rank;
  BinSums& sums = *reinterpret_cast<BinSums*>(room);
  Found found{0, 0, 0, false};
  bool are_few = row.has_few(range.low), is_for_bins = has_many && !are_few;
  while (true) {
    if (is_for_bins) {
      for (int i = threads.rank; i < kBins; i += Threads::kSize) sums.low[i] = sums.high[i] = 0;
      threads.sync();
    }
    const Seen seen = look(row, room, range, are_few, is_for_bins, weight, weight_of_part);
    found.below = threads.sum(seen.below);
    if (is_for_bins) {
      range = narrowed(threads, sums, range, found.below, limit);
      are_few = row.has_few(range.low);
      threads.sync();
    } else {
      found.are_kept = threads.max(float(seen.count)) <= kKept<V>;
      found.count = seen.count;
      if (found.are_kept || range.low == range.high) break;
    }
    is_for_bins = !is_for_bins;
  }
  found.order = range.low;
  if (!found.are_kept) return found;
  const float count = threads.sum(float(found.count));
  found.are_listed = count > 0 && count <= List::kMost;
  if (found.are_listed)
    find_listed(threads, mine, *reinterpret_cast<List*>(room + kListOffset<V>), found, limit, weight);
  else
    find_kept(threads, mine, found, range, limit, weight);
  return found;
}

// Calls f(index) for a thread's elements of this order.
template <class V, class Threads, class T, class F>
MPK_DEVICE void for_each_equal(const Row<V, Threads, T>& row, const uint8_t* room, const Found& found, F f) {
  if (found.are_kept) {
    for (int i = 0; i < found.count; i++) {
      const Element& element = reinterpret_cast<const Element*>(room)[i * Threads::kSize + row.threads.rank];
      if (element.order == found.order) f(int(element.index));
    }
  } else {  // more than fit, which is rare
#pragma unroll 1
    for (int i = row.threads.rank; i < V::kN; i += Threads::kSize)
      if (order_of(to_float(row.x[i])) == found.order) f(i);
  }
}

}  // namespace ranks

namespace nth_largest {

template <class V>
inline constexpr int kSharedBytes = ranks::kRoomBytes<V>;

template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile&, uint8_t* shared, const T* x, const int64_t* n,
                        const typename V::Peaks::T* peaks, T* y) {
  const ranks::Row<V, Threads, T> row{threads, x, peaks};
  uint32_t most = 0;
  row.for_each_peak([&](float value, int) {
    const uint32_t order = ranks::order_of(value);
    most = order > most ? order : most;
  });
  // The n-th largest of the threads' maxima is at most that of all values.
  uint32_t low = 0;
  if (n[0] < Threads::kSize) {
    uint32_t* orders = reinterpret_cast<uint32_t*>(shared);
    orders[threads.rank] = most;
    threads.sync();
    int greater = 0;
#pragma unroll 8
    for (int i = 0; i < Threads::kSize; i++) greater += orders[i] > most || (orders[i] == most && i < threads.rank);
    threads.sync();
    if (greater == n[0]) orders[0] = most;
    threads.sync();
    low = orders[0];
    threads.sync();
  }
  const auto one = [](float) { return 1.0f; };
  const auto all = [](int) { return float(ranks::kPartSize<V>); };
  const auto found = ranks::find(row, shared, {low, 0xffffffffu}, false, float(V::kN - 1 - n[0]), one, all);
  if (threads.rank == 0) y[0] = cast<T>(ranks::value_of(found.order));
}

}  // namespace nth_largest

namespace nucleus {

template <class V>
inline constexpr int kSharedBytes = ranks::kRoomBytes<V>;

template <class V, class Threads, class T>
MPK_DEVICE void compute(Threads& threads, const typename V::Tile&, uint8_t* shared, const T* x, const float* rest,
                        const typename V::Peaks::T* peaks, const typename V::Sums::T* sums, T* least, int64_t* first) {
  static_assert(V::Peaks::kPresent == V::Sums::kPresent, "nucleus takes peaks and sums together");
  const ranks::Row<V, Threads, T> row{threads, x, peaks};
  float most = -infinity(), total = 0;
  bool is_number = true;
  row.for_each_peak([&](float value, int) {
    is_number &= value == value && value != infinity();
    most = value > most ? value : most;
  });
  most = threads.max(most);
  // The sum of a part, or of an element if there are no parts.
  const auto sum_of = [&](float peak, int number) {
    float sum = expf(peak - most);
    if constexpr (V::Sums::kPresent) sum *= sums[number];
    return sum;
  };
  row.for_each_peak([&](float peak, int number) { total += sum_of(peak, number); });
  total = threads.sum(total);
  if (threads.sum(!is_number) > 0 || most == -infinity()) {  // probabilities are NaN: nothing is dropped
    if (threads.rank == 0) {
      least[0] = cast<T>(-infinity());
      first[0] = 0;
    }
    return;
  }
  // If nothing is dropped, not even values of probability 0, the least is found by number.
  const bool is_by_number = rest[0] < 0;
  const float limit = is_by_number ? 0.0f : rest[0] * total;
  const auto weight = [&](float value) { return is_by_number ? 1.0f : expf(value - most); };
  const auto weight_of_part = [&](int part) {
    return is_by_number ? float(ranks::kPartSize<V>) : sum_of(to_float(peaks[part]), part);
  };
  // Drops what has less than an N-th of the limit: all of it together does not exceed the limit, but for rounding.
  const float bound = most + logf(limit / float(V::kN)) - 0.01f;
  const uint32_t high = ranks::order_of(most), low = !is_by_number && bound < most ? ranks::order_of(bound) : 0;
  const auto found = ranks::find(row, shared, {low, high}, true, limit, weight, weight_of_part);
  // The first of equal values are dropped, too, but never the last of all.
  const float value = ranks::value_of(found.order), more = floorf((limit - found.below) / weight(value));
  const auto gone = [&](float count) { return more > 0 ? (more < count ? more : count - 1) : 0; };
  uint32_t stays = 0;
  if (found.are_listed) {
    ranks::List& list = *reinterpret_cast<ranks::List*>(shared + ranks::kListOffset<V>);
    for (uint32_t i = threads.rank; i < list.count; i += Threads::kSize) {
      if (list.orders[i] != found.order) continue;
      int count = 0, before = 0;
      for (uint32_t j = 0; j < list.count; j++) {
        count += list.orders[j] == found.order;
        before += list.orders[j] == found.order && list.indices[j] < list.indices[i];
      }
      if (float(before) == gone(float(count))) list.index = list.indices[i];
    }
    threads.sync();
    stays = list.index;
  } else {
    float count = 0;
    ranks::for_each_equal(row, shared, found, [&](int) { count++; });
    const float goes = gone(threads.sum(count));
    stays = ranks::last_where(0, V::kN - 1, [&](uint32_t end) {
      float before = 0;
      ranks::for_each_equal(row, shared, found, [&](int index) { before += index < int(end); });
      return threads.sum(before) <= goes;
    });
  }
  if (threads.rank == 0) {
    least[0] = cast<T>(value);
    first[0] = stays;
  }
}

}  // namespace nucleus
}  // namespace mpk::tasks
