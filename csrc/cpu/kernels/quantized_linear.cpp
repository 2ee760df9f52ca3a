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

// Rows of weights that a unit has, and rows of x that meet them at a time.
constexpr int64_t kOffsetsStep = 16;  // that numbers of zero points are a multiple of, see QuantizedArgs
constexpr int64_t kWideRows = 8;      // of weights, that are converted to float32 before a product
constexpr int64_t kMinRowsPerUnit = 8, kMaxRowsPerUnit = 64, kWantedUnits = 64;
constexpr int kWord = WeightFormat::kWordRows, kLines = kMaxRowsPerUnit / kWord;  // of words, that a unit has

// Neighbours as float32.
void load_floats(DType dtype, const uint8_t* p, float* values, int64_t count, const Microkernels& microkernels) {
  if (dtype != DType::kE8M0) return microkernels.load_of(dtype)(p, 1, values, static_cast<int>(count));
  for (int64_t i = 0; i < count; i++) {  // exponents; the least is that of a denormal
    const uint32_t bits = p[i] == 0 ? 0x00400000 : p[i] == 0xff ? 0x7fc00000 : static_cast<uint32_t>(p[i]) << 23;
    values[i] = std::bit_cast<float>(bits);
  }
}
float float_of(DType dtype, const uint8_t* p, const Microkernels& microkernels) {
  float value;
  load_floats(dtype, p, &value, 1, microkernels);
  return value;
}

// Rows of x that meet one matrix, and where their results begin.
struct Rows {
  const uint8_t* x[kLinearRowBlock];
  uint8_t* y[kLinearRowBlock];
  int64_t count;
};

// Products of rows of x with a matrix, or with one of several matrices of one format. A unit is some rows of weights.
class QuantizedProducts : public Kernel {
 protected:
  // `most_rows`: of x, that meet a matrix.
  QuantizedProducts(const Node& node, const Microkernels& microkernels, int64_t most_rows)
      : microkernels_(microkernels), format_(checked(node)), dtype_(float_dtype(node, node.operand("x"))) {
    const Operand &x = node.operand("x"), &weight = node.operand("weight"), &scale = node.operand("weight_scale");
    const Operand &y = node.operand("y"), *bias = node.find("bias"), *x_scale = node.find("x_scale");
    const Operand* zero = node.find("zero");
    if (dtype_ == DType::kF64) fail(node, "x is float64, expected float32, float16 or bfloat16");
    float_dtype(node, y, &x);
    if (bias != nullptr) bias_dtype_ = float_dtype(node, *bias);
    for (const Operand* o : {&x, bias, &y})
      if (o != nullptr) require_inner_stride(node, *o);
    is_gathered_ = weight.tensor.strides.back() != 1 || format_.has_word_rows();
    weight_ = stacked(weight.tensor), scale_ = stacked(scale.tensor);
    if (bias != nullptr) bias_ = Place(bias->tensor);
    if (x_scale != nullptr) x_scale_ = Place(x_scale->tensor);
    if (zero != nullptr) zero_ = stacked(zero->tensor), zero_dtype_ = zero->tensor.dtype;
    num_weight_rows_ = format_.rows;
    depth_ = std::max<int64_t>(format_.columns, 1);
    run_ = is_wide() ? depth_ : std::min(format_.run(), depth_), runs_ = (depth_ + run_ - 1) / run_;
    pitch_ = microkernels.quantized_pitch(run_);
    blocks_ = is_wide() ? format_.scale_columns() : runs_;
    offsets_pitch_ = format_.has_zero() ? round_up(blocks_, kOffsetsStep) : 0;
    const auto place = [&](const char* name) {
      const Operand* operand = node.find(name);
      if (operand != nullptr) require_inner_stride(node, *operand);
      return operand == nullptr ? Place() : Place(operand->tensor);
    };
    groups_ = place("column_groups"), code_ = place("codebook");
    scale_code_ = place("scale_code"), scale_scale_ = place("scale_scale"), scale_offset_ = place("scale_offset");
    product_ = product_of(format_, microkernels);
    block_ = std::min<int64_t>(most_rows, kLinearRowBlock);
    rows_per_unit_ = std::clamp(num_weight_rows_ / kWantedUnits / kMinRowsPerUnit * kMinRowsPerUnit, kMinRowsPerUnit,
                                kMaxRowsPerUnit);
    num_units_ = most_rows == 0 ? 0 : (num_weight_rows_ + rows_per_unit_ - 1) / rows_per_unit_;
    unit_cost_ =
        static_cast<double>(rows_per_unit_ * format_.row_bytes()) * std::max(1.0, most_rows / 2.0) / kBytesPerNs;
    scratch_bytes_ = 2 * bytes_of(block_ * runs_ * pitch_) + bytes_of(block_ * runs_) +
                     bytes_of(rows_per_unit_ * blocks_) + 2 * bytes_of(std::max(block_ * rows_per_unit_, depth_)) +
                     bytes_of(block_ * offsets_pitch_) + bytes_of(rows_per_unit_ * offsets_pitch_) +
                     (is_gathered_ ? rows_per_unit_ * gathered_pitch() : 0) + wide_bytes();
  }

