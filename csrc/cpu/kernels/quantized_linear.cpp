// Products with quantised weights, of linears and of experts.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "expert_pairs.h"
#include "torch_mpk/graph/weight_format.h"

namespace mpk::cpu {
namespace {

// Rows of weights that a unit has, and rows of weights that are multiplied and of x that are prepared at a time. A call
// of a microkernel begins its streams of weights anew, and memory answers late.
constexpr int64_t kMinRowsPerUnit = 8, kMaxRowsPerUnit = 128, kWantedUnits = 64;
constexpr int64_t kRowsPerCall = 256;
constexpr int64_t kMostRows = 128;
constexpr int64_t kMostParts = 16;  // of a wide run
constexpr int kWord = WeightFormat::kWordRows;
constexpr int64_t kElementBytes = sizeof(uint32_t);  // of words
constexpr uint8_t kToMiddle = 0x88;                  // makes numbers with a sign those with 8 more

// Products of rows of x with a matrix, or with one of several matrices of one format. A unit is some rows of weights.
class QuantizedProducts : public Kernel {
 protected:
  // `num_rows`: of x, all together.
  QuantizedProducts(const Node& node, const Microkernels& microkernels, int64_t num_rows)
      : microkernels_(microkernels),
        format_(checked(node)),
        dtype_(float_dtype(node, node.operand("x"))),
        block_(std::min(num_rows, kMostRows)) {
    const Operand &x = node.operand("x"), &weight = node.operand("weight"), &scale = node.operand("weight_scale");
    const Operand &y = node.operand("y"), *bias = node.find("bias"), *zero = node.find("zero");
    if (dtype_ == DType::kF64) fail(node, "x is float64, expected float32, float16 or bfloat16");
    float_dtype(node, y, &x);
    if (bias != nullptr) bias_dtype_ = float_dtype(node, *bias);
    for (const Operand* o : {&x, bias, &y})
      if (o != nullptr) require_inner_stride(node, *o);
    weight_ = stacked(weight.tensor), scale_ = stacked(scale.tensor);
    if (zero != nullptr) zero_ = stacked(zero->tensor), zero_dtype_ = zero->tensor.dtype;
    const auto place = [&](const char* name) {
      const Operand* operand = node.find(name);
      if (operand != nullptr) require_inner_stride(node, *operand);
      return operand == nullptr ? Place() : Place(operand->tensor);
    };
    bias_ = place("bias"), x_scale_ = place("x_scale"), groups_ = place("column_groups"), code_ = place("codebook");
    scale_code_ = place("scale_code"), scale_scale_ = place("scale_scale"), scale_offset_ = place("scale_offset");
    num_weight_rows_ = format_.rows;
    depth_ = std::max<int64_t>(format_.columns, 1);
    run_ = std::min(format_.run(), depth_), runs_ = (depth_ + run_ - 1) / run_;
    blocks_ = format_.has_groups ? format_.scale_columns() : runs_;
    plan(num_rows, weight.tensor.strides.back() == 1);
    const bool is_bf16 = !format_.has_groups && (format_.quantizes_x() || dtype_ == DType::kBF16);
    product_ = microkernels.quantized[static_cast<int>(code_of_weights_)][is_bf16];
    const int64_t wide = product_.wide_run;
    if (wide > run_ && wide % run_ == 0 && wide / run_ <= kMostParts && std::has_single_bit<uint64_t>(wide / run_) &&
        format_.columns % wide == 0 && !format_.quantizes_x())
      run_ = wide, runs_ = format_.columns / wide;
    pitch_ = microkernels.quantized_pitch(run_);
    scratch_bytes_ = reinterpret_cast<intptr_t>(lay_out(nullptr).end);
  }

