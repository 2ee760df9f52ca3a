// Jobs generated from programs: a function at every point of a domain, or a reduction over its last dimension.
#pragma once

#include "torch_mpk/device/row.cuh"
#include "torch_mpk/device/tagged.cuh"

namespace mpk {

// V: Index, kPoints; point(job, i).
template <class V, class C>
MPK_DEVICE void run_points(C& c, const Job& job) {
  using Index = typename V::Index;
  if (!c.await()) return;
  for (Index i = Index(c.worker(job)) * kConsumerThreads + c.rank; i < V::kPoints;
       i += C::Config::kNumWorkers * kConsumerThreads)
    V::point(job, i);
}

// The same for threads with many points. The loads of V::kAtOnce points are in flight together: V::preload(job, i)
// returns what point(job, i, extra) takes.
template <class V, class C>
MPK_DEVICE void run_many_points(C& c, const Job& job) {
  using Index = typename V::Index;
  constexpr Index kStep = C::Config::kNumWorkers * kConsumerThreads;
  if (!c.await()) return;
  for (Index first = Index(c.worker(job)) * kConsumerThreads + c.rank; first < V::kPoints;
       first += V::kAtOnce * kStep) {
    typename V::Extra extras[V::kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < V::kAtOnce; i++)
      if (first + i * kStep < V::kPoints) extras[i] = V::preload(job, first + i * kStep);
#pragma unroll
    for (int i = 0; i < V::kAtOnce; i++)
      if (first + i * kStep < V::kPoints) V::point(job, first + i * kStep, extras[i]);
  }
}

// Reductions. `Value`: the value of a point. `State`: the accumulator.
namespace reduce {

template <class T>
struct Sum {
  using Value = T;
  using State = T;
  static MPK_DEVICE State first() { return T(0); }
  static MPK_DEVICE State of(T v, int64_t) { return v; }
  static MPK_DEVICE State combine(State a, State b) { return ops::add<T>(a, b); }
  static MPK_DEVICE T result(State s, int64_t) { return s; }
};

template <class T>
struct Mean : Sum<T> {
  static MPK_DEVICE T result(T s, int64_t n) { return s / T(n); }
};

template <class T>
struct Prod : Sum<T> {
  static MPK_DEVICE T first() { return T(1); }
  static MPK_DEVICE T combine(T a, T b) { return ops::mul<T>(a, b); }
};

template <class T>
struct Any : Sum<T> {
  static MPK_DEVICE T of(T v, int64_t) { return T(v != T(0)); }
  static MPK_DEVICE T combine(T a, T b) { return T(a != T(0) || b != T(0)); }
};

template <class T>
struct All : Any<T> {
  static MPK_DEVICE T first() { return T(1); }
  static MPK_DEVICE T combine(T a, T b) { return T(a != T(0) && b != T(0)); }
};

// The extreme value. NaN is more extreme than any number.
template <class T, bool kMax>
struct Extreme : Sum<T> {
  static MPK_DEVICE T first() {
    if constexpr (T(0.5) != T(0))
      return static_cast<T>(kMax ? -infinity() : infinity());
    else
      return kMax ? T(1) << 63 : ~(T(1) << 63);
  }
  static MPK_DEVICE T combine(T a, T b) {
    const bool take_a = a != a || (b == b && (kMax ? a >= b : a <= b));
    return take_a ? a : b;
  }
};
template <class T>
using AMax = Extreme<T, true>;
template <class T>
using AMin = Extreme<T, false>;

// The first index of the extreme value.
template <class T, bool kMax>
struct Place {
  using Value = T;
  struct State {
    T value;
    int64_t index;  // -1: nothing yet
  };
  static MPK_DEVICE State first() { return {T(0), -1}; }
  static MPK_DEVICE State of(T v, int64_t i) { return {v, i}; }
  static MPK_DEVICE State combine(State a, State b) {
    if (a.index < 0) return b;
    if (b.index < 0) return a;
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    const bool tie = (a_nan && b_nan) || a.value == b.value;
    const bool take_a = tie ? a.index < b.index : a_nan || (!b_nan && (kMax ? a.value > b.value : a.value < b.value));
    return take_a ? a : b;
  }
  static MPK_DEVICE int64_t result(State s, int64_t) { return s.index; }
};
template <class T>
using ArgMax = Place<T, true>;
template <class T>
using ArgMin = Place<T, false>;

}  // namespace reduce

// Moves a state of 4-byte words to another lane.
template <class S>
MPK_DEVICE S shuffle_xor(S s, int offset) {
  if constexpr (sizeof(S) < 4) {
    return static_cast<S>(__shfl_xor_sync(~0u, static_cast<int>(s), offset));
  } else {
    union {
      S state;
      uint32_t words[sizeof(S) / 4];
    } u{s};
#pragma unroll
    for (unsigned i = 0; i < sizeof(S) / 4; i++) u.words[i] = __shfl_xor_sync(~0u, u.words[i], offset);
    return u.state;
  }
}

template <class Op, class State>
MPK_DEVICE State combine_lanes(State state) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) state = Op::combine(state, shuffle_xor(state, o));
  return state;
}