  // Computes units [begin, end) of the products of at most block_ rows with matrix number `matrix`.
  void multiply(const Frame& frame, int64_t matrix, const Rows& rows, int64_t begin, int64_t end,
                uint8_t* scratch) const {
    const auto take = [&](int64_t floats) {
      auto* p = reinterpret_cast<float*>(scratch);
      scratch += bytes_of(floats);
      return p;
    };
    float *x = take(block_ * runs_ * pitch_), *pairs = take(block_ * runs_ * pitch_), *x_factors = take(block_ * runs_);
    float* weight_factors = take(rows_per_unit_ * blocks_);
    float *sums = take(std::max(block_ * rows_per_unit_, depth_)),
          *values = take(std::max(block_ * rows_per_unit_, depth_));
    float *x_sums = take(block_ * offsets_pitch_), *offsets = take(rows_per_unit_ * offsets_pitch_);
    auto* wide = reinterpret_cast<float*>(scratch);
    scratch += wide_bytes();
    for (int64_t r = 0; r < rows.count; r++)
      prepare_row(frame, rows.x[r], x + r * runs_ * pitch_, x_factors + r * runs_, x_sums + r * offsets_pitch_, values);
    for (int64_t unit = begin; unit < end; unit++) {
      QuantizedArgs args = {};
      args.x = x, args.x_factors = x_factors, args.num_rows = rows.count, args.k = format_.columns, args.run = run_;
      args.weight = weight_.at(frame, matrix), args.weight_stride = weight_.strides[1];
      args.begin = unit * rows_per_unit_, args.end = std::min(args.begin + rows_per_unit_, num_weight_rows_);
      find_factors(frame, matrix, args.begin, args.end, weight_factors);
      if (format_.has_zero()) {
        find_offsets(frame, matrix, args.begin, args.end, weight_factors, offsets);
        args.offsets = offsets, args.x_sums = x_sums, args.offsets_stride = offsets_pitch_;
      }
      if (is_gathered_) gather(frame, matrix, args, scratch);
      args.weight_factors = weight_factors, args.weight_factors_stride = blocks_, args.sums = sums;
      args.x_is_bf16 = format_.quantizes_x() || dtype_ == DType::kBF16;
      args.scratch = reinterpret_cast<uint8_t*>(pairs);
      is_wide() ? multiply_wide(frame, args, wide) : product_(args);
      store(frame, rows, args.begin, args.end, sums, values);
    }
  }

 private:
  static WeightFormat checked(const Node& node) {
    if (const auto why = WeightFormat::refuses(node)) fail(node, *why);
    return WeightFormat::of(node);
  }
  static int64_t bytes_of(int64_t floats) { return round_up(floats * static_cast<int64_t>(sizeof(float)), 64); }

