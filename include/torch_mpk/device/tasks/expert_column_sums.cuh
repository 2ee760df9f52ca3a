// Products with weights that are stored as [E, K, N], and their sum over a row's choices. Workers have the tiles of
// compute_boxes. They leave products in the workspace as tagged words, two in each, and then sum equally many elements
// of the result each, whoever has made their products. Sums follow the order of choices.
#pragma once

#include "torch_mpk/device/points.cuh"
#include "torch_mpk/device/tasks/expert_columns.cuh"

namespace mpk::experts {

// The two words with a pair's products of four columns, from `column` on.
template <class V>
MPK_DEVICE ulonglong2* words_of(const Job& job, int pair, uint32_t column) {
  return reinterpret_cast<ulonglong2*>(V::words(job)) + pair * (V::kRows / 4) + column / 4;
}

template <class V>
MPK_DEVICE void leave(const Job& job, int pair, uint32_t first, uint32_t both, uint32_t tag, int lane) {
  const uint32_t next = __shfl_xor_sync(~0u, both, 1);
  if (lane % 2 == 0) ptx::store_relaxed_gpu(words_of<V>(job, pair, first + 2 * lane), tagged(both, next, tag));
}

// The products of a row's choices in one column. An id of no expert gives zeros.
template <class V>
struct Products {
  using T = typename V::T;
  T of_choices[V::kChoices];

  // False when the launch was aborted.
  template <class C>
  MPK_DEVICE bool await(const C& c, const Job& job, int row, uint32_t column) {
    const uint32_t tag = tag_of(c);
    const int first = row * V::kChoices;
    uint32_t made = 0;
#pragma unroll
    for (int k = 0; k < V::kChoices; k++) made |= uint32_t(expert_of<V>(V::ids(job), first + k) >= 0) << k;
    ulonglong2 words[V::kChoices];
    const bool are_there = poll(c.shared.watchdog, c.phase, [&] {
      uint32_t missing = 0;
#pragma unroll
      for (int k = 0; k < V::kChoices; k++) words[k] = ptx::load_relaxed_gpu(words_of<V>(job, first + k, column));
#pragma unroll
      for (int k = 0; k < V::kChoices; k++)
        if (made >> k & 1) missing |= differing(words[k], tag);
      return missing;
    });
#pragma unroll
    for (int k = 0; k < V::kChoices; k++) {
      const auto both = static_cast<uint32_t>(column / 2 % 2 == 0 ? words[k].x : words[k].y);
      of_choices[k] = from_word<T>(made >> k & 1 ? both >> column % 2 * 16 : 0);
    }
    return are_there;
  }
};

// V: as for compute_boxes, and words(job). Results: as for run_reduced_points, with value(job, outer, inner, product).
template <class V, class C>
MPK_DEVICE void compute_summed_columns(C& c, const Job& job) {
  compute_boxes<V>(c, job);
  if (!c.sync()) return;  // who polls delays who multiplies
  const Span mine = static_span(V::kOuter, c.worker(job), C::Config::kNumWorkers);
#pragma unroll 1
  for (uint32_t i = mine.begin + c.rank; i < mine.end; i += kConsumerThreads) {
    Products<V> products;
    c.failed = !products.await(c, job, i / V::kRows, i % V::kRows);
    if (c.failed) break;
    V::finish(job, i, reduce_short_row<V>([&](int k) { return V::value(job, i, k, products.of_choices[k]); }));
  }
}

}  // namespace mpk::experts
