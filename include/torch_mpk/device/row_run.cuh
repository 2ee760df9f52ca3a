// Runs of small nodes, see csrc/kernels/row_run.cpp: a worker computes all nodes of a run for a row before it takes the
// next row. All threads of the worker meet between two nodes, so later nodes see what earlier ones store.
#pragma once

#include "torch_mpk/device/points.cuh"
#include "torch_mpk/device/tile.cuh"

namespace mpk {

constexpr int largest(int value) { return value; }
template <class... Others>
constexpr int largest(int value, Others... others) {
  return value > largest(others...) ? value : largest(others...);
}

template <class V>
inline constexpr int kRowRunStagedBytes = V::staged_bytes();

// Runs the variant that a node would have by itself, with the same order of sums. Each call is false when the launch
// was aborted.
template <class V>
struct RowRun {
  TileConsumer& consumer;
  uint8_t* staged;

  template <class Node>
  MPK_DEVICE bool points(const Job& job, uint32_t row) {
    using Index = typename Node::Index;
    constexpr Index kOfRow = Node::kPoints / V::kRows;
    for (Index i = consumer.rank; i < kOfRow; i += kConsumerThreads) Node::point(job, Index(row) * kOfRow + i);
    return consumer.sync();
  }

  template <class Node>
  MPK_DEVICE bool reduce(const Job& job, uint32_t row) {
    using Index = typename Node::Index;
    using Op = typename Node::Op;
    constexpr Index kOfRow = Node::kOuter / V::kRows;
    for (Index i = consumer.warp; i < kOfRow; i += kConsumerWarps) {
      const Index outer = Index(row) * kOfRow + i;
      const auto state =
          combine_lanes<Op>(reduce_row<Node>(job, outer, Index(consumer.lane), Index(Node::kInner), Index(32)));
      if (consumer.lane == 0) Node::finish(job, outer, Op::result(state, Node::kInner));
    }
    return consumer.sync();
  }

  template <class Node>
  MPK_DEVICE bool tiles(const Job& job, uint32_t row) {
    constexpr uint32_t kOfRow = Node::kTiles / V::kRows;
    if (!compute_every<Node>(consumer, job, row * kOfRow, (row + 1) * kOfRow, 1, staged)) return false;
    return consumer.sync();
  }
};

// A worker's rows, out of line as tiles are, see compute_tiles.
template <class V>
MPK_OUT_OF_LINE bool compute_rows_of_nodes(Shared& shared, Job job, uint32_t worker, uint32_t workers,
                                           uint8_t* staged) {
  __builtin_assume(__isShared(staged));
  const int rank = ptx::thread_index();
  TileConsumer consumer{shared, rank, rank / 32, rank % 32};
  RowRun<V> run{consumer, staged};
  for (uint32_t row = worker; row < V::kRows; row += workers)
    if (!V::compute(run, job, row)) return false;
  return true;
}

// V: kRows; compute(run, job, row), which calls `run` for each node; staged_bytes().
template <class V, class C>
MPK_DEVICE void run_rows_of_nodes(C& c, const Job& job) {
  if (!c.await()) return;
  c.call([&] { return compute_rows_of_nodes<V>(c.shared, job, c.worker(job), C::Config::kNumWorkers, c.staged()); });
}

}  // namespace mpk