  // Prepares a row of x, number r of at most block_.
  void prepare_row(const Frame& frame, const uint8_t* row, int64_t r, uint8_t* scratch) const {
    const Scratch s = lay_out(scratch);
    float *values = s.values, *factors = s.x_factors + r * runs_, *sums = s.x_sums + r * blocks_;
    microkernels_.load_of(dtype_)(row, 1, values, static_cast<int>(format_.columns));
    std::fill(factors, factors + runs_, 1.0f);
    for (int64_t first = 0; format_.quantizes_x() && first < format_.columns; first += format_.x_columns) {
      const int64_t size = std::min(format_.x_columns, format_.columns - first);
      const float scale = format_.has_static_x ? *floats(frame, x_scale_) : scale_of(values + first, size);
      microkernels_.round_e4m3(values + first, size, scale);
      for (int64_t k = first; k < first + size; k += run_) factors[k / run_] = scale;
    }
    for (int64_t run = 0; run < runs_; run++) {
      const float* own = values + run * run_;
      const int64_t size = std::clamp<int64_t>(format_.columns - run * run_, 0, run_);
      product_.arrange_x(own, size, s.x, (r * runs_ + run) * pitch_);
    }
    if (!format_.has_zero()) return;
    const int64_t block_size = std::max<int64_t>(run_ * runs_ / blocks_, 1);  // that is no group
    for (int64_t block = 0; !format_.has_groups && block < blocks_; block++) {
      const int64_t first = block * block_size, size = std::clamp<int64_t>(format_.columns - first, 0, block_size);
      sums[block] = factors[first / run_] * microkernels_.sum_of(values + first, size);
    }
    if (!format_.has_groups) return;
    std::fill(sums, sums + blocks_, 0.0f);
    const int32_t* groups = groups_of(frame);
    for (int64_t k = 0; k < format_.columns; k++)
      if (static_cast<uint32_t>(groups[k]) < blocks_) sums[groups[k]] += values[k];
  }

  // Computes units [begin, end) of the products of `count` prepared rows, from number `first` on, with matrix number
  // `matrix`. `y`: where the results of a row begin.
  template <class Y>
  void multiply(const Frame& frame, int64_t matrix, int64_t first, int64_t count, Y y, int64_t begin, int64_t end,
                uint8_t* scratch) const {
    const Scratch s = lay_out(scratch);
    const int64_t end_row = std::min(end * rows_per_unit_, num_weight_rows_);
    for (int64_t row = begin * rows_per_unit_; row < end_row; row += rows_per_call_) {
      const int64_t last = std::min(row + rows_per_call_, end_row);
      QuantizedArgs args = {};
      args.x = s.x, args.x_factors = format_.quantizes_x() ? s.x_factors : nullptr, args.x_sums = s.x_sums;
      args.begin = first, args.end = first + count, args.k = format_.columns, args.run = run_;
      args.num_weight_rows = last - row, args.num_blocks = blocks_;
      args.factors = s.factors, args.factors_stride = has_words() ? rows_per_call_ : blocks_;
      args.sums = s.sums, args.codebook = floats(frame, code_), args.groups = groups_of(frame);
      find_factors(frame, matrix, row, last, args);
      if (format_.has_zero()) find_offsets(frame, matrix, row, last, s.offsets, args);
      args.weight = weight_.at(frame, matrix, row / format_.word_rows);
      args.weight_stride = weight_.strides[has_words() ? 2 : 1];
      if (is_gathered_) gather(frame, matrix, row, last, s.gathered, args);
      product_.multiply(args);
      if (bias_)
        microkernels_.load_of(bias_dtype_)(bias_.at(frame) + row * size_bytes(bias_dtype_), 1, s.values,
                                           static_cast<int>(last - row));
      for (int64_t r = 0; r < count; r++) {
        float* sums = s.sums + r * (last - row);
        for (int64_t i = 0; bias_ && i < last - row; i++) sums[i] += s.values[i];
        microkernels_.store_of(dtype_)(sums, y(r) + row * size_bytes(dtype_), 1, static_cast<int>(last - row));
      }
    }
  }

 private:
  static WeightFormat checked(const Node& node) {
    if (const auto why = WeightFormat::refuses(node)) fail(node, *why);
    return WeightFormat::of(node);
  }

