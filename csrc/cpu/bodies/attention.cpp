#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "torch_mpk/cpu/body.h"

namespace mpk::cpu {
namespace {

constexpr int64_t kMinSplit = 256;    // positions that are worth a unit of their own
constexpr int64_t kWantedUnits = 64;  // enough for many threads; a constant, so that the bits never depend on them

// A mask entry at or below this counts as "not attended" wherever its row attends to anything at all: what it would add
// is exp(-1e30) = 0. Models fill masks with the smallest finite number of bfloat16 or float32.
constexpr double kLowest = -1e30;

// One unit is a range of positions of one key head of one batch row: it writes its part of the new keys and values,
// then attends for all query heads that share the key head. The last unit of a key head combines the ranges. C is the
// accumulation type: float, or double for float64.
template <class C>
class Attention : public Body {
 public:
  Attention(const Node& node, const Kernels& kernels)
      : kernels_(kernels), arrivals_(key_heads(node), count_splits(node)), num_splits_(count_splits(node)) {
    const Operand &q = node.operand("q"), &k = node.operand("k_cache"), &v = node.operand("v_cache"),
                  &y = node.operand("y");
    const Operand *k_new = node.find("k_new"), *v_new = node.find("v_new"), *slot = node.find("slot");
    const Operand *mask = node.find("mask"), *limit = node.find("limit");
    dtype_ = float_dtype(node, q);
    for (const Operand* o : {&k, &v, k_new, v_new, &y})
      if (o != nullptr) float_dtype(node, *o, &q);
    for (const Operand* o : {&q, &k, &v, k_new, v_new, &y})
      if (o != nullptr) require_inner_stride(node, *o);
    if ((k_new != nullptr) != (slot != nullptr) || (v_new != nullptr) != (slot != nullptr))
      fail(node, "expected all of k_new, v_new and slot, or none of them");
    for (const Operand* o : {slot, limit})
      if (o != nullptr && o->tensor.dtype != DType::kI64)
        fail(node, o->name + " is " + info(o->tensor.dtype).name + ", expected int64");

    batch_ = q.tensor.shape[0], num_heads_ = q.tensor.shape[1], head_dim_ = q.tensor.shape[2];
    num_groups_ = k.tensor.shape[1], length_ = k.tensor.shape[2];
    if (num_groups_ == 0 || num_heads_ % num_groups_ != 0)
      fail(node, "H=" + std::to_string(num_heads_) + " is not a multiple of G=" + std::to_string(num_groups_));
    heads_per_group_ = num_heads_ / num_groups_;
    scale_ = node.float_attr("scale");
    const std::string style = node.string_attr("style");
    if (style != "sdpa" && style != "eager") fail(node, "style is '" + style + "', expected 'sdpa' or 'eager'");
    without_keys_ = style == "sdpa" ? C(0) : std::numeric_limits<C>::quiet_NaN();
    q_ = View(q.tensor), k_ = View(k.tensor), v_ = View(v.tensor), y_ = View(y.tensor);
    if (slot != nullptr) {
      slot_ = Place(slot->tensor);
      k_new_ = View(k_new->tensor), v_new_ = View(v_new->tensor);
    }
    if (mask != nullptr) {
      mask_dtype_ = mask->tensor.dtype;
      if (mask_dtype_ != DType::kBool && !is_float(mask_dtype_))
        fail(node, std::string("mask is ") + info(mask_dtype_).name + ", expected bool or a floating dtype");
      mask_ = View(mask->tensor);
    }
    if (limit != nullptr) limit_ = View(limit->tensor);

    padded_dim_ = round_up(head_dim_, kHeadDimPad);
    state_size_ = round_up(heads_per_group_ * (padded_dim_ + 2), 16);  // acc, max, sum
    partials_.resize(batch_ * num_groups_ * num_splits_ * state_size_);
    num_units_ = batch_ * num_groups_ * num_splits_;
    unit_cost_ = static_cast<double>(length_) / num_splits_ * head_dim_ * 2 * size_bytes(dtype_) / kBytesPerNs;
    q_bytes_ = round_up(heads_per_group_ * padded_dim_ * static_cast<int64_t>(sizeof(C)), 64);
    tile_bytes_ = heads_per_group_ * kAttentionTile * static_cast<int64_t>(sizeof(C));
    scratch_bytes_ = q_bytes_ + 2 * tile_bytes_;
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t head = unit / num_splits_;
      attend(frame, head / num_groups_, head % num_groups_, unit % num_splits_, scratch);
      if (arrivals_.is_last(head)) combine(frame, head / num_groups_, head % num_groups_);
    }
  }

