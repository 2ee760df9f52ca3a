// A kernel of `linear` outside the core: a lane of a group takes columns of x, and a warp several rows of weights at
// once. It is compiled against the core's headers by test_a_kernel_elsewhere.py.
#include <array>

#include "codegen/text.h"
#include "kernels/fields.h"
#include "kernels/linear/linears.h"
#include "kernels/linear/writer.h"
#include "schedule/kernel.h"

namespace mpk {
namespace {

struct ElsewhereFields {
  int64_t rows_at_once = 2;  // of weights, that a warp takes
  int64_t turns = 1;
  static constexpr std::array<FieldOf<ElsewhereFields>, 2> kAll = {{
      {"rows_at_once", "kRowsAtOnce", &ElsewhereFields::rows_at_once},
      {"turns", "kTurns", &ElsewhereFields::turns},
  }};
};

class Writer : public codegen::LinearWriter {
 public:
  explicit Writer(const codegen::JobPlace& place)
      : LinearWriter(place, {"LinearElsewhere",
                             "linear_elsewhere::compute",
                             "",
                             "linear::Shape<V>::kStagedBytes",
                             "",
                             {ELSEWHERE_HEADER}}) {}

 private:
  void add_weight(const Node& node, const Tensor& weight) override {
    weights_.push_back("job.pointer<const T>(" + codegen::str(refs_.add(node, weight)) + ")");
    pitches_.push_back(codegen::str(weight.strides[0]));
  }
  std::string shape_constants() const override {
    return codegen::constant("kTileRows", 1) + codegen::constant("kChunkParts", 1) +
           constants(fields_of<ElsewhereFields>(job_.cut));
  }
  std::string write_places() override {
    return codegen::returning("const T*", "weight(const Job& job, int i)", codegen::choose("i", weights_)) +
           codegen::returning("int64_t", "pitch(int i)", codegen::choose("i", pitches_));
  }

  std::vector<std::string> weights_, pitches_;
};

class Elsewhere : public Kernel {
 public:
  Elsewhere() : Kernel("linear.elsewhere") {}

 private:
  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    if (Linears(schedule, job).batch != 1) return "it takes one row of x";
    return std::nullopt;
  }

  // Some candidates, of which the scheduler takes the cheapest.
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    const Linears linears(schedule, job);
    std::vector<Cut> cuts;
    for (int64_t rows : {1, 2, 4}) {
      Cut cut = job.cut;
      cut.input = Input::kWhole;
      cut.staged_bytes = linears.warps * 16 * linears.parts + round_up(linears.size * linears.element, 16);
      cut.num_tiles = linears.tiles(1);
      cut.fields = list_fields(ElsewhereFields{.rows_at_once = rows});
      cut.cost_ns = rows == 2 ? 1 : 2;
      cuts.push_back(cut);
    }
    return cuts;
  }

  void prove(const CutProof& proof) const override {
    const auto own = fields_of<ElsewhereFields>(proof.cut());
    proof.require(own.rows_at_once == 1 || own.rows_at_once == 2 || own.rows_at_once == 4,
                  CutProof::str(own.rows_at_once) + " rows at once are not 1, 2 or 4");
    proof.require(!proof.cut().shape && proof.cut().is_staged(), "it stages x, and streams nothing");
    proof.require_plain_end();
  }

  bool takes_companions() const override { return true; }
  codegen::JobCode emit(const codegen::JobPlace& place) const override { return Writer(place).run(); }
};

const Elsewhere kElsewhere{};
[[maybe_unused]] const bool kRegistered = add_kernel("linear", kElsewhere);

}  // namespace
}  // namespace mpk