  // A matrix, as one of a stack.
  static View stacked(Tensor t) {
    if (t.shape.size() == 2) t.shape.insert(t.shape.begin(), 1), t.strides.insert(t.strides.begin(), 0);
    return View(t);
  }

  // Chooses the microkernel, whether weights are gathered for it, and the units. `has_rows`: elements of a row are
  // neighbours.
  void plan(int64_t num_rows, bool has_rows) {
    const bool has_columns = format_.storage == DType::kI32 && (run_ % kWord == 0 || runs_ == 1) && !has_rows;
    code_of_weights_ = format_.has_word_rows()             ? WeightCode::kRowWords
                       : format_.has_groups || has_columns ? WeightCode::kColumnWords
                       : format_.has_code                  ? WeightCode::kTable
                       : format_.is_e2m1()                 ? WeightCode::kE2M1
                       : format_.has_middle()              ? WeightCode::kU4
                       : format_.bits() == 4               ? WeightCode::kI4
                       : format_.storage == DType::kI8     ? WeightCode::kI8
                                                           : WeightCode::kE4M3;
    is_gathered_ = has_words() ? format_.storage != DType::kI32 || weight_.strides[1] != kElementBytes : !has_rows;
    const int64_t least = has_words() ? kWordsStep : kMinRowsPerUnit;
    rows_per_unit_ = std::clamp(num_weight_rows_ / kWantedUnits / least * least, least, kMaxRowsPerUnit);
    rows_per_call_ = is_gathered_ ? rows_per_unit_ : std::max(kRowsPerCall / rows_per_unit_, 1l) * rows_per_unit_;
    num_units_ = num_rows == 0 ? 0 : (num_weight_rows_ + rows_per_unit_ - 1) / rows_per_unit_;
    unit_cost_ =
        static_cast<double>(rows_per_unit_ * format_.row_bytes()) * std::max(1.0, num_rows / 2.0) / kBytesPerNs;
  }
  bool has_words() const {
    return code_of_weights_ == WeightCode::kColumnWords || code_of_weights_ == WeightCode::kRowWords;
  }

  struct Scratch {
    float *x, *x_factors, *x_sums, *values, *factors, *offsets, *sums;
    uint8_t *gathered, *end;
  };
  Scratch lay_out(uint8_t* scratch) const {
    const auto take = [&](int64_t bytes) {
      uint8_t* p = scratch;
      scratch += round_up(bytes, 64);
      return p;
    };
    const auto floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
    Scratch s = {};
    s.x = floats(block_ * runs_ * pitch_), s.x_factors = floats(block_ * runs_), s.x_sums = floats(block_ * blocks_);
    s.values = floats(std::max(depth_, rows_per_call_));
    s.factors = floats(rows_per_call_ * (blocks_ + 1));
    s.offsets = floats(format_.has_zero() ? rows_per_call_ * blocks_ : 0);
    s.sums = floats(block_ * rows_per_call_);
    s.gathered = take(is_gathered_ ? rows_per_call_ * gathered_pitch() : 0);
    s.end = scratch;
    return s;
  }

  static const float* floats(const Frame& frame, const Place& place) {
    return reinterpret_cast<const float*>(place.at(frame));
  }
  const int32_t* groups_of(const Frame& frame) const { return reinterpret_cast<const int32_t*>(groups_.at(frame)); }

  float scale_of(const float* values, int64_t n) const {
    const float most = microkernels_.largest_magnitude(values, n);
    return most != most ? std::numeric_limits<float>::quiet_NaN() : std::max(most / kLargestE4M3, kLeastScale);
  }