  void reset() override { arrivals_.reset(); }

 private:
  // An operand with its byte strides.
  struct View {
    Place place;
    int64_t strides[4] = {};
    View() = default;
    explicit View(const Tensor& t) : place(t) {
      for (size_t d = 0; d < t.strides.size(); d++) strides[d] = t.strides[d] * size_bytes(t.dtype);
    }
    explicit operator bool() const { return static_cast<bool>(place); }
    uint8_t* at(const Frame& frame, int64_t i, int64_t j = 0) const {
      return place.at(frame) + i * strides[0] + j * strides[1];
    }
  };

  struct State {
    C *acc, *max, *sum;
  };

  static int64_t key_heads(const Node& node) {
    const auto& shape = node.operand("k_cache").tensor.shape;
    return shape[0] * shape[1];
  }

  static int64_t count_splits(const Node& node) {
    const int64_t heads = std::max<int64_t>(1, key_heads(node));
    const int64_t wanted = (kWantedUnits + heads - 1) / heads;
    const int64_t possible = (node.operand("k_cache").tensor.shape[2] + kMinSplit - 1) / kMinSplit;
    return std::max<int64_t>(1, std::min(wanted, possible));
  }

  State state(int64_t b, int64_t g, int64_t split) {
    C* base = partials_.data() + ((b * num_groups_ + g) * num_splits_ + split) * state_size_;
    return {base, base + heads_per_group_ * padded_dim_, base + heads_per_group_ * (padded_dim_ + 1)};
  }

  void write_slot(const Frame& frame, int64_t b, int64_t g, int64_t slot) {
    const int64_t bytes = head_dim_ * size_bytes(dtype_);
    std::memcpy(k_.at(frame, b, g) + slot * k_.strides[2], k_new_.at(frame, b, g), bytes);
    std::memcpy(v_.at(frame, b, g) + slot * v_.strides[2], v_new_.at(frame, b, g), bytes);
  }

  // Row h's mask of `count` positions from `first`, as numbers to add; -inf where it is False.
  void load_mask(const Frame& frame, int64_t b, int64_t h, int64_t first, int count, C* out) {
    const uint8_t* from = mask_.at(frame, b, h) + first * mask_.strides[2];
    const int64_t stride = mask_.strides[2] / size_bytes(mask_dtype_);
    alignas(64) uint8_t raw[kAttentionTile * 8];
    kernels_.load_of(mask_dtype_)(from, stride, raw, count);
    const auto copy = [&](auto* values) {
      for (int i = 0; i < count; i++) out[i] = static_cast<C>(values[i]);
    };
    switch (class_of(mask_dtype_)) {
      case kTruth:
        for (int i = 0; i < count; i++) out[i] = raw[i] ? C(0) : -std::numeric_limits<C>::infinity();
        break;
      case kDouble:
        copy(reinterpret_cast<const double*>(raw));
        break;
      default:
        copy(reinterpret_cast<const float*>(raw));
    }
  }