// Combines the warps' states in shared memory, in their order, into the group's first thread. False when the launch was
// aborted.
template <class Op, class State, class C>
MPK_DEVICE bool combine_warps(C& c, State& state) {
  State* of_warps = reinterpret_cast<State*>(c.staged());
  state = combine_lanes<Op>(state);
  if (c.lane == 0) of_warps[c.warp] = state;
  if (!c.sync()) return false;
  state = of_warps[0];
  for (int w = 1; w < kConsumerWarps; w++) state = Op::combine(state, of_warps[w]);
  return true;
}

// Elements that are loaded together. One by one, each would take a trip to memory.
inline constexpr int kLoadedAtOnce = 8;

// Accumulates a thread's elements of some rows, every `step`th from `begin` on, in their order.
template <class V, int kRows, int kOfRow = kLoadedAtOnce / kRows, class Index = typename V::Index>
MPK_DEVICE void reduce_elements(const Job& job, const Index (&rows)[kRows], Index begin, Index end, Index step,
                                typename V::Op::State (&states)[kRows]) {
  using Op = typename V::Op;
#pragma unroll 1
  for (Index i = begin; i < end; i += kOfRow * step) {
    typename V::Extra extras[kRows][kOfRow];
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int j = 0; j < kOfRow; j++) extras[r][j] = V::preload(job, rows[r], min(i + j * step, end - 1));
#pragma unroll
    for (int j = 0; j < kOfRow; j++)
      if (i + j * step < end)
#pragma unroll
        for (int r = 0; r < kRows; r++) {
          const auto value = V::value(job, rows[r], i + j * step, extras[r][j]);
          states[r] = Op::combine(states[r], Op::of(value, i + j * step));
        }
  }
}

// The same for one row.
template <class V, class Index = typename V::Index>
MPK_DEVICE typename V::Op::State reduce_row(const Job& job, Index row, Index begin, Index end, Index step) {
  typename V::Op::State states[] = {V::Op::first()};
  reduce_elements<V, 1>(job, {row}, begin, end, step, states);
  return states[0];
}

// A state as tagged words, kSplitBytes long.
template <class State>
union SplitState {
  State state;
  uint32_t words[4];
  static_assert(sizeof(State) <= sizeof(words));
};

// Rows fewer than workers are split among workers. The worker of a row's last split polls the results of all splits,
// and its first warp combines them: lane l takes splits l, l + 32, ...; then the tree of lanes.
template <class V, class C>
MPK_DEVICE void run_split_reduce(C& c, const Job& job) {
  using Op = typename V::Op;
  using State = typename Op::State;
  constexpr int64_t kLength = (V::kInner + V::kSplits - 1) / V::kSplits;
  static_assert(V::kOuter * V::kSplits <= C::Config::kNumWorkers, "no worker has two splits");
  static_assert(2 * sizeof(ulonglong2) == V::kSplitBytes, "codegen and device disagree on partial results");
  const uint32_t number = c.worker(job), outer = number % uint32_t(V::kOuter), split = number / uint32_t(V::kOuter);
  if (split >= V::kSplits) return;
  const int64_t begin = split * kLength, end = min(begin + kLength, V::kInner);
  using Index = typename V::Index;
  State state = reduce_row<V>(job, Index(outer), Index(begin + c.rank), Index(end), Index(kConsumerThreads));
  if (!combine_warps<Op>(c, state)) return;
  const uint32_t tag = tag_of(c);
  ulonglong2* splits = reinterpret_cast<ulonglong2*>(V::partials(job)) + 2 * outer * V::kSplits;
  if (c.rank == 0) {
    SplitState<State> made{};
    made.state = state;
    for (int i = 0; i < 2; i++)
      ptx::store_relaxed_gpu(splits + 2 * split + i, tagged(made.words[2 * i], made.words[2 * i + 1], tag));
  }
  if (c.warp != 0 || split + 1 < V::kSplits) return;
  state = Op::first();
  for (uint32_t p = c.lane; p < V::kSplits; p += 32) {
    ulonglong2 words[2];
    const bool is_there = spin(
        c.shared.watchdog,
        [&] {
          for (int i = 0; i < 2; i++) words[i] = ptx::load_relaxed_gpu(splits + 2 * p + i);
          return (differing(words[0], tag) | differing(words[1], tag)) == 0;
        },
        [&] { return polling(c.phase); });
    if (!is_there) c.failed = true;
    SplitState<State> made{};
    for (int i = 0; i < 4; i++) made.words[i] = static_cast<uint32_t>(i % 2 == 0 ? words[i / 2].x : words[i / 2].y);
    state = Op::combine(state, made.state);
  }
  c.failed = __any_sync(~0u, c.failed);
  state = combine_lanes<Op>(state);
  if (c.lane == 0 && !c.failed) V::finish(job, outer, Op::result(state, V::kInner));
}

