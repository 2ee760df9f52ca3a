// A job's linears, as their kernels see them. Linears whose results an epilogue combines are computed side by side,
// others one after the other.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "../../arch/arch.h"
#include "../../schedule/access.h"
#include "../../schedule/refusals.h"
#include "../../schedule/staging.h"

namespace mpk {

struct Linears {
  int64_t batch, size, element;  // rows of x, its columns, bytes of an element
  int64_t parts;
  std::vector<int64_t> rows;  // of the weights, one after the other
  int64_t workers, warps, slot_bytes;
  int64_t room_beside_boxes;  // for staged operands
  const Arch& arch;

  Linears(const Schedule& schedule, const Job& job, int64_t slot_bytes)
      : workers(schedule.target.num_workers),
        warps(schedule.warps.consumers),
        slot_bytes(slot_bytes),
        room_beside_boxes(room(schedule) - kBoxAlignment - kMoreSlots * schedule.warps.slot_bytes),
        arch(arch_of(schedule.target.arch)) {
    const Tensor& x = input(schedule, job);
    batch = x.shape[0], size = x.shape[1], element = size_bytes(x.dtype);
    const bool paired = is_side_by_side(schedule.graph, job);
    parts = paired ? static_cast<int64_t>(job.body.size()) : 1;
    for (int n : job.body)
      if (rows.empty() || !paired) rows.push_back(weight_rows(schedule.graph.nodes()[n]));
  }
  Linears(const Schedule& schedule, const Job& job) : Linears(schedule, job, schedule.warps.slot_bytes) {}

  static const Tensor& input(const Schedule& schedule, const Job& job) {
    return schedule.graph.nodes()[job.body.front()].operand("x").tensor;
  }
  static const Tensor& weight(const Schedule& schedule, int n) {
    return schedule.graph.nodes()[n].operand("weight").tensor;
  }

  // A word of a quantised weight may have several rows, but the result has a column for each.
  static int64_t weight_rows(const Node& node) { return output(node).tensor.shape[1]; }

  static constexpr int64_t kMoreSlots = 2;  // a warp holds a box while the loader fills two entries

  int64_t x_bytes() const { return batch * round_up(size * element, kAccessBytes); }
  bool are_empty() const { return batch < 1 || size < 1; }
  int64_t tiles(int64_t tile_rows) const {
    int64_t count = 0;
    for (int64_t n : rows) count += (n + tile_rows - 1) / tile_rows;
    return count;
  }
};

// Why kernels of one dtype refuse the node.
inline std::optional<std::string> refuses_linear(const Node& node) {
  const Operand& x = node.operand("x");
  if (auto why = refuses_row_dtype(x)) return why;
  for (const Operand& operand : node.operands) {
    if (auto why = refuses_dtype(operand, x.tensor.dtype)) return why;
    if (auto why = refuses_inner_stride(operand)) return why;
  }
  return std::nullopt;
}

// Whether the predicate holds for all weights.
template <class Predicate>
bool all_weights(const Schedule& schedule, const Job& job, const Predicate& predicate) {
  return std::all_of(job.body.begin(), job.body.end(), [&](int n) { return predicate(Linears::weight(schedule, n)); });
}

// Whether all of a job's linears have the same tensor as this operand.
inline bool have_same(const Schedule& schedule, const Job& job, const char* operand) {
  const auto given = [&](int n) { return schedule.graph.nodes()[n].operand(operand).tensor; };
  return std::ranges::all_of(job.body, [&](int n) { return same_view(given(n), given(job.body.front())); });
}

inline bool has_boxed_weights(const Schedule& schedule, const Job& job) {
  return all_weights(schedule, job, [&](const Tensor& weight) { return can_load_boxes(schedule.graph, weight); });
}

// The most that a job may stage of x, if it must.
inline int64_t most_staged(const Target& target) { return target.smem_bytes * 3 / 5; }

// The elements to poll of a wholly staged x, which must fit.
inline int64_t polled_whole(const Schedule& schedule, const Job& job, const Tensor& made) {
  const bool fits = Linears(schedule, job).x_bytes() <= most_staged(schedule.target);
  return fits ? made.numel() : std::numeric_limits<int64_t>::max();
}

// Where workers share tiles (split-K), each finishes as many fours of rows of x, see SplitKExchange: the rows that have
// sums, past the last of `batch`; the bytes that a worker sends of a pass of so many rows of weights, in words of two
// floats and their tags; and those of all workers.
inline int64_t shared_rows(int64_t split, int64_t batch) { return round_up(batch, 4 * split); }
inline int64_t partial_bytes(int64_t split, int64_t weight_rows, int64_t batch) {
  return round_up(weight_rows, 32) * shared_rows(split, batch) * kTaggedFloatBytes;
}
inline int64_t split_bytes(int64_t split, int64_t workers, int64_t weight_rows, int64_t batch) {
  return split == 1 ? 0 : workers / split * split * partial_bytes(split, weight_rows, batch);
}

// Why kernels of few rows refuse a launch in which all warps read every ring entry.
inline constexpr const char* kNotTogether = "the launch's warps multiply together, as they do for more than 64 rows";

}  // namespace mpk