  // Whether every head of the group attends to something: then the smallest finite numbers in its mask mean "never".
  bool attends_somewhere(const Frame& frame, int64_t b, int64_t g, int64_t live) {
    const int64_t heads = mask_.strides[1] == 0 ? 1 : heads_per_group_;
    for (int64_t h = 0; h < heads; h++) {
      bool found = false;
      for (int64_t first = 0; first < live && !found; first += kAttentionTile) {
        C values[kAttentionTile];
        const int count = static_cast<int>(std::min<int64_t>(kAttentionTile, live - first));
        load_mask(frame, b, g * heads_per_group_ + h, first, count, values);
        found = std::any_of(values, values + count, [](C value) { return value > C(kLowest); });
      }
      if (!found) return false;
    }
    return true;
  }

  // Lists the positions of a tile that some head attends to, and their mask values.
  int select(const Frame& frame, int64_t b, int64_t g, int64_t first, int count, C lowest, int32_t* positions,
             C* mask) {
    if (mask_.strides[1] == 0) return select_shared(frame, b, first, count, lowest, positions, mask);
    for (int64_t h = 0; h < heads_per_group_; h++)
      load_mask(frame, b, g * heads_per_group_ + h, first, count, mask + h * kAttentionTile);
    int kept = 0;
    for (int i = 0; i < count; i++) {
      bool live = false;
      for (int64_t h = 0; h < heads_per_group_; h++) {
        C value = mask[h * kAttentionTile + i];
        if (value <= lowest) value = -std::numeric_limits<C>::infinity();
        live |= value != -std::numeric_limits<C>::infinity();
        mask[h * kAttentionTile + kept] = value;
      }
      if (live) positions[kept++] = static_cast<int32_t>(first + i);
    }
    return kept;
  }

  // The same where one row serves all heads, as in most models: tiles that are all live or all dead are quickly told.
  int select_shared(const Frame& frame, int64_t b, int64_t first, int count, C lowest, int32_t* positions, C* mask) {
    load_mask(frame, b, 0, first, count, mask);
    int num_dead = 0;
    for (int i = 0; i < count; i++) num_dead += mask[i] <= lowest;
    if (num_dead == count) return 0;
    int kept = 0;
    for (int i = 0; i < count; i++) {
      positions[kept] = static_cast<int32_t>(first + i);
      mask[kept] = mask[i];
      kept += !(mask[i] <= lowest);
    }
    for (int64_t h = 1; h < heads_per_group_; h++) std::copy(mask, mask + kept, mask + h * kAttentionTile);
    return kept;
  }

