// The inner loops of the CPU kernels: a table of functions for each instruction-set tier, all from the same source
// (csrc/cpu/simd). They take raw pointers, which callers have checked.
//
// Inside a program a value lives in the compute type of its class: float for float16, bfloat16 and float32, double for
// float64, int64_t for integers, uint8_t (0 or 1) for bool.
#pragma once

#include <cstdint>

#include "torch_mpk/cpu/isa.h"
#include "torch_mpk/dtype.h"
#include "torch_mpk/graph/program.h"

namespace mpk::cpu {

enum ValueClass : uint8_t { kFloat, kDouble, kInt, kTruth };
inline constexpr int kNumClasses = 4;
inline constexpr int kClassBytes[kNumClasses] = {4, 8, 8, 1};

inline ValueClass class_of(DType t) {
  if (t == DType::kBool) return kTruth;
  if (t == DType::kF64) return kDouble;
  return is_float(t) ? kFloat : kInt;
}
inline DType class_dtype(ValueClass c) {
  constexpr DType kDTypes[] = {DType::kF32, DType::kF64, DType::kI64, DType::kBool};
  return kDTypes[c];
}

inline constexpr int kBlock = 256;          // points a program handles per instruction
inline constexpr int kReduceLanes = 64;     // partial results of a reduction: fixes its order on every tier
inline constexpr int kLinearRowBlock = 16;  // rows of x that one pass over a weight row serves
inline constexpr int kAttentionTile = 64;   // key positions per step of the online softmax
inline constexpr int kHeadDimPad = 16;
inline constexpr int kPrefillKeys = 64;  // key positions per step of a prompt's online softmax

// y[r, n] = sum_k x[r, k] * weight[n, k] + bias[n] for n in [begin, end). Strides in bytes.
struct LinearArgs {
  const uint8_t* x;
  const uint8_t* weight;
  const uint8_t* bias;  // or nullptr
  uint8_t* y;
  int64_t x_stride, weight_stride, y_stride;
  int64_t num_rows, k;
  int64_t begin, end;
  uint8_t* scratch;  // linear_scratch_bytes
};

// The same of a weight in bytes, or in half bytes. Along k, runs of `run` elements (the last may be shorter) have sums
// of their own: y[r, n] = sum over runs of factors of the run times sum_k x[r, k] * weight[n, k], + offset of the run
// times that of x.
struct QuantizedArgs {
  const float* x;  // [num_rows, runs, padded run]: see quantized_pitch; behind a run's elements stand zeros
  const uint8_t* weight;
  int64_t weight_stride;  // bytes
  int64_t num_rows, k, run;
  const float* x_factors;       // [num_rows, runs]
  const float* weight_factors;  // of row n and run i: [(n - begin) * weight_factors_stride + i]
  int64_t weight_factors_stride;
  const float *offsets,
      *x_sums;             // nullptr, or of row n - begin, and of a row of x: [offsets_stride], zeros behind runs
  int64_t offsets_stride;  // a multiple of 16
  int64_t begin, end;
  float* sums;       // [num_rows, end - begin]
  bool x_is_bf16;    // all of x are numbers of bfloat16
  uint8_t* scratch;  // half as large as x
};

// One step of the online softmax: up to kAttentionTile key positions of one (batch, key head), for the `num_heads`
// query heads that share it. C is float, or double for float64. Rows of q and acc are padded with zeros to a multiple
// of kHeadDimPad elements.
struct AttentionTileArgs {
  const uint8_t* k;  // the cache rows of (batch, key head)
  const uint8_t* v;
  int64_t k_stride, v_stride;  // bytes
  const int32_t* positions;    // [num_positions], those that some head attends to
  int num_positions;
  const void* mask;  // C [num_heads, kAttentionTile], added to the scaled scores; nullptr adds nothing
  const void* q;     // C [num_heads, padded head_dim]
  int num_heads;
  int64_t head_dim, value_dim;
  double scale;
  double softcap;  // scores become softcap * tanh(score / softcap); 0: they stay
  void* max;       // C [num_heads]: running maximum of the scores; -inf before the first live key
  void* sum;       // C [num_heads]: sum of exp(score - max)
  void* acc;       // C [num_heads, padded value_dim]: sum of exp(score - max) * value
  void* scores;    // C [num_heads, kAttentionTile]: scratch
};

// Attention of rows that share the keys and values of one (sequence, key head): query positions times query heads. Row
// r attends to the positions from starts[r] on that are below limits[r], which is at most the sequence's length.
struct PrefillArgs {
  const uint8_t* const* q;  // [num_rows], each [head_dim]
  uint8_t* const* y;        // [num_rows], each [value_dim]
  const int64_t* starts;    // [num_rows], 0 or more, or nullptr for zeros
  const int64_t* limits;    // the same
  int num_rows;
  int64_t head_dim, value_dim;
  const uint8_t *k, *v;
  int64_t k_stride, v_stride;      // bytes
  const int64_t* list;             // [num_listed] rows of k and v with the first positions, or nullptr: all, in order
  int64_t num_listed, cache_rows;  // cache_rows: the cache's; larger numbers in the list mean the last
  const uint8_t *k_new, *v_new;    // the positions behind the listed ones
  int64_t k_new_stride, v_new_stride;
  const uint8_t* const* mask;  // [num_rows], or nullptr
  int64_t mask_stride;         // elements, between neighbouring positions
  int64_t mask_bytes;          // of an element
  void (*load_mask)(const void* from, int64_t stride, void* values, int n);
  ValueClass mask_class;
  double scale;
  double softcap;       // as in AttentionTileArgs
  const double* sinks;  // [num_rows]: each row's sink, or nullptr
  double without_keys;  // result of a row without keys
  uint8_t* scratch;     // prefill_scratch_bytes
};

enum class Reduction : uint8_t { kSum, kProd, kMax, kMin };
inline constexpr int kNumReductions = 4;

struct Microkernels {
  using Linear = void (*)(const LinearArgs&);
  using Quantized = void (*)(const QuantizedArgs&);
  using AttentionTile = void (*)(const AttentionTileArgs&);
  using Prefill = void (*)(const PrefillArgs&);
  using Load = void (*)(const void* from, int64_t stride, void* values, int n);
  using Store = void (*)(const void* values, void* to, int64_t stride, int n);
  // Element i at from[stride * i + offsets[i]], 0 where !predicate[i]; either array may be nullptr.
  using Gather = void (*)(const void* from, int64_t stride, const int64_t* offsets, const uint8_t* predicate,
                          void* values, int n);
  using Scatter = void (*)(const void* values, void* to, int64_t stride, const int64_t* offsets,
                           const uint8_t* predicate, int n);
  using Cast = void (*)(const void* values, void* result, int n);
  using Round = void (*)(void* values, int n);
  using Arith = void (*)(const void* a, const void* b, void* result, int n);
  using Where = void (*)(const uint8_t* condition, const void* a, const void* b, void* result, int n);
  using Reduce = void (*)(void* lanes, const void* values, int n);

