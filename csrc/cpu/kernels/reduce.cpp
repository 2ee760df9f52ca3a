#include <algorithm>
#include <limits>

#include "program.h"

namespace mpk::cpu {
namespace {

constexpr int64_t kChunk = 32 * kBlock;  // points of one unit: a constant, so that the order of a sum is one

enum class Reducer { kSum, kMean, kAmax, kAmin, kProd, kArgmax, kArgmin, kAny, kAll };

Reducer parse_reducer(const Node& node) {
  constexpr const char* kNames[] = {"sum",    "mean",   "amax", "amin", "prod",
                                    "argmax", "argmin", "any",  "all"};  // in the order of Reducer
  const std::string name = node.string_attr("op");
  std::string known;
  for (size_t i = 0; i < std::size(kNames); i++) {
    if (name == kNames[i]) return static_cast<Reducer>(i);
    known += (i ? ", " : "") + std::string(kNames[i]);
  }
  fail(node, "op is '" + name + "', expected one of " + known);
}

Reduction reduction_of(Reducer reducer) {
  switch (reducer) {
    case Reducer::kSum:
    case Reducer::kMean:
      return Reduction::kSum;
    case Reducer::kProd:
      return Reduction::kProd;
    case Reducer::kAmin:
    case Reducer::kArgmin:
    case Reducer::kAll:
      return Reduction::kMin;
    default:
      return Reduction::kMax;
  }
}

template <class V>
V identity(Reduction reduction) {
  using Limits = std::numeric_limits<V>;
  switch (reduction) {
    case Reduction::kSum:
      return V(0);
    case Reduction::kProd:
      return V(1);
    case Reduction::kMax:
      return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    default:
      return Limits::has_infinity ? Limits::infinity() : Limits::max();
  }
}

template <class V>
V combine(Reduction reduction, V a, V b) {
  switch (reduction) {
    case Reduction::kSum:
      return V(Wrapping<V>(a) + Wrapping<V>(b));
    case Reduction::kProd:
      return V(Wrapping<V>(a) * Wrapping<V>(b));
    case Reduction::kMax:
      return (b != b || b > a) ? b : a;
    default:
      return (b != b || b < a) ? b : a;
  }
}

// One unit is a chunk of one row; the last chunk of a row to finish combines them. V is the class's type.
template <class V, ValueClass kClass>
class Reduce : public Kernel {
 public:
  Reduce(const Node& node, const Microkernels& microkernels, ProgramRunner runner)
      : microkernels_(microkernels),
        runner_(std::move(runner)),
        reducer_(parse_reducer(node)),
        reduction_(reduction_of(reducer_)),
        row_(node.program->domain.back()),
        num_rows_(row_ == 0 ? out_size(node) : node.program->num_points() / row_),
        num_chunks_(std::max<int64_t>(1, (row_ + kChunk - 1) / kChunk)),
        partials_(num_rows_ * num_chunks_),
        arrivals_(num_rows_, num_chunks_) {
    const Operand& out = node.operand("out0");
    out_ = Place(out.tensor);
    out_dtype_ = out.tensor.dtype;
    out_shape_ = out.tensor.shape;
    out_strides_ = out.tensor.strides;
    const bool arg = reducer_ == Reducer::kArgmax || reducer_ == Reducer::kArgmin;
    if (row_ == 0 && (arg || reducer_ == Reducer::kAmax || reducer_ == Reducer::kAmin))
      fail(node, "reduces a dimension of size 0, which has no extremum");
    num_units_ = num_rows_ * num_chunks_;
    unit_cost_ = runner_.point_cost() * static_cast<double>(std::min(kChunk, row_));
    scratch_bytes_ = runner_.scratch_bytes();
  }

  void run(const Frame& frame, int64_t begin, int64_t end, uint8_t* scratch) override {
    runner_.start(frame, scratch);
    for (int64_t unit = begin; unit < end; unit++) {
      const int64_t row = unit / num_chunks_, first = unit % num_chunks_ * kChunk;
      partials_[unit] = reduce_chunk(frame, row, first, std::min(row_, first + kChunk), scratch);
      if (arrivals_.is_last(row)) finish(frame, row);
    }
  }

  void reset() override { arrivals_.reset(); }

 private:
  struct Partial {
    V value;
    int64_t index;
  };

  static int64_t out_size(const Node& node) {
    int64_t n = 1;
    for (size_t d = 0; d + 1 < node.program->domain.size(); d++) n *= node.program->domain[d];
    return n;
  }