  void attend(const Frame& frame, int64_t b, int64_t g, int64_t split, uint8_t* scratch) {
    int64_t live = length_;
    if (limit_) {
      int64_t limit;
      std::memcpy(&limit, limit_.at(frame, b), sizeof limit);
      live = std::clamp<int64_t>(limit, 0, length_);
    }
    // The ranges follow the live length, so that all units have something to do in a cache that is mostly empty.
    const int64_t range =
        std::max<int64_t>(kAttentionTile, round_up((live + num_splits_ - 1) / num_splits_, kAttentionTile));
    if (slot_) {
      int64_t slot;
      std::memcpy(&slot, slot_.at(frame), sizeof slot);
      if (slot >= 0 && slot < length_ && (slot < live ? slot / range : 0) == split) write_slot(frame, b, g, slot);
    }

    C* q = reinterpret_cast<C*>(scratch);
    C* scores = reinterpret_cast<C*>(scratch + q_bytes_);
    C* mask = reinterpret_cast<C*>(scratch + q_bytes_ + tile_bytes_);
    const State s = state(b, g, split);
    std::fill(s.acc, s.acc + heads_per_group_ * padded_dim_, C(0));
    std::fill(s.sum, s.sum + heads_per_group_, C(0));
    std::fill(s.max, s.max + heads_per_group_, -std::numeric_limits<C>::infinity());
    const int64_t begin = split * range, end = std::min(live, begin + range);
    if (begin >= end) return;

    for (int64_t h = 0; h < heads_per_group_; h++) {
      C* row = q + h * padded_dim_;
      kernels_.load_of(dtype_)(q_.at(frame, b, g * heads_per_group_ + h), 1, row, static_cast<int>(head_dim_));
      std::fill(row + head_dim_, row + padded_dim_, C(0));
    }
    // The smallest float16 is too small a number for the shortcut: a score could outweigh it.
    const bool shortcut =
        mask_ && is_float(mask_dtype_) && mask_dtype_ != DType::kF16 && attends_somewhere(frame, b, g, live);
    const C lowest = shortcut ? C(kLowest) : -std::numeric_limits<C>::infinity();
    int32_t positions[kAttentionTile];
    AttentionTileArgs args = {};
    args.k = k_.at(frame, b, g), args.v = v_.at(frame, b, g);
    args.k_stride = k_.strides[2], args.v_stride = v_.strides[2];
    args.positions = positions;
    args.mask = mask_ ? mask : nullptr;
    args.q = q;
    args.num_heads = static_cast<int>(heads_per_group_);
    args.head_dim = head_dim_;
    args.scale = scale_;
    args.max = s.max, args.sum = s.sum, args.acc = s.acc;
    args.scores = scores;
    for (int64_t first = begin; first < end; first += kAttentionTile) {
      const int count = static_cast<int>(std::min<int64_t>(kAttentionTile, end - first));
      if (mask_) {
        args.num_positions = select(frame, b, g, first, count, lowest, positions, mask);
      } else {
        args.num_positions = count;
        for (int i = 0; i < count; i++) positions[i] = static_cast<int32_t>(first + i);
      }
      if (args.num_positions > 0) kernels_.attention_tile[static_cast<int>(dtype_)](args);
    }
  }

  // Brings the ranges of one key head to a common maximum and writes its heads' rows.
  void combine(const Frame& frame, int64_t b, int64_t g) {
    const State first = state(b, g, 0);
    for (int64_t h = 0; h < heads_per_group_; h++) {
      C max = -std::numeric_limits<C>::infinity(), sum = 0;
      for (int64_t i = 0; i < num_splits_; i++) {
        const C other = state(b, g, i).max[h];
        if (other != other || other > max) max = other;
      }
      C* acc = first.acc + h * padded_dim_;
      for (int64_t i = 0; i < num_splits_; i++) {
        const State s = state(b, g, i);
        const C factor = s.sum[h] == 0 ? C(0) : std::exp(s.max[h] - max);
        sum += s.sum[h] * factor;
        const C* from = s.acc + h * padded_dim_;
        for (int64_t d = 0; d < head_dim_; d++) acc[d] = (i == 0 ? C(0) : acc[d]) + from[d] * factor;
      }
      for (int64_t d = 0; d < head_dim_; d++) acc[d] = sum == 0 ? without_keys_ : acc[d] / sum;
      kernels_.store_of(dtype_)(acc, y_.at(frame, b, g * heads_per_group_ + h), 1, static_cast<int>(head_dim_));
    }
  }

  const Kernels& kernels_;
  Arrivals arrivals_;
  int64_t num_splits_;
  DType dtype_, mask_dtype_ = DType::kBool;
  View q_, k_, v_, k_new_, v_new_, mask_, limit_, y_;
  Place slot_;
  int64_t batch_, num_heads_, num_groups_, heads_per_group_, length_, head_dim_, padded_dim_;
  int64_t state_size_, q_bytes_, tile_bytes_;
  double scale_;
  C without_keys_;
  std::vector<C> partials_;
};

std::unique_ptr<Body> make(const Node& node, const Kernels& kernels) {
  if (node.operand("q").tensor.dtype == DType::kF64) return std::make_unique<Attention<double>>(node, kernels);
  return std::make_unique<Attention<float>>(node, kernels);
}

[[maybe_unused]] const bool kRegistered = BodyRegistry::global().add("attention", make);

}  // namespace
}  // namespace mpk::cpu
