// The (row, choice) pairs of a node of experts' products, by the expert that each chose.
#pragma once

#include <algorithm>
#include <cstring>

#include "torch_mpk/cpu/kernel.h"

namespace mpk::cpu {

class ExpertPairs {
 public:
  // Of a node with operands x[R, C, K], ids[R, C], y[R, C, N] and weights.
  explicit ExpertPairs(const Node& node) {
    const Tensor &x = node.operand("x").tensor, &ids = node.operand("ids").tensor, &y = node.operand("y").tensor;
    if (ids.dtype != DType::kI64) fail(node, "ids is " + std::string(info(ids.dtype).name) + ", expected int64");
    x_ = View(x), ids_ = View(ids), y_ = View(y);
    const Operand* weight = node.find("weight");
    num_experts_ = (weight != nullptr ? *weight : node.operand("transposed")).tensor.shape[0];
    stack_ = expert_stack(node);
    num_choices_ = ids.shape[1], num_pairs_ = ids.numel(), element_bytes_ = size_bytes(y.dtype);
  }

  int64_t size() const { return num_pairs_; }
  int64_t num_experts() const { return num_experts_; }
  ExpertStack stack() const { return stack_; }
  int64_t scratch_bytes() const {
    return round_up((num_experts_ + num_pairs_) * static_cast<int64_t>(sizeof(int32_t)), 64);
  }
  const uint8_t* x(const Frame& frame, int64_t pair) const {
    return x_.at(frame, pair / num_choices_, pair % num_choices_);
  }
  uint8_t* y(const Frame& frame, int64_t pair) const { return y_.at(frame, pair / num_choices_, pair % num_choices_); }

  // Calls f(expert, pairs, count) for all pairs, at most `block` of one expert at a time, in ascending order. Columns
  // [column, last) of pairs that name no expert become zeros.
  template <class F>
  void for_each(const Frame& frame, int64_t column, int64_t last, int64_t block, uint8_t* scratch, F f) const {
    auto* ends = reinterpret_cast<int32_t*>(scratch);
    int32_t* order = ends + num_experts_;
    sort(frame, ends, order, column, last);
    int32_t first = 0;
    for (int64_t expert = 0; expert < num_experts_; first = ends[expert++])
      for (int64_t i = first; i < ends[expert]; i += block)
        f(expert, order + i, std::min<int64_t>(block, ends[expert] - i));
  }

  // Adds how many pairs chose each expert.
  void count(const Frame& frame, int64_t* counts) const {
    for (int64_t pair = 0; pair < num_pairs_; pair++)
      if (const int64_t expert = expert_of(frame, pair); expert >= 0) counts[expert]++;
  }

 private:
  // The expert of a pair, or -1 if its id names none.
  int64_t expert_of(const Frame& frame, int64_t pair) const {
    int64_t id;
    std::memcpy(&id, ids_.at(frame, pair / num_choices_, pair % num_choices_), sizeof(id));
    return id >= 0 && id < num_experts_ ? id : -1;
  }

  // Those of expert e end at ends[e].
  void sort(const Frame& frame, int32_t* ends, int32_t* order, int64_t column, int64_t last) const {
    std::fill(ends, ends + num_experts_, 0);
    for (int64_t pair = 0; pair < num_pairs_; pair++) {
      const int64_t expert = expert_of(frame, pair);
      if (expert >= 0)
        ends[expert]++;
      else
        std::memset(y(frame, pair) + column * element_bytes_, 0, (last - column) * element_bytes_);
    }
    int32_t begin = 0;
    for (int64_t expert = 0; expert < num_experts_; expert++) {
      const int32_t size = ends[expert];
      ends[expert] = begin;
      begin += size;
    }
    for (int64_t pair = 0; pair < num_pairs_; pair++)
      if (const int64_t expert = expert_of(frame, pair); expert >= 0)
        order[ends[expert]++] = static_cast<int32_t>(pair);
  }

  View x_, ids_, y_;
  ExpertStack stack_;
  int64_t num_experts_, num_choices_, num_pairs_, element_bytes_;
};

}  // namespace mpk::cpu
