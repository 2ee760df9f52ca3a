// Attention over a cache or over pages. A unit is a range of positions of one key head of one row. It writes its part
// of the new keys and values, then attends for all query heads that share the key head. The last unit of a key head
// merges the ranges.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "torch_mpk/cpu/kernel.h"

namespace mpk::cpu {

// Kernels of many queries pack keys. A unit's queries, times heads that share a key head, are enough to be worth that.
inline constexpr int64_t kPackedRowsPerUnit = 128;
inline constexpr double kPackedFlopsPerNs = 100;

// Sinks: for each query head, a score without a key.
class Sinks {
 public:
  Sinks() = default;
  Sinks(const Node& node, const Microkernels& microkernels, const Operand& sinks)
      : load_(microkernels.load_of(float_dtype(node, sinks))),
        is_double_(sinks.tensor.dtype == DType::kF64),
        view_(sinks.tensor) {}
  explicit operator bool() const { return static_cast<bool>(view_); }
  double at(const Frame& frame, int64_t head) const {
    double wide;
    float narrow;
    load_(view_.at(frame, head), 1, is_double_ ? static_cast<void*>(&wide) : &narrow, 1);
    return is_double_ ? wide : narrow;
  }

 private:
  Microkernels::Load load_ = nullptr;
  bool is_double_ = false;
  View view_;
};

// C is the accumulation type: float, or double for float64.
template <class C>
class AttentionKernel : public Kernel {
 public:
  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t head = unit / num_splits_, b = head / num_groups_, g = head % num_groups_;
      attend(frame, b, g, unit % num_splits_, scratch);
      if (arrivals_.is_last(head)) combine(frame, b, g);
    }
  }

  void reset() override { arrivals_.reset(); }

 protected:
  // `keys` and `values`: the cache, with `groups` key heads and room for `capacity` positions of a row. Positions are
  // split as if there were `key_heads` key heads, to keep threads busy. `q_rest` and `k_rest`: of queries and keys in
  // two parts.
  AttentionKernel(const Node& node, const Microkernels& microkernels, const Operand& keys, const Operand& values,
                  int64_t groups, int64_t capacity, int64_t key_heads, const Operand* q_rest = nullptr,
                  const Operand* k_rest = nullptr)
      : microkernels_(microkernels),
        capacity_(capacity),
        num_groups_(groups),
        num_splits_(count_splits(key_heads, capacity)),
        arrivals_(node.operand("q").tensor.shape[0] * groups, num_splits_) {
    const Operand &q = node.operand("q"), &y = node.operand("y");
    const Operand *k_new = node.find("k_new"), *v_new = node.find("v_new"), *sinks = node.find("sinks");
    dtype_ = float_dtype(node, q);
    for (const Operand* o : {&keys, &values, k_new, v_new, &y, q_rest, k_rest})
      if (o != nullptr) float_dtype(node, *o, &q);
    for (const Operand* o : {&q, &keys, &values, k_new, v_new, &y, q_rest, k_rest})
      if (o != nullptr) require_inner_stride(node, *o);
    const int64_t batch = q.tensor.shape[0], heads = q.tensor.shape[1];
    head_dim_ = q.tensor.shape[2], value_dim_ = values.tensor.shape.back();
    if (groups == 0 || heads % groups != 0)
      fail(node, "H=" + std::to_string(heads) + " is not a multiple of G=" + std::to_string(groups));
    heads_per_group_ = heads / groups;
    scale_ = node.float_attr("scale"), softcap_ = node.float_attr("softcap", 0);
    q_ = View(q.tensor), k_ = View(keys.tensor), v_ = View(values.tensor), y_ = View(y.tensor);
    if (k_new != nullptr) k_new_ = View(k_new->tensor);
    if (v_new != nullptr) v_new_ = View(v_new->tensor);
    if (q_rest != nullptr) q_rest_ = View(q_rest->tensor), rest_dim_ = q_rest->tensor.shape[2];
    if (k_rest != nullptr) k_rest_ = View(k_rest->tensor);
    if (sinks != nullptr) sinks_ = Sinks(node, microkernels, *sinks);

    padded_dim_ = round_up(value_dim_, kHeadDimPad), padded_keys_ = round_up(head_dim_, kHeadDimPad);
    state_size_ = round_up(heads_per_group_ * (padded_dim_ + 2), 16);  // acc, max, sum
    num_units_ = batch * groups * num_splits_;
    partials_.resize(num_units_ * state_size_);
    const int64_t read = head_dim_ + rest_dim_ + value_dim_;
    unit_cost_ = static_cast<double>(capacity) / num_splits_ * read * size_bytes(dtype_) / kBytesPerNs;
    padded_rest_ = round_up(rest_dim_, kHeadDimPad);
    q_bytes_ = round_up(heads_per_group_ * (padded_keys_ + padded_rest_) * static_cast<int64_t>(sizeof(C)), 64);
    tile_bytes_ = heads_per_group_ * kAttentionTile * static_cast<int64_t>(sizeof(C));
    scratch_bytes_ = q_bytes_ + 2 * tile_bytes_;
  }

  // Positions of row b and key head g.
  struct Range {
    int64_t b, g;
    int64_t begin, end;  // positions of this unit
    int64_t live;        // positions that the row attends to
  };

  // The positions that row b attends to: at most the capacity.
  virtual int64_t live_positions(const Frame& frame, int64_t b) const = 0;
  // The position that row b writes before it attends, or -1.
  virtual int64_t new_position(const Frame& frame, int64_t b) const = 0;
  virtual void write(const Frame& frame, int64_t b, int64_t g, int64_t position) const = 0;
  // Attends to the range. `args` is complete, except for the positions, their rows, and the mask, which may be stored
  // at `mask`.
  virtual void attend_to(const Frame& frame, const Range& range, AttentionTileArgs& args, C* mask) const = 0;

  void write_rows(const Frame& frame, int64_t b, int64_t g, uint8_t* k, uint8_t* v) const {
    std::memcpy(k, k_new_.at(frame, b, g), head_dim_ * size_bytes(dtype_));
    std::memcpy(v, v_new_.at(frame, b, g), value_dim_ * size_bytes(dtype_));
  }

  void step(const AttentionTileArgs& args) const { microkernels_.attention_tile[static_cast<int>(dtype_)](args); }

  const Microkernels& microkernels_;
  DType dtype_;
  View q_, k_, v_, k_new_, v_new_, y_, q_rest_, k_rest_;
  Sinks sinks_;
  int64_t capacity_, num_groups_, heads_per_group_, head_dim_, value_dim_, rest_dim_ = 0;
  double scale_, softcap_;
  C without_keys_ = 0;  // result of a head that attends to nothing

 private:
  static constexpr int64_t kMinSplit = 256;    // the fewest positions worth a unit
  static constexpr int64_t kWantedUnits = 64;  // enough for many threads; a constant: bits must not depend on them

  struct State {
    C *acc, *max, *sum;
  };

  static int64_t count_splits(int64_t key_heads, int64_t capacity) {
    const int64_t heads = std::max<int64_t>(1, key_heads);
    const int64_t wanted = (kWantedUnits + heads - 1) / heads, possible = (capacity + kMinSplit - 1) / kMinSplit;
    return std::max<int64_t>(1, std::min(wanted, possible));
  }

  State state(int64_t b, int64_t g, int64_t split) {
    C* base = partials_.data() + ((b * num_groups_ + g) * num_splits_ + split) * state_size_;
    return {base, base + heads_per_group_ * padded_dim_, base + heads_per_group_ * (padded_dim_ + 1)};
  }

  void attend(const Frame& frame, int64_t b, int64_t g, int64_t split, uint8_t* scratch) {
    const int64_t live = live_positions(frame, b);
    // Ranges follow the live length, so that all units have work in a mostly empty cache.
    const int64_t length =
        std::max<int64_t>(kAttentionTile, round_up((live + num_splits_ - 1) / num_splits_, kAttentionTile));
    const int64_t position = new_position(frame, b);
    if (position >= 0 && (position < live ? position / length : 0) == split) write(frame, b, g, position);

    const State s = state(b, g, split);
    std::fill(s.acc, s.acc + heads_per_group_ * padded_dim_, C(0));
    std::fill(s.sum, s.sum + heads_per_group_, C(0));
    std::fill(s.max, s.max + heads_per_group_, -std::numeric_limits<C>::infinity());
    const Range range{b, g, split * length, std::min(live, (split + 1) * length), live};
    if (range.begin >= range.end) return;

    C *q = reinterpret_cast<C*>(scratch), *q_rest = q + heads_per_group_ * padded_keys_;
    load_queries(frame, b, g, q_, head_dim_, q);
    if (q_rest_) load_queries(frame, b, g, q_rest_, rest_dim_, q_rest);
    AttentionTileArgs args = {};
    args.k_stride = k_.strides[2], args.v_stride = v_.strides[2];
    args.q = q;
    if (k_rest_) {
      args.k_rest = k_rest_.at(frame, b, g), args.k_rest_stride = k_rest_.strides[2];
      args.q_rest = q_rest, args.rest_dim = rest_dim_;
    }
    args.num_heads = static_cast<int>(heads_per_group_);
    args.head_dim = head_dim_, args.value_dim = value_dim_;
    args.scale = scale_, args.softcap = softcap_;
    args.max = s.max, args.sum = s.sum, args.acc = s.acc;
    args.scores = scratch + q_bytes_;
    attend_to(frame, range, args, reinterpret_cast<C*>(scratch + q_bytes_ + tile_bytes_));
  }

  // Loads the rows of a key head's queries, padded with zeros.
  void load_queries(const Frame& frame, int64_t b, int64_t g, const View& from, int64_t size, C* to) const {
    const int64_t padded = round_up(size, kHeadDimPad);
    for (int64_t h = 0; h < heads_per_group_; h++) {
      C* row = to + h * padded;
      microkernels_.load_of(dtype_)(from.at(frame, b, g * heads_per_group_ + h), 1, row, static_cast<int>(size));
      std::fill(row + size, row + padded, C(0));
    }
  }

  // Merges the ranges of a key head by their common maximum, and writes its heads' rows.
  void combine(const Frame& frame, int64_t b, int64_t g) {
    const State first = state(b, g, 0);
    for (int64_t h = 0; h < heads_per_group_; h++) {
      C max = -std::numeric_limits<C>::infinity(), sum = 0;
      for (int64_t i = 0; i < num_splits_; i++) {
        const C other = state(b, g, i).max[h];
        if (other != other || other > max) max = other;
      }
      const C sink = sinks_ ? static_cast<C>(sinks_.at(frame, g * heads_per_group_ + h)) : max;
      if (sink > max) max = sink;
      C* acc = first.acc + h * padded_dim_;
      for (int64_t i = 0; i < num_splits_; i++) {
        const State s = state(b, g, i);
        const C factor = s.sum[h] == 0 ? C(0) : std::exp(s.max[h] - max);
        sum += s.sum[h] * factor;
        const C* from = s.acc + h * padded_dim_;
        for (int64_t d = 0; d < value_dim_; d++) acc[d] = (i == 0 ? C(0) : acc[d]) + from[d] * factor;
      }
      if (sinks_ && sink != -std::numeric_limits<C>::infinity()) sum += std::exp(sink - max);
      for (int64_t d = 0; d < value_dim_; d++) acc[d] = sum == 0 ? without_keys_ : acc[d] / sum;
      microkernels_.store_of(dtype_)(acc, y_.at(frame, b, g * heads_per_group_ + h), 1, static_cast<int>(value_dim_));
    }
  }

  int64_t num_splits_;
  Arrivals arrivals_;
  int64_t padded_dim_, padded_keys_, padded_rest_, state_size_, q_bytes_, tile_bytes_;
  std::vector<C> partials_;
};

}  // namespace mpk::cpu