  // A matrix, as one of a stack.
  static View stacked(Tensor t) {
    if (t.shape.size() == 2) t.shape.insert(t.shape.begin(), 1), t.strides.insert(t.strides.begin(), 0);
    return View(t);
  }

  // A row of x in runs, and its factors.
  void prepare_row(const Frame& frame, const uint8_t* row, float* x, float* factors, float* sums, float* values) const {
    microkernels_.load_of(dtype_)(row, 1, values, static_cast<int>(format_.columns));
    const float given = x_scale_ ? float_of(DType::kF32, x_scale_.at(frame), microkernels_) : 0;
    for (int64_t first = 0; format_.quantizes_x() && first < format_.columns; first += format_.x_columns) {
      const int64_t size = std::min(format_.x_columns, format_.columns - first);
      const float scale = format_.has_static_x ? given : scale_of(values + first, size);
      microkernels_.round_e4m3(values + first, size, scale);
      for (int64_t k = first; k < first + size; k += run_) factors[k / run_] = scale;
    }
    for (int64_t run = 0; run < runs_; run++) {
      const int64_t size = std::clamp<int64_t>(format_.columns - run * run_, 0, run_);
      std::memcpy(x + run * pitch_, values + run * run_, size * sizeof(float));
      std::fill(x + run * pitch_ + size, x + (run + 1) * pitch_, 0.0f);
      if (!format_.quantizes_x()) factors[run] = 1;
    }
    for (int64_t run = 0; run < offsets_pitch_; run++)
      sums[run] = run < runs_ ? factors[run] * sum_of(x + run * pitch_, pitch_) : 0;
  }

  static float sum_of(const float* values, int64_t n) {
    float sums[kOffsetsStep] = {};
    for (int64_t i = 0; i < n; i++) sums[i % kOffsetsStep] += values[i];
    float sum = 0;
    for (float each : sums) sum += each;
    return sum;
  }

  static float scale_of(const float* values, int64_t n) {
    float most = 0;
    bool has_nan = false;
    for (int64_t i = 0; i < n; i++) {
      const float magnitude = std::fabs(values[i]);
      most = magnitude > most ? magnitude : most;
      has_nan |= values[i] != values[i];
    }
    return has_nan ? std::numeric_limits<float>::quiet_NaN() : std::max(most / kLargestE4M3, kLeastScale);
  }

  // The column of the scales of a run, or of a group.
  int64_t column_of(int64_t run) const { return is_wide() ? run : run * run_ / format_.block_columns; }

  float scale_at(const Frame& frame, int64_t matrix, int64_t row, int64_t column) const {
    const uint8_t* scale = scale_.at(frame, matrix, row, column);
    if (!format_.has_nested_scales()) return float_of(format_.scale_dtype, scale, microkernels_);
    const int64_t own = (row * format_.scale_columns() + column) / format_.scale_block;
    return floats(frame, scale_code_)[*scale] * floats(frame, scale_scale_)[own] + *floats(frame, scale_offset_);
  }
  static const float* floats(const Frame& frame, const Place& place) {
    return reinterpret_cast<const float*>(place.at(frame));
  }

  void find_factors(const Frame& frame, int64_t matrix, int64_t begin, int64_t end, float* factors) const {
    const bool are_neighbours = scale_.strides[2] == size_bytes(format_.scale_dtype) &&
                                blocks_ == format_.scale_columns() && !format_.has_nested_scales();
    for (int64_t n = begin; n < end; n++) {
      float* own = factors + (n - begin) * blocks_;
      if (n > begin && n % format_.block_rows != 0) {
        std::memcpy(own, own - blocks_, blocks_ * sizeof(float));
        continue;
      }
      const int64_t row = n / format_.block_rows;
      if (are_neighbours)
        load_floats(format_.scale_dtype, scale_.at(frame, matrix, row), own, blocks_, microkernels_);
      else
        for (int64_t run = 0; run < blocks_; run++) own[run] = scale_at(frame, matrix, row, column_of(run));
    }
  }