  // Calls load(row, column, count, down, values) for the blocks' values of rows [begin, end), and repeats them for each
  // row and run. `is_flat`: a row of blocks follows the other, and `load` takes several.
  template <class Load>
  void find(int64_t begin, int64_t end, float* values, int64_t stride, bool is_flat, Load load) const {
    if (!has_words() && is_flat && format_.block_rows == 1 && blocks_ == format_.scale_columns())
      return load(begin, 0, (end - begin) * blocks_, false, values);
    const int64_t first = begin / format_.block_rows;
    const int64_t count = end == begin ? 0 : (end - 1) / format_.block_rows + 1 - first;
    for (int64_t block = 0; has_words() && block < blocks_; block++) {
      float* own = values + block * stride;
      load(first, column_of(block), count, true, own);
      for (int64_t i = end - begin - 1; format_.block_rows > 1 && i >= 0; i--)
        own[i] = own[(begin + i) / format_.block_rows - first];
    }
    for (int64_t n = begin; !has_words() && n < end; n++) {
      float* own = values + (n - begin) * stride;
      if (n > begin && n % format_.block_rows != 0) {
        std::memcpy(own, own - stride, blocks_ * sizeof(float));
        continue;
      }
      load(n / format_.block_rows, 0, format_.scale_columns(), false, own);
      for (int64_t run = blocks_ - 1; blocks_ > format_.scale_columns() && run >= 0; run--)
        own[run] = own[column_of(run)];
    }
  }
  static bool is_flat(const View& view, int64_t columns) { return view.strides[1] == columns * view.strides[2]; }
  // The column of the scales of a run, or of a group.
  int64_t column_of(int64_t run) const {
    return blocks_ == format_.scale_columns() ? run : run * run_ / format_.block_columns;
  }

  void find_factors(const Frame& frame, int64_t matrix, int64_t begin, int64_t end, const QuantizedArgs& args) const {
    find(begin, end, args.factors, args.factors_stride, is_flat(scale_, blocks_),
         [&](int64_t row, int64_t column, int64_t count, bool down, float* values) {
           const uint8_t* from = scale_.at(frame, matrix, row, column);
           const int64_t stride = scale_.strides[down ? 1 : 2];
           if (format_.has_nested_scales()) return load_nested(frame, from, stride, row, column, count, down, values);
           if (format_.scale_dtype != DType::kE8M0)
             return microkernels_.load_of(format_.scale_dtype)(from, stride / size_bytes(format_.scale_dtype), values,
                                                               static_cast<int>(count));
           for (int64_t i = 0; i < count; i++) values[i] = power_of_two(from[i * stride]);
         });
    if (format_.has_groups)
      std::fill_n(args.factors + blocks_ * args.factors_stride, rows_per_call_,
                  std::numeric_limits<float>::quiet_NaN());
  }
  static float power_of_two(uint8_t e8m0) {
    if (e8m0 == 0xff) return std::numeric_limits<float>::quiet_NaN();
    return std::bit_cast<float>(e8m0 == 0 ? 1u << 22 : static_cast<uint32_t>(e8m0) << 23);
  }
  void load_nested(const Frame& frame, const uint8_t* from, int64_t stride, int64_t row, int64_t column, int64_t count,
                   bool down, float* values) const {
    const float *code = floats(frame, scale_code_), *scales = floats(frame, scale_scale_);
    const float offset = *floats(frame, scale_offset_);
    const int64_t place = row * format_.scale_columns() + column, step = down ? format_.scale_columns() : 1;
    for (int64_t i = 0; i < count;) {
      const int64_t own = (place + i * step) / format_.scale_block;
      const int64_t left = ((own + 1) * format_.scale_block - place - i * step + step - 1) / step;
      for (const int64_t end = std::min(count, i + left); i < end; i++)
        values[i] = code[from[i * stride]] * scales[own] + offset;
    }
  }