// Reduces a short row of value(i), by one thread.
template <class V, class Value>
MPK_DEVICE auto reduce_short_row(Value value) {
  using Op = typename V::Op;
  typename V::Op::State state = Op::first();
#pragma unroll
  for (int i = 0; i < V::kInner; i++) state = Op::combine(state, Op::of(value(i), i));
  return Op::result(state, V::kInner);
}

// Short rows, each by a thread, with the epilogue finish(). V: Index, Op, kOuter, kInner; value(job, outer, inner),
// finish(job, outer, result). Sums follow the order of the elements.
template <class V, class C>
MPK_DEVICE void run_reduced_points(C& c, const Job& job) {
  using Index = typename V::Index;
  if (!c.await()) return;
  for (Index outer = Index(c.worker(job)) * kConsumerThreads + c.rank; outer < V::kOuter;
       outer += C::Config::kNumWorkers * kConsumerThreads)
    V::finish(job, outer, reduce_short_row<V>([&](int i) { return V::value(job, outer, Index(i)); }));
}

// Short rows, each by a warp, several at once if a lane has few elements.
template <class V, class C>
MPK_DEVICE void run_reduce_by_warps(C& c, const Job& job) {
  using Op = typename V::Op;
  using Index = typename V::Index;
  constexpr int kOfLane = (V::kInner + 31) / 32;
  constexpr int kRows = kOfLane > kLoadedAtOnce / 2 ? 1 : kOfLane > kLoadedAtOnce / 4 ? 2 : 4;
  constexpr Index kStep = C::Config::kNumWorkers * kConsumerWarps;
  for (Index first = c.worker(job) + c.warp * C::Config::kNumWorkers; first < V::kOuter; first += kRows * kStep) {
    Index rows[kRows];
    typename Op::State states[kRows];
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      rows[r] = min(first + r * kStep, Index(V::kOuter - 1));
      states[r] = Op::first();
    }
    reduce_elements<V, kRows>(job, rows, Index(c.lane), Index(V::kInner), Index(32), states);
#pragma unroll
    for (int r = 0; r < kRows; r++) states[r] = combine_lanes<Op>(states[r]);
#pragma unroll
    for (int r = 0; r < kRows; r++)
      if (c.lane == 0 && first + r * kStep < V::kOuter) V::finish(job, rows[r], Op::result(states[r], V::kInner));
  }
}

// V: Index, Op (one of reduce::), kOuter, kInner; preload(job, outer, inner) returns what value(job, outer, inner,
// extra) takes; finish(job, outer, result); kSplits of a row, and if there are several, kSplitBytes and partials(job).
// The order is fixed: lane l accumulates elements l, l + size, ...; then the tree of lanes, then warps in order, then
// splits.
template <class V, class C>
MPK_DEVICE void run_reduce(C& c, const Job& job) {
  using Op = typename V::Op;
  using Index = typename V::Index;
  if (!c.await()) return;
  if constexpr (V::kSplits > 1) {
    run_split_reduce<V>(c, job);
  } else if constexpr (V::kInner <= 1024) {
    run_reduce_by_warps<V>(c, job);
  } else {
    for (Index outer = c.worker(job); outer < V::kOuter; outer += C::Config::kNumWorkers) {
      auto state = reduce_row<V>(job, outer, Index(c.rank), Index(V::kInner), Index(kConsumerThreads));
      if (!combine_warps<Op>(c, state) || !c.sync()) return;
      if (c.rank == 0) V::finish(job, outer, Op::result(state, V::kInner));
    }
  }
}

}  // namespace mpk
