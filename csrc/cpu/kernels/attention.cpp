#include "attention.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace mpk::cpu {
namespace {

// A mask entry at or below this counts as "not attended" if its row attends to anything: it would add exp(-1e30) = 0.
// Models fill masks with the smallest finite number of bfloat16 or float32.
constexpr double kLowest = -1e30;

template <class C>
class Attention : public AttentionKernel<C> {
 public:
  Attention(const Node& node, const Microkernels& microkernels)
      : Attention(node, microkernels, node.operand("k_cache"), node.operand("v_cache")) {
    const std::string style = node.string_attr("style");
    if (style != "sdpa" && style != "eager") fail(node, "style is '" + style + "', expected 'sdpa' or 'eager'");
    this->without_keys_ = style == "sdpa" ? C(0) : std::numeric_limits<C>::quiet_NaN();
  }

 protected:
  Attention(const Node& node, const Microkernels& microkernels, const Operand& keys, const Operand& values,
            const Operand* q_rest = nullptr, const Operand* k_rest = nullptr)
      : AttentionKernel<C>(node, microkernels, keys, values, keys.tensor.shape[1], keys.tensor.shape[2],
                           keys.tensor.shape[0] * keys.tensor.shape[1], q_rest, k_rest) {
    const Operand *slot = node.find("slot"), *mask = node.find("mask"), *limit = node.find("limit");
    if (static_cast<bool>(this->k_new_) != (slot != nullptr) || static_cast<bool>(this->v_new_) != (slot != nullptr))
      fail(node, "expected all of k_new, v_new and slot, or none of them");
    for (const Operand* o : {slot, limit})
      if (o != nullptr && o->tensor.dtype != DType::kI64)
        fail(node, o->name + " is " + info(o->tensor.dtype).name + ", expected int64");
    if (slot != nullptr) slot_ = Place(slot->tensor);
    if (mask != nullptr) {
      mask_dtype_ = mask->tensor.dtype;
      if (mask_dtype_ != DType::kBool && !is_float(mask_dtype_))
        fail(node, std::string("mask is ") + info(mask_dtype_).name + ", expected bool or a floating dtype");
      mask_ = View(mask->tensor);
    }
    if (limit != nullptr) limit_ = View(limit->tensor);
  }

 private:
  using typename AttentionKernel<C>::Range;
  using AttentionKernel<C>::microkernels_, AttentionKernel<C>::k_, AttentionKernel<C>::v_,
      AttentionKernel<C>::heads_per_group_;

  int64_t live_positions(const Frame& frame, int64_t b) const override {
    if (!limit_) return this->capacity_;
    int64_t limit;
    std::memcpy(&limit, limit_.at(frame, b), sizeof limit);
    return std::clamp<int64_t>(limit, 0, this->capacity_);
  }

  int64_t new_position(const Frame& frame, int64_t) const override {
    if (!slot_) return -1;
    int64_t slot;
    std::memcpy(&slot, slot_.at(frame), sizeof slot);
    return slot < this->capacity_ ? slot : -1;
  }

  void write(const Frame& frame, int64_t b, int64_t g, int64_t slot) const override {
    this->write_rows(frame, b, g, k_.at(frame, b, g) + slot * k_.strides[2], v_.at(frame, b, g) + slot * v_.strides[2]);
  }

  // Loads row h's mask of `count` positions from `first` as numbers to add; -inf for False.
  void load_mask(const Frame& frame, int64_t b, int64_t h, int64_t first, int count, C* out) const {
    const uint8_t* from = mask_.at(frame, b, h) + first * mask_.strides[2];
    const int64_t stride = mask_.strides[2] / size_bytes(mask_dtype_);
    alignas(64) uint8_t raw[kAttentionTile * 8];
    microkernels_.load_of(mask_dtype_)(from, stride, raw, count);
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

  // Whether every head of the group attends to something. Then the smallest finite numbers in its mask mean "never".
  bool attends_somewhere(const Frame& frame, int64_t b, int64_t g, int64_t live) const {
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
             C* mask) const {
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

  // The same if one mask row serves all heads, as in most models. Finds all-live and all-dead tiles quickly.
  int select_shared(const Frame& frame, int64_t b, int64_t first, int count, C lowest, int32_t* positions,
                    C* mask) const {
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

  void attend_to(const Frame& frame, const Range& range, AttentionTileArgs& args, C* mask) const override {
    // The smallest float16 is too close to zero for the shortcut: a score could outweigh it.
    const bool shortcut = mask_ && is_float(mask_dtype_) && mask_dtype_ != DType::kF16 &&
                          attends_somewhere(frame, range.b, range.g, range.live);
    const C lowest = shortcut ? C(kLowest) : -std::numeric_limits<C>::infinity();
    int32_t positions[kAttentionTile];
    args.k = k_.at(frame, range.b, range.g), args.v = v_.at(frame, range.b, range.g);
    args.positions = positions;
    args.mask = mask_ ? mask : nullptr;
    for (int64_t first = range.begin; first < range.end; first += kAttentionTile) {
      const int count = static_cast<int>(std::min<int64_t>(kAttentionTile, range.end - first));
      if (mask_) {
        args.num_positions = select(frame, range.b, range.g, first, count, lowest, positions, mask);
      } else {
        args.num_positions = count;
        for (int i = 0; i < count; i++) positions[i] = static_cast<int32_t>(first + i);
      }
      if (args.num_positions > 0) this->step(args);
    }
  }

  DType mask_dtype_ = DType::kBool;
  View mask_, limit_;
  Place slot_;
};

// Latents are keys and values of all heads; the rest of a key is rotated.
template <class C>
class LatentAttention : public Attention<C> {
 public:
  LatentAttention(const Node& node, const Microkernels& microkernels)
      : Attention<C>(node, microkernels, node.operand("latent"), node.operand("latent"), &node.operand("q_rope"),
                     &node.operand("rope")) {}
};

template <template <class> class K>
std::unique_ptr<Kernel> make(const Node& node, const Microkernels& microkernels) {
  if (node.operand("q").tensor.dtype == DType::kF64) return std::make_unique<K<double>>(node, microkernels);
  return std::make_unique<K<float>>(node, microkernels);
}

[[maybe_unused]] const bool kRegistered = KernelRegistry::global().add("attention", make<Attention>) &&
                                          KernelRegistry::global().add("latent_attention", make<LatentAttention>);

}  // namespace
}  // namespace mpk::cpu