  // Finds the offset that zero points add to each run's numbers.
  void find_offsets(const Frame& frame, int64_t matrix, int64_t begin, int64_t end, float* offsets,
                    QuantizedArgs& args) const {
    args.offsets = offsets;
    find(begin, end, offsets, args.factors_stride, is_flat(zero_, blocks_) && format_.zero != ZeroKind::kPackedPoints,
         [&](int64_t row, int64_t column, int64_t count, bool down, float* values) {
           if (format_.zero == ZeroKind::kPackedPoints)
             return load_packed(frame, matrix, row, column, count, down, values);
           const uint8_t* from = zero_.at(frame, matrix, row, column);
           const int64_t stride = zero_.strides[down ? 1 : 2];
           if (format_.zero == ZeroKind::kAdded)
             return microkernels_.load_of(zero_dtype_)(from, stride / size_bytes(zero_dtype_), values,
                                                       static_cast<int>(count));
           for (int64_t i = 0; i < count; i++)
             values[i] = zero_dtype_ == DType::kI8 ? static_cast<int8_t>(from[i * stride]) : from[i * stride];
         });
    if (format_.zero == ZeroKind::kAdded) return;
    const float middle = format_.has_middle() ? WeightFormat::kMiddle : 0;
    const int64_t lines = has_words() ? blocks_ : end - begin, size = has_words() ? end - begin : blocks_;
    for (int64_t line = 0; line < lines; line++)
      for (int64_t i = 0; i < size; i++) {
        float& offset = offsets[line * args.factors_stride + i];
        offset = (middle - offset) * args.factors[line * args.factors_stride + i];
      }
  }
  void load_packed(const Frame& frame, int64_t matrix, int64_t row, int64_t column, int64_t count, bool down,
                   float* values) const {
    const uint8_t* from = zero_.at(frame, matrix, row / kWord, column);
    uint32_t words[kRowsPerCall / kWord + 1];
    if (!down) {
      for (int64_t i = 0; i < count; i++) {
        std::memcpy(words, from + i * zero_.strides[2], sizeof *words);
        values[i] = static_cast<float>(*words >> format_.place(row) * 4 & 15);
      }
      return;
    }
    float points[kWord * std::size(words)];
    const int64_t num_words = (row % kWord + count + kWord - 1) / kWord;
    for (int64_t i = 0; i < num_words; i++) std::memcpy(words + i, from + i * zero_.strides[1], sizeof *words);
    microkernels_.zero_points(words, num_words, format_.has_word_rows(), points);
    std::memcpy(values, points + row % kWord, count * sizeof(float));
  }

  // A cache line apart, or rows of 2^n bytes would all have the same places in the cache.
  int64_t gathered_pitch() const { return round_up(format_.row_bytes(), 64) + 64; }

  // Copies rows whose elements do not lie as the microkernel reads them.
  void gather(const Frame& frame, int64_t matrix, int64_t begin, int64_t end, uint8_t* to, QuantizedArgs& args) const {
    args.weight = to,
    args.weight_stride = has_words() ? rows_per_call_ / format_.word_rows * kElementBytes : gathered_pitch();
    const int64_t bytes = format_.storage == DType::kI32 ? kElementBytes : 1, rows = (end - begin) / format_.word_rows;
    const int64_t elements = format_.has_word_rows() ? format_.columns : format_.row_bytes() / bytes;
    const int64_t per_word = kElementBytes / bytes;  // of those of one row
    for (int64_t i = 0; i < elements; i++) {
      const uint8_t* from = weight_.at(frame, matrix, begin / format_.word_rows, i);
      uint8_t* own = to + (has_words() ? i / per_word * args.weight_stride + i % per_word * bytes : i * bytes);
      const int64_t stride = has_words() ? kElementBytes : args.weight_stride;
      for (int64_t n = 0; n < rows; n++) std::memcpy(own + n * stride, from + n * weight_.strides[1], bytes);
    }
    if (!has_words() || format_.storage != DType::kI8) return;
    for (int64_t i = 0; i < round_up(elements, per_word) / per_word * args.weight_stride; i++) to[i] ^= kToMiddle;
  }