  Isa isa;
  Linear linear[kNumDTypes];  // floating dtypes only
  // For more rows than kLinearRowBlock, all of which are in scratch at once; nullptr where `linear` takes them, too.
  Linear linear_many[kNumDTypes];
  int64_t (*linear_many_scratch_bytes[kNumDTypes])(int64_t num_rows, int64_t k);
  // The same of a weight [k, n]: weight_stride is between its rows. Floating dtypes only, scratch as of `linear`.
  Linear linear_transposed[kNumDTypes];
  Quantized quantized_e4m3, quantized_i8, quantized_i4, quantized_u4, quantized_e2m1;  // u4: WeightFormat::has_middle
  int64_t (*quantized_pitch)(int64_t run);                                             // floats that a run of x takes
  // Numbers over `scale`, rounded to e4m3, as floats; NaN and infinities as PyTorch's conversion behind a clamp.
  void (*round_e4m3)(float* values, int64_t n, float scale);
  AttentionTile attention_tile[kNumDTypes];  // floating dtypes only
  Prefill prefill_attention[kNumDTypes];     // floating dtypes only
  int64_t (*prefill_scratch_bytes[kNumDTypes])(int num_rows, int64_t head_dim, int64_t value_dim);
  Load load[kNumDTypes];
  Store store[kNumDTypes];  // of values already rounded to the dtype
  Gather gather[kNumDTypes];
  Scatter scatter[kNumDTypes];
  Cast cast[kNumClasses][kNumDTypes];                       // as torch's .to(dtype)
  Round round[kNumDTypes];                                  // nullptr where the class holds exactly the dtype's values
  Arith arith[static_cast<int>(Op::kNumOps)][kNumClasses];  // the class of the arguments; nullptr where not defined
  Where where[kNumClasses];
  Reduce reduce[kNumReductions][kNumClasses];  // into kReduceLanes lanes: value i into lane i % kReduceLanes
  int64_t (*linear_scratch_bytes)(int64_t num_rows, int64_t k);
  uint64_t (*read_words)(const uint64_t* words, int64_t n);  // their sum, as fast as memory can deliver them

  Load load_of(DType t) const { return load[static_cast<int>(t)]; }
  Store store_of(DType t) const { return store[static_cast<int>(t)]; }
  Round round_of(DType t) const { return round[static_cast<int>(t)]; }
};

const Microkernels& microkernels(Isa isa);

}  // namespace mpk::cpu
