// The whole table of one tier. A tier's .cpp defines MPK_TIER (its function), MPK_TIER_ISA and MPK_VEC_BYTES, sets its
// target and includes this file; everything below has internal linkage.
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace mpk::cpu {
namespace {

// clang-format off: each builds on the ones before
#include "simd.h"
#include "linear.h"
#include "linear_transposed.h"
#include "numbers4.h"
#include "quantized.h"
#include "words.h"
#include "values.h"
#include "ops.h"
#include "attention.h"
#include "product.h"
#include "prefill.h"
// clang-format on

template <ValueClass c>
void fill_class(Microkernels& t) {
  using V = typename ValueType<c>::type;
#define X(name, arity, expression) t.arith[static_cast<int>(Op::k_##name)][c] = arith_values<Op_##name, c, false>;
  MPK_POINTWISE_ARITHMETIC(X)
  if constexpr (c == kFloat || c == kDouble) {
    MPK_POINTWISE_FLOAT(X)
  }
  if constexpr (c == kInt || c == kTruth) {
    MPK_POINTWISE_INTEGER(X)
  }
#undef X
#define X(name, arity, expression) t.arith[static_cast<int>(Op::k_##name)][c] = arith_values<Op_##name, c, true>;
  MPK_POINTWISE_COMPARE(X)
#undef X
  t.where[c] = where_values<V>;
  t.reduce[static_cast<int>(Reduction::kSum)][c] = reduce_values<Reduction::kSum, V>;
  t.reduce[static_cast<int>(Reduction::kProd)][c] = reduce_values<Reduction::kProd, V>;
  t.reduce[static_cast<int>(Reduction::kMax)][c] = reduce_values<Reduction::kMax, V>;
  t.reduce[static_cast<int>(Reduction::kMin)][c] = reduce_values<Reduction::kMin, V>;
}

template <DType d>
void fill_dtype(Microkernels& t) {
  constexpr int i = static_cast<int>(d);
  t.load[i] = load_values<d>;
  t.store[i] = store_values<d>;
  t.gather[i] = gather_values<d>;
  t.scatter[i] = scatter_values<d>;
  t.cast[kFloat][i] = cast_values<kFloat, d>;
  t.cast[kDouble][i] = cast_values<kDouble, d>;
  t.cast[kInt][i] = cast_values<kInt, d>;
  t.cast[kTruth][i] = cast_values<kTruth, d>;
  if (class_dtype(Storage<d>::kClass) != d) t.round[i] = round_values<d>;
}

template <class T>
void fill_prefill(Microkernels& t, DType dtype) {
  const int i = static_cast<int>(dtype);
  t.prefill_attention[i] = prefill_attention<T>;
  t.prefill_scratch_bytes[i] = prefill_scratch_bytes<T>;
  if constexpr (!std::is_same_v<T, double>) {
    t.linear_many[i] = linear_many<T>;
    t.linear_many_scratch_bytes[i] = linear_many_scratch_bytes<T>;
  }
}

template <class W, class X, int kParts = 1, int kSize = kQuantizedStep>
constexpr QuantizedProduct quantized_product() {
  constexpr int kWideParts = X::template kWideParts<W>, kWide = kWideBytes * W::kPacked;
  return {arrange_x<typename X::T, kParts, kSize, kWide, kWideParts, X::template kTogether<W>>, quantized<W, X>,
          kWideParts > 0 && W::kPacked > 1 ? kWide : 0};
}
template <class L, class X, int kParts = 1, int kSize = kQuantizedStep>
constexpr QuantizedProduct words_product() {
  return {arrange_x<typename X::T, kParts, kSize>, quantized_words<L, X>, 0};
}

void fill_quantized(Microkernels& t) {
  const auto set = [&](WeightCode code, QuantizedProduct product) {
    for (QuantizedProduct& each : t.quantized[static_cast<int>(code)]) each = product;
  };
  set(WeightCode::kE4M3, quantized_product<WeightsE4M3, FloatX>());
  set(WeightCode::kI8, quantized_product<WeightsI8, FloatX>());
  set(WeightCode::kI4, quantized_product<Weights4<WeightCode::kI4>, FloatX, 2, kLanes>());
  set(WeightCode::kU4, quantized_product<Weights4<WeightCode::kU4>, FloatX, 2, kLanes>());
  set(WeightCode::kE2M1, quantized_product<Weights4<WeightCode::kE2M1>, FloatX, 2, kLanes>());
  set(WeightCode::kTable, quantized_product<Weights4<WeightCode::kTable>, FloatX, 2, kLanes>());
  set(WeightCode::kColumnWords, words_product<ColumnWords, FloatTile<false>>());
  set(WeightCode::kRowWords, words_product<RowWords, FloatTile<false>>());
#if defined(MPK_TIER_AVX512_BF16)
  const auto set_pairs = [&](WeightCode code, QuantizedProduct product) {
    t.quantized[static_cast<int>(code)][1] = product;
  };
  set_pairs(WeightCode::kE4M3, quantized_product<PairsE4M3, PairsX>());
  set_pairs(WeightCode::kI4, quantized_product<Weights4<WeightCode::kI4>, PairsX>());
  set_pairs(WeightCode::kU4, quantized_product<Weights4<WeightCode::kU4>, PairsX>());
  set_pairs(WeightCode::kE2M1, quantized_product<Weights4<WeightCode::kE2M1>, PairsX>());
  set_pairs(WeightCode::kColumnWords, words_product<ColumnWords, PairsTile, 4, 2>());
  set_pairs(WeightCode::kRowWords, words_product<RowWords, PairsTile>());
#endif
  t.quantized_pitch = quantized_pitch, t.zero_points = zero_points;
}

Microkernels make_table() {
  Microkernels t = {};
  t.isa = MPK_TIER_ISA;
  fill_class<kFloat>(t);
  fill_class<kDouble>(t);
  fill_class<kInt>(t);
  fill_class<kTruth>(t);
  fill_dtype<DType::kBool>(t);
  fill_dtype<DType::kU8>(t);
  fill_dtype<DType::kI8>(t);
  fill_dtype<DType::kI16>(t);
  fill_dtype<DType::kI32>(t);
  fill_dtype<DType::kI64>(t);
  fill_dtype<DType::kF16>(t);
  fill_dtype<DType::kBF16>(t);
  fill_dtype<DType::kF32>(t);
  fill_dtype<DType::kF64>(t);
  t.linear[static_cast<int>(DType::kF16)] = linear<ChunkF16>;
  t.linear[static_cast<int>(DType::kBF16)] = linear<ChunkBF16>;
  t.linear[static_cast<int>(DType::kF32)] = linear<ChunkF32>;
  t.linear[static_cast<int>(DType::kF64)] = linear_f64;
  t.linear_transposed[static_cast<int>(DType::kF16)] = linear_transposed<f16>;
  t.linear_transposed[static_cast<int>(DType::kBF16)] = linear_transposed<bf16>;
  t.linear_transposed[static_cast<int>(DType::kF32)] = linear_transposed<float>;
  t.linear_transposed[static_cast<int>(DType::kF64)] = linear_transposed_f64;
  fill_quantized(t);
  t.round_e4m3 = round_e4m3, t.largest_magnitude = largest_magnitude, t.sum_of = sum_of;
  t.attention_tile[static_cast<int>(DType::kF16)] = attention_tile<f16>;
  t.attention_tile[static_cast<int>(DType::kBF16)] = attention_tile<bf16>;
  t.attention_tile[static_cast<int>(DType::kF32)] = attention_tile<float>;
  t.attention_tile[static_cast<int>(DType::kF64)] = attention_tile_f64;
  fill_prefill<f16>(t, DType::kF16);
  fill_prefill<bf16>(t, DType::kBF16);
  fill_prefill<float>(t, DType::kF32);
  fill_prefill<double>(t, DType::kF64);
  t.linear_scratch_bytes = linear_scratch_bytes;
  t.read_words = read_words;
  return t;
}

}  // namespace

const Microkernels& MPK_TIER() {
  static const Microkernels table = make_table();
  return table;
}

}  // namespace mpk::cpu