  // Finds the offset that zero points add to each run's numbers. `factors`: the scales.
  void find_offsets(const Frame& frame, int64_t matrix, int64_t begin, int64_t end, const float* factors,
                    float* offsets) const {
    const float middle = format_.has_middle() ? WeightFormat::kMiddle : 0;
    for (int64_t n = begin; n < end; n++)
      for (int64_t run = 0; run < offsets_pitch_; run++) {
        float* offset = offsets + (n - begin) * offsets_pitch_ + run;
        const int64_t row = n / format_.block_rows, column = column_of(run);
        if (run >= blocks_)
          *offset = 0;
        else if (format_.zero == ZeroKind::kAdded)
          *offset = float_of(zero_dtype_, zero_.at(frame, matrix, row, column), microkernels_);
        else
          *offset = (middle - point(frame, matrix, row, column)) * factors[(n - begin) * blocks_ + run];
      }
  }
  float point(const Frame& frame, int64_t matrix, int64_t row, int64_t column) const {
    if (format_.zero == ZeroKind::kPoints) {
      const uint8_t byte = *zero_.at(frame, matrix, row, column);
      return zero_dtype_ == DType::kI8 ? static_cast<int8_t>(byte) : byte;
    }
    uint32_t word;
    std::memcpy(&word, zero_.at(frame, matrix, row / 8, column), sizeof word);
    return static_cast<float>(word >> format_.place(row) * 4 & 15);
  }

  // A cache line apart, or rows of 2^n bytes would all have the same places in the cache.
  int64_t gathered_pitch() const { return round_up(format_.row_bytes(), 64) + 64; }

  // Rows whose elements lie apart, one after the other.
  void gather(const Frame& frame, int64_t matrix, QuantizedArgs& args, uint8_t* rows) const {
    if (format_.has_word_rows())
      gather_words(frame, matrix, args, rows);
    else if (format_.storage == DType::kI32)
      gather_elements<4>(frame, matrix, args, rows);
    else
      gather_elements<1>(frame, matrix, args, rows);
    args.weight = rows - args.begin * gathered_pitch(), args.weight_stride = gathered_pitch();
  }

  template <int kBytes>
  void gather_elements(const Frame& frame, int64_t matrix, const QuantizedArgs& args, uint8_t* rows) const {
    const int64_t count = format_.row_bytes() / kBytes;
    for (int64_t i = 0; i < count; i++) {
      const uint8_t* from = weight_.at(frame, matrix, args.begin, i);
      for (int64_t n = 0; n < args.end - args.begin; n++)
        std::memcpy(rows + n * gathered_pitch() + i * kBytes, from + n * weight_.strides[1], kBytes);
    }
  }

  // Words of eight rows become words of eight columns, those of all rows at a time.
  void gather_words(const Frame& frame, int64_t matrix, const QuantizedArgs& args, uint8_t* rows) const {
    const int64_t pitch = gathered_pitch(), lines = (args.end - args.begin) / kWord;
    uint32_t words[kWord][kLines] = {};
    for (int64_t first = 0; first < format_.columns; first += kWord) {
      const int64_t columns = std::min<int64_t>(kWord, format_.columns - first);
      for (int64_t i = 0; i < columns; i++) {
        const uint8_t* from = weight_.at(frame, matrix, args.begin / kWord, first + i);
        for (int64_t line = 0; line < lines; line++)
          std::memcpy(&words[i][line], from + line * weight_.strides[1], sizeof(uint32_t));
      }
      transpose(words);
      for (int64_t r = 0; r < kWord; r++)
        for (int64_t line = 0; line < lines; line++) {
          uint8_t* to = rows + (line * kWord + r) * pitch + first / 2;
          const uint32_t* word = &words[format_.place(r)][line];
          columns == kWord ? std::memcpy(to, word, sizeof *word) : std::memcpy(to, word, columns / 2);
        }
    }
  }

