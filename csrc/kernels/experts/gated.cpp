// Products of experts and the activation behind them, such as silu(gate) * up: it combines two results of each pair.
// In `gated` they are as far apart as the halves of an expert's rows are, and a tile has eight rows of each half, so a
// lane has both values of a point. In `interleaved` they are neighbours, so any tile has both, and lanes exchange them.
#include "../../codegen/program.h"
#include "../../codegen/text.h"
#include "../../schedule/access.h"
#include "experts.h"

namespace mpk {
namespace {

using namespace codegen;

constexpr int64_t kHalfRows = kExpertTileRows / 2;

// How far apart the products of one point are.
enum class Form : uint8_t { kHalves, kInterleaved };

// A load of products: its instruction, and its first row of weights.
struct Factor {
  size_t instr;
  int64_t first;
};

// The activation behind a node. It makes `columns` results of each pair, each from two of its products.
struct Activation {
  const Node& node;
  std::vector<Factor> factors = {};
  int64_t columns = 0;
};

// The offset in elements at which a load begins; -1: it is computed.
int64_t start_of(const Program& program, const Instr& load) {
  if (load.args.empty()) return 0;
  const Instr& start = program.instrs[load.args.front()];
  return load.args.size() == 1 && start.op == Op::kConst ? start.imm_int : -1;
}

// The first weight row whose results a load takes for a pair, one for each point; -1: the load is another.
int64_t first_row(const Experts& own, const Node& reader, const Instr& load, Form form) {
  const std::vector<int64_t>& domain = reader.program->domain;
  const Tensor& t = reader.operands[load.operand].tensor;
  const int64_t start = start_of(*reader.program, load), step = form == Form::kHalves ? 1 : 2;
  if (start < 0 || !own.y.is_contiguous() || t.dtype != own.y.dtype || load.strides.back() != step) return -1;
  const int64_t first = t.offset + start - own.y.offset;
  const bool is_inside = first >= 0 && first + (domain.back() - 1) * step < own.rows &&
                         (form == Form::kInterleaved || first % kHalfRows == 0);
  return is_inside && are_stacked(domain, load.strides, domain.size() - 1, own.pairs, own.rows) ? first : -1;
}

std::optional<Activation> activation_of(const TBGraph& graph, const Node& node, Form form) {
  const Experts own(node);
  const Node* reader = only_reader(graph, node);
  if (reader == nullptr || reader->def->role != Role::kPointwise) return std::nullopt;
  const std::vector<int64_t>& domain = reader->program->domain;
  if (domain.empty() || domain.back() * 2 != own.rows || domain.back() % kHalfRows != 0) return std::nullopt;
  Activation found{*reader};
  found.columns = domain.back();
  for (size_t i = 0; i < reader->program->instrs.size(); i++) {
    const Instr& instr = reader->program->instrs[i];
    if (instr.op != Op::kLoad || reader->operands[instr.operand].tensor.buffer != own.y.buffer) continue;
    const int64_t first = first_row(own, *reader, instr, form);
    if (first < 0) return std::nullopt;
    found.factors.push_back({i, first});
  }
  if (found.factors.size() != 2 || found.factors[0].first == found.factors[1].first) return std::nullopt;
  return found;
}

class GatedExperts : public BoxedExperts {
 public:
  GatedExperts(const char* task, Form form)
      : BoxedExperts(task, form == Form::kHalves ? "gated" : "interleaved", "experts::compute_boxes",
                     form == Form::kHalves ? "experts::load_halves" : "experts::load_boxes",
                     form == Form::kHalves ? kHalfRows : kExpertTileRows),
        form_(form) {}

 private:
  std::vector<int> find_run(const TBGraph& graph, int first) const override {
    const Node& node = graph.nodes()[first];
    if (!begins(node) || (form_ == Form::kHalves && Experts(node).is_transposed)) return {};
    const std::optional<Activation> found = activation_of(graph, node, form_);
    return found ? std::vector<int>{first, found->node.id} : std::vector<int>{};
  }

  bool takes_companions() const override { return true; }

  void prove(const CutProof& proof) const override {
    BoxedExperts::prove(proof);
    proof.require(proof.job().body == find_run(proof.schedule().graph, proof.first().id),
                  "what follows takes other results than two of each pair and point");
  }

  void add_results(const JobPlace& place, JobCode& code, Refs& refs, const Experts&) const override {
    const Activation found = *activation_of(place.context.graph(), place.node(), form_);
    const std::vector<Factor>& factors = found.factors;
    const bool is_turned = form_ == Form::kInterleaved && factors[0].first > factors[1].first;
    const std::map<size_t, std::string> given = {{factors[is_turned].instr, "first"},
                                                 {factors[!is_turned].instr, "second"}};
    const ProgramCode program = emit_program(place.context, refs, found.node,
                                             {.point = "point", .given = &given, .unstored = &place.job.unstored});
    code.body +=
        constant("kColumns", found.columns) +
        (form_ == Form::kHalves ? constant("kFirstHalf", factors[0].first) + constant("kSecondHalf", factors[1].first)
                                : flag("kInterleaved", true)) +
        function("void", "combine(const Job& job, int32_t point, T first, T second)", program.body);
  }

  const Form form_;
};

const GatedExperts kGated{kExpertLinear, Form::kHalves}, kInterleaved{kExpertLinear, Form::kInterleaved};
const GatedExperts kQuantizedGated{kQuantizedExpertLinear, Form::kHalves},
    kQuantizedInterleaved{kQuantizedExpertLinear, Form::kInterleaved};
[[maybe_unused]] const bool kRegistered = add_run_kernel(kGated) && add_run_kernel(kInterleaved) &&
                                          add_run_kernel(kQuantizedGated) && add_run_kernel(kQuantizedInterleaved);

}  // namespace
}  // namespace mpk
