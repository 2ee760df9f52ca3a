// Rows of queries in prefill_attention that the four warps of a warpgroup multiply together.
//
// Products are asynchronous. Those of a part's keys are started before those of the values of the part before, so that
// tensor cores could add values while the warps make the next exponentials. ptxas waits before them, as yet, and what
// fills the time are products of the other warpgroup.
#pragma once

#include "torch_mpk/device/tasks/prefill_rows.cuh"
#include "torch_mpk/device/warpgroup.cuh"

namespace mpk::prefill_attention {

// All warps of a warpgroup make the same calls.
template <class V, class U>
struct RowsTogether : Rows<V, U> {
  using Base = Rows<V, U>;
  using S = Shape<V>;
  using T = typename V::T;
  using KeyTile = typename S::KeyTile;
  static_assert(S::kByWarpgroups && !Windowed<V>);

  const uint8_t* values = nullptr;     // of the part before, which are still to be added; null: there is none
  ptx::Quad weights[S::kAtOnce / 16];  // theirs

  using Base::Base;

  // Adds a tile, some positions at a time. The values of the last of them are added by the next call.
  MPK_DEVICE void attend(const uint8_t* entry, uint32_t tile) {
    uint32_t begin = tile * V::kKeys;
    if (begin >= this->most) return finish();
#pragma unroll 1
    for (int part = 0; part < V::kKeys / S::kAtOnce && begin < this->most; part++) {
      // No branch between products and their wait: ptxas would wait there.
      const bool cut = V::kHasMask || begin + S::kAtOnce > this->least;
      if (values == nullptr)
        cut ? add_part<true, true>(entry, begin) : add_part<true, false>(entry, begin);
      else
        cut ? add_part<false, true>(entry, begin) : add_part<false, false>(entry, begin);
      values = entry + KeyTile::kBytes;
      begin += S::kAtOnce;
      entry += S::kAtOnce * KeyTile::kPitch;
    }
  }

  // Adds the values that are left.
  MPK_DEVICE void finish() {
    if (values == nullptr) return;
    const ptx::SwizzledMatrix from = boxes_of(values);
    ptx::hold_sums(sums());
    ptx::begin_products();
    start_values(from);
    ptx::await_sums(sums());
    values = nullptr;
  }

 private:
  static MPK_DEVICE ptx::SwizzledMatrix boxes_of(const uint8_t* values) {
    return ptx::in_boxes(ptx::uniform_swizzled(values), S::ValueTile::kColumnBytes);
  }
  MPK_DEVICE WarpgroupSums<V::kValueSize>& sums() { return reinterpret_cast<WarpgroupSums<V::kValueSize>&>(this->out); }

  template <bool is_first, bool cut>
  MPK_DEVICE void add_part(const uint8_t* keys, uint32_t begin) {
    typename Base::Scores scores;
    auto& products = reinterpret_cast<WarpgroupSums<S::kAtOnce>&>(scores);
    const ptx::SwizzledMatrix from = ptx::uniform_swizzled(keys);
    const ptx::SwizzledMatrix values_before = is_first ? from : boxes_of(values);
    ptx::hold_sums(sums());
    ptx::begin_products();
    start_keys(products, from);
    if constexpr (!is_first) start_values(values_before);
    ptx::await_products<is_first ? 0 : 1>();
    ptx::hold_sums(products);
    this->template finish_scores<cut>(scores, begin);
    const typename Base::Raised raised = this->raise(scores);
    this->exponentiate(scores);
    if constexpr (!is_first) {
      ptx::hold_sums(products);  // or the compiler waits first
      ptx::await_sums(sums());
    }
    this->rescale(raised);
#pragma unroll
    for (int k = 0; k < S::kAtOnce / 16; k++) weights[k] = Base::rounded(scores, k);
  }

  MPK_DEVICE void start_keys(WarpgroupSums<S::kAtOnce>& products, ptx::SwizzledMatrix keys) const {
    ptx::multiply_registers<T, S::kAtOnce, false>(products, this->q[0], keys);
#pragma unroll
    for (int k = 1; k < KeyTile::kSteps; k++)
      ptx::multiply_registers<T, S::kAtOnce>(products, this->q[k],
                                             ptx::from_element(keys, k / 4 * V::kKeys, k % 4 * 16));
    ptx::commit_products();
  }

  // Values that no row of the unit sees are zero, see clear_values.
  MPK_DEVICE void start_values(ptx::SwizzledMatrix from) {
#pragma unroll
    for (int k = 0; k < S::kAtOnce / 16; k++)
      ptx::multiply_transposed<T, V::kValueSize>(sums(), weights[k], ptx::from_element(from, 16 * k, 0));
    ptx::commit_products();
  }
};

}  // namespace mpk::prefill_attention