  // Transposes eight times 4 bits of eight words: swaps those of a byte, then bytes, then halves of words.
  static void transpose(uint32_t (&words)[kWord][kLines]) {
    constexpr uint32_t kLow[] = {0x0f0f0f0f, 0x00ff00ff, 0x0000ffff};
    for (int step = 0; step < 3; step++)
      for (int i = 0; i < kWord; i++) {
        if ((i & 1 << step) != 0) continue;
        uint32_t *low = words[i], *high = words[i | 1 << step];
        for (int line = 0; line < kLines; line++) {
          const uint32_t swapped = (low[line] >> (4 << step) ^ high[line]) & kLow[step];
          low[line] ^= swapped << (4 << step), high[line] ^= swapped;
        }
      }
  }

  // Whether rows of weights become float32 before the product.
  bool is_wide() const { return format_.has_groups || format_.has_code; }

  // The bytes that these rows take, and their product's scratch.
  int64_t wide_bytes() const {
    return is_wide() ? bytes_of(kWideRows * depth_) + round_up(microkernels_.linear_scratch_bytes(block_, depth_), 64)
                     : 0;
  }

  void multiply_wide(const Frame& frame, const QuantizedArgs& args, float* wide) const {
    const int64_t row_bytes = depth_ * static_cast<int64_t>(sizeof(float));
    LinearArgs own = {};
    own.x = reinterpret_cast<const uint8_t*>(args.x), own.x_stride = pitch_ * static_cast<int64_t>(sizeof(float));
    own.weight = reinterpret_cast<const uint8_t*>(wide), own.weight_stride = row_bytes;
    own.y_stride = (args.end - args.begin) * static_cast<int64_t>(sizeof(float));
    own.num_rows = args.num_rows, own.k = format_.columns;
    own.scratch = reinterpret_cast<uint8_t*>(wide) + bytes_of(kWideRows * depth_);
    for (int64_t n = args.begin; n < args.end; n += kWideRows) {
      own.end = std::min(kWideRows, args.end - n);
      for (int64_t i = 0; i < own.end; i++) widen(frame, args, n + i, wide + i * depth_);
      own.y = reinterpret_cast<uint8_t*>(args.sums + n - args.begin);
      microkernels_.linear[static_cast<int>(DType::kF32)](own);
    }
  }

  // A row of weights; NaN where a column's group has a number that there is not.
  void widen(const Frame& frame, const QuantizedArgs& args, int64_t n, float* row) const {
    const uint8_t* bytes = args.weight + n * args.weight_stride;
    const float* factors = args.weight_factors + (n - args.begin) * blocks_;
    const float* offsets = args.offsets == nullptr ? nullptr : args.offsets + (n - args.begin) * offsets_pitch_;
    float numbers[WeightFormat::kCodes];
    find_numbers(frame, numbers);
    const int of_first = format_.has_code ? 4 : 0;  // bits below the first of two numbers
    for (int64_t k = 0; k < format_.columns; k++) row[k] = numbers[bytes[k / 2] >> (k % 2 * 4 ^ of_first) & 15];
    const auto scale = [&](int64_t k, int64_t group) {
      row[k] = row[k] * factors[group] + (offsets == nullptr ? 0 : offsets[group]);
    };
    if (!format_.has_groups) {
      for (int64_t group = 0, k = 0; group < blocks_; group++)
        for (const int64_t end = std::min(k + format_.block_columns, format_.columns); k < end; k++) scale(k, group);
      return;
    }
    const auto* groups = reinterpret_cast<const int32_t*>(groups_.at(frame));
    for (int64_t k = 0; k < format_.columns; k++) {
      const uint32_t group = groups[k];
      group < blocks_ ? scale(k, group) : static_cast<void>(row[k] = std::numeric_limits<float>::quiet_NaN());
    }
  }