  const Microkernels& microkernels_;
  const WeightFormat format_;
  const DType dtype_;
  DType bias_dtype_ = DType::kF32, zero_dtype_ = DType::kF32;
  WeightCode code_of_weights_;
  QuantizedProduct product_;
  View weight_, scale_, zero_;
  Place bias_, x_scale_, groups_, code_, scale_code_, scale_scale_, scale_offset_;
  bool is_gathered_;
  int64_t blocks_;  // scales of a row
  int64_t depth_, run_, runs_, pitch_;

 protected:
  int64_t num_weight_rows_, rows_per_unit_, rows_per_call_;
  const int64_t block_;  // rows of x that are prepared at a time
};

class QuantizedLinear : public QuantizedProducts {
 public:
  QuantizedLinear(const Node& node, const Microkernels& microkernels)
      : QuantizedProducts(node, microkernels, node.operand("x").tensor.shape[0]),
        x_(node.operand("x").tensor),
        y_(node.operand("y").tensor),
        num_rows_(node.operand("x").tensor.shape[0]) {}

  void prepare(const Frame& frame, uint8_t* scratch) override {
    if (num_rows_ <= block_) prepare_block(frame, 0, scratch);
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    for (int64_t first = 0; first < num_rows_; first += block_) {
      if (num_rows_ > block_) prepare_block(frame, first, scratch);
      multiply(
          frame, 0, 0, std::min(block_, num_rows_ - first), [&](int64_t r) { return y_.at(frame, first + r); }, begin,
          end, scratch);
    }
  }

 private:
  void prepare_block(const Frame& frame, int64_t first, uint8_t* scratch) const {
    for (int64_t r = 0; r < std::min(block_, num_rows_ - first); r++)
      prepare_row(frame, x_.at(frame, first + r), r, scratch);
  }

  const View x_, y_;
  const int64_t num_rows_;
};

// A unit is some rows of all experts' weights, so all units have equal work, whatever was chosen.
class QuantizedExperts : public QuantizedProducts {
 public:
  QuantizedExperts(const Node& node, const Microkernels& microkernels)
      : QuantizedProducts(node, microkernels, node.operand("ids").tensor.numel()), pairs_(node) {
    scratch_bytes_ += pairs_.scratch_bytes();
  }

  void prepare(const Frame& frame, uint8_t* scratch) override {
    int64_t first = 0;
    if (pairs_.size() > block_) return;
    pairs_.for_each(frame, 0, 0, block_, scratch, [&](int64_t, const int32_t* pairs, int64_t count) {
      prepare_pairs(frame, pairs, first, count, scratch);
      first += count;
    });
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    const int64_t column = begin * rows_per_unit_, last = std::min(end * rows_per_unit_, num_weight_rows_);
    int64_t first = 0;
    pairs_.for_each(frame, column, last, block_, scratch, [&](int64_t expert, const int32_t* pairs, int64_t count) {
      const bool is_prepared = pairs_.size() <= block_;
      if (!is_prepared) prepare_pairs(frame, pairs, 0, count, scratch);
      multiply(
          frame, expert, is_prepared ? first : 0, count, [&](int64_t r) { return pairs_.y(frame, pairs[r]); }, begin,
          end, scratch + pairs_.scratch_bytes());
      first += count;
    });
  }

  ExpertStack experts() const override { return pairs_.stack(); }
  void count_pairs(const Frame& frame, int64_t* pairs) const override { pairs_.count(frame, pairs); }

 private:
  void prepare_pairs(const Frame& frame, const int32_t* pairs, int64_t first, int64_t count, uint8_t* scratch) const {
    for (int64_t i = 0; i < count; i++)
      prepare_row(frame, pairs_.x(frame, pairs[i]), first + i, scratch + pairs_.scratch_bytes());
  }

  const ExpertPairs pairs_;
};

template <class K>
bool add(const char* task) {
  return KernelRegistry::global().add(task,
                                      [](const Node& n, const Microkernels& k) { return std::make_unique<K>(n, k); });
}
[[maybe_unused]] const bool kRegistered =
    add<QuantizedLinear>("quantized_linear") && add<QuantizedExperts>("quantized_expert_linear");

}  // namespace
}  // namespace mpk::cpu