  // Whether a beats b in an argmax or argmin: a NaN beats every number.
  bool beats(V a, V b) const {
    if (b != b) return false;
    return a != a || (reduction_ == Reduction::kMax ? a > b : a < b);
  }

  V reduce_lanes(V* lanes) const {
    for (int width = kReduceLanes / 2; width > 0; width /= 2)
      for (int i = 0; i < width; i++) lanes[i] = combine(reduction_, lanes[i], lanes[i + width]);
    return lanes[0];
  }

  Partial reduce_chunk(const Frame& frame, int64_t row, int64_t begin, int64_t end, uint8_t* scratch) {
    const auto accumulate = microkernels_.reduce[static_cast<int>(reduction_)][kClass];
    const bool arg = reducer_ == Reducer::kArgmax || reducer_ == Reducer::kArgmin;
    alignas(64) V lanes[kReduceLanes];
    std::fill_n(lanes, kReduceLanes, identity<V>(reduction_));
    Partial best{identity<V>(reduction_), -1};
    for (int64_t first = begin; first < end; first += kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - first));
      runner_.run_block(frame, row * row_ + first, count, scratch);
      const V* values = static_cast<const V*>(runner_.result(scratch));
      accumulate(lanes, values, count);
      if (!arg) continue;
      V copy[kReduceLanes];
      std::copy_n(lanes, kReduceLanes, copy);
      const V block_best = reduce_lanes(copy);
      std::fill_n(lanes, kReduceLanes, identity<V>(reduction_));
      if (best.index < 0 || beats(block_best, best.value)) {
        for (int i = 0; i < count; i++)
          if (values[i] == block_best || (values[i] != values[i] && block_best != block_best)) {
            best = {values[i], first + i};
            break;
          }
      }
    }
    return arg ? best : Partial{reduce_lanes(lanes), 0};
  }

  void finish(const Frame& frame, int64_t row) {
    Partial total = partials_[row * num_chunks_];
    for (int64_t c = 1; c < num_chunks_; c++) {
      const Partial& next = partials_[row * num_chunks_ + c];
      if (reducer_ == Reducer::kArgmax || reducer_ == Reducer::kArgmin) {
        if (beats(next.value, total.value)) total = next;
      } else {
        total.value = combine(reduction_, total.value, next.value);
      }
    }
    int64_t element = 0, rest = row;
    for (size_t d = out_shape_.size(); d-- > 0;) {
      element += rest % out_shape_[d] * out_strides_[d];
      rest /= out_shape_[d];
    }
    uint8_t* to = out_.at(frame) + element * size_bytes(out_dtype_);
    const int dtype = static_cast<int>(out_dtype_);
    int64_t cast[2];  // room for a value of any class
    if (reducer_ == Reducer::kArgmax || reducer_ == Reducer::kArgmin) {
      microkernels_.cast[kInt][dtype](&total.index, cast, 1);
    } else {
      if (reducer_ == Reducer::kMean) total.value /= static_cast<V>(row_);
      microkernels_.cast[kClass][dtype](&total.value, cast, 1);
    }
    microkernels_.store[dtype](cast, to, 1, 1);
  }

  const Microkernels& microkernels_;
  ProgramRunner runner_;
  Reducer reducer_;
  Reduction reduction_;
  int64_t row_, num_rows_, num_chunks_;
  std::vector<Partial> partials_;
  Arrivals arrivals_;
  Place out_;
  DType out_dtype_;
  std::vector<int64_t> out_shape_, out_strides_;
};

std::unique_ptr<Kernel> make(const Node& node, const Microkernels& microkernels) {
  if (node.program->domain.empty() || node.program->instrs.empty())
    fail(node, "its program has no dimension or no value to reduce");
  const Reducer reducer = parse_reducer(node);
  ProgramRunner runner(node, microkernels, true);
  if (reducer == Reducer::kAny || reducer == Reducer::kAll) {
    runner.require_result(DType::kBool);
  } else if (runner.result_class() == kTruth) {
    runner.require_result(DType::kI64);
  }
  switch (runner.result_class()) {
    case kFloat:
      return std::make_unique<Reduce<float, kFloat>>(node, microkernels, std::move(runner));
    case kDouble:
      return std::make_unique<Reduce<double, kDouble>>(node, microkernels, std::move(runner));
    case kInt:
      return std::make_unique<Reduce<int64_t, kInt>>(node, microkernels, std::move(runner));
    default:
      return std::make_unique<Reduce<uint8_t, kTruth>>(node, microkernels, std::move(runner));
  }
}

[[maybe_unused]] const bool kRegistered = KernelRegistry::global().add("reduce", make);

}  // namespace
}  // namespace mpk::cpu