  // Finds the numbers of all codes of 4 bits.
  void find_numbers(const Frame& frame, float (&numbers)[WeightFormat::kCodes]) const {
    constexpr int kMiddle = WeightFormat::kMiddle;
    for (int code = 0; code < WeightFormat::kCodes; code++)
      numbers[code] = format_.has_code ? floats(frame, code_)[code]
                                       : static_cast<float>((format_.has_middle() ? code : code ^ kMiddle) - kMiddle);
  }

  static Microkernels::Quantized product_of(const WeightFormat& format, const Microkernels& microkernels) {
    if (format.is_e2m1()) return microkernels.quantized_e2m1;
    if (format.bits() == 4) return format.has_middle() ? microkernels.quantized_u4 : microkernels.quantized_i4;
    return format.storage == DType::kI8 ? microkernels.quantized_i8 : microkernels.quantized_e4m3;
  }

  void store(const Frame& frame, const Rows& rows, int64_t begin, int64_t end, float* sums, float* bias) const {
    const auto size = static_cast<int>(end - begin);
    if (bias_) microkernels_.load_of(bias_dtype_)(bias_.at(frame) + begin * size_bytes(bias_dtype_), 1, bias, size);
    for (int64_t r = 0; r < rows.count; r++) {
      float* row = sums + r * size;
      for (int i = 0; bias_ && i < size; i++) row[i] += bias[i];
      microkernels_.store_of(dtype_)(row, rows.y[r] + begin * size_bytes(dtype_), 1, size);
    }
  }

  const Microkernels& microkernels_;
  const WeightFormat format_;
  const DType dtype_;
  DType bias_dtype_ = DType::kF32;
  Microkernels::Quantized product_;
  View weight_, scale_, zero_;
  Place bias_, x_scale_, groups_, code_, scale_code_, scale_scale_, scale_offset_;
  DType zero_dtype_ = DType::kF32;
  bool is_gathered_;
  int64_t offsets_pitch_, blocks_;  // the latter: scales of a row
  int64_t depth_, run_, runs_, pitch_;

 protected:
  int64_t num_weight_rows_, rows_per_unit_, block_;  // the last: rows of x that are multiplied at a time
};

class QuantizedLinear : public QuantizedProducts {
 public:
  QuantizedLinear(const Node& node, const Microkernels& microkernels)
      : QuantizedProducts(node, microkernels, node.operand("x").tensor.shape[0]),
        x_(node.operand("x").tensor),
        y_(node.operand("y").tensor),
        num_rows_(node.operand("x").tensor.shape[0]) {}

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    for (int64_t first = 0; first < num_rows_; first += block_) {
      Rows rows = {};
      rows.count = std::min(block_, num_rows_ - first);
      for (int64_t r = 0; r < rows.count; r++) rows.x[r] = x_.at(frame, first + r), rows.y[r] = y_.at(frame, first + r);
      multiply(frame, 0, rows, begin, end, scratch);
    }
  }

 private:
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

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    const int64_t column = begin * rows_per_unit_, last = std::min(end * rows_per_unit_, num_weight_rows_);
    uint8_t* own = scratch + pairs_.scratch_bytes();
    pairs_.for_each(frame, column, last, block_, scratch, [&](int64_t expert, const int32_t* pairs, int64_t count) {
      Rows rows = {};
      rows.count = count;
      for (int64_t r = 0; r < count; r++) rows.x[r] = pairs_.x(frame, pairs[r]), rows.y[r] = pairs_.y(frame, pairs[r]);
      multiply(frame, expert, rows, begin, end, own);
    });
  }

  ExpertStack experts() const override { return pairs_.stack(); }
  void count_pairs(const Frame& frame, int64_t* pairs) const override { pairs_.count(frame, pairs); }

 private:
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
