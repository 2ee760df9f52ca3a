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

// A weight's elements are bytes, of e4m3 or int8; bytes of two numbers of 4 bits, with a sign, with 8 more, of e2m1, or
// looked up; or words of eight numbers with 8 more, which are columns of a row or rows of a column, see WeightFormat.
enum class WeightCode : uint8_t { kE4M3, kI8, kI4, kU4, kE2M1, kTable, kColumnWords, kRowWords };
inline constexpr int kNumWeightCodes = 8;
inline constexpr int kWordsStep = 128;  // rows of weights that factors and offsets of words are there for: a multiple

// The same of a quantised weight, for rows [begin, end) of x. Along k, runs of `run` elements (the last may be shorter)
// have sums of their own: y[r, n] = sum over runs of factors of the run times sum_k x[r, k] * weight[n, k], + offset of
// the run times that of x.
//
// The elements of a row of weights are neighbours. Those of words are weight_stride apart, while words of rows are
// neighbours, and values of rows, too.
struct QuantizedArgs {
  const void* x;           // [num_rows, runs, quantized_pitch]: see QuantizedProduct
  const float* x_factors;  // [num_rows, runs], or nullptr
  const uint8_t* weight;
  int64_t weight_stride;  // bytes
  int64_t begin, end, k, run, num_weight_rows;
  int64_t num_blocks;  // runs, or groups
  float *factors,
      *offsets;            // of row n and run i: [n * stride + i], or of words [i * stride + n]; the latter, or nullptr
  int64_t factors_stride;  // of both
  const float* x_sums;     // of runs, or of groups: [num_rows, num_blocks]
  float* sums;             // [end - begin, num_weight_rows]
  const float* codebook;
  const int32_t* groups;  // of words: nullptr, or of each k; factors have a last row of NaN for what is no group
};

// `arrange_x` writes n elements of a run, from element `at` of x on, as `multiply` reads them. If wide_run is not 0,
// runs of so many elements may be 2, 4, 8 or 16 blocks, each with factors and sums of its own.
struct QuantizedProduct {
  void (*arrange_x)(const float* values, int64_t n, void* x, int64_t at);
  void (*multiply)(const QuantizedArgs& args);
  int64_t wide_run;
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
  // The rest of keys and of queries, where keys lie in two parts; rest_dim is 0 where they do not.
  const uint8_t* k_rest;
  int64_t k_rest_stride;
  const void* q_rest;  // C [num_heads, padded rest_dim]
  int64_t rest_dim;
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
  QuantizedProduct quantized[kNumWeightCodes][2];  // the second where all of x are numbers of bfloat16
  int64_t (*quantized_pitch)(int64_t run);         // elements that a run of x takes, of at most 4 bytes
  void (*zero_points)(const uint32_t* words, int64_t n, bool in_row_order, float* points);  // of 8 rows each
  // Numbers over `scale`, rounded to e4m3, as floats; NaN and infinities as PyTorch's conversion behind a clamp.
  void (*round_e4m3)(float* values, int64_t n, float scale);
  float (*largest_magnitude)(const float* values, int64_t n);  // NaN where there is one
  float (*sum_of)(const float* values, int64_t n);
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
