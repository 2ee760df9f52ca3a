// Products of experts and the activation behind them, such as silu(gate) * up: it combines the gate with the other half
// of an expert's rows. A tile has eight rows of each half, so a lane has both values of a point.
#include "../../codegen/program.h"
#include "../../codegen/text.h"
#include "../../schedule/access.h"
#include "experts.h"

namespace mpk {
namespace {

using namespace codegen;

constexpr int64_t kHalfRows = kExpertTileRows / 2;

// A load of products: its instruction, and its first row of weights.
struct Half {
  size_t instr;
  int64_t first;
};

// The activation behind a node. It makes `columns` results of each pair from both halves.
struct Activation {
  const Node& node;
  std::vector<Half> halves = {};
  int64_t columns = 0;
};

// The offset in elements at which a load begins; -1: it is computed.
int64_t start_of(const Program& program, const Instr& load) {
  if (load.args.empty()) return 0;
  const Instr& start = program.instrs[load.args.front()];
  return load.args.size() == 1 && start.op == Op::kConst ? start.imm_int : -1;
}

// The first weight row whose results a load takes for a pair, one for each point; -1: the load is another.
int64_t first_row(const Experts& own, const Node& reader, const Instr& load) {
  const std::vector<int64_t>& domain = reader.program->domain;
  const Tensor& t = reader.operands[load.operand].tensor;
  const int64_t start = start_of(*reader.program, load);
  if (start < 0 || !own.y.is_contiguous() || t.dtype != own.y.dtype || load.strides.back() != 1) return -1;
  const int64_t first = t.offset + start - own.y.offset;
  const bool is_inside = first >= 0 && first % kHalfRows == 0 && first + domain.back() <= own.rows;
  return is_inside && are_stacked(domain, load.strides, domain.size() - 1, own.pairs, own.rows) ? first : -1;
}

std::optional<Activation> activation_of(const TBGraph& graph, const Node& node) {
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
    const int64_t first = first_row(own, *reader, instr);
    if (first < 0) return std::nullopt;
    found.halves.push_back({i, first});
  }
  if (found.halves.size() != 2 || found.halves[0].first == found.halves[1].first) return std::nullopt;
  return found;
}

class GatedExperts : public BoxedExperts {
 public:
  explicit GatedExperts(const char* task)
      : BoxedExperts(task, "gated", "experts::compute_boxes", "experts::load_halves", kHalfRows) {}

 private:
  std::vector<int> find_run(const TBGraph& graph, int first) const override {
    const Node& node = graph.nodes()[first];
    if (!begins(node)) return {};
    const std::optional<Activation> found = activation_of(graph, node);
    return found ? std::vector<int>{first, found->node.id} : std::vector<int>{};
  }

  bool takes_companions() const override { return true; }

  void prove(const CutProof& proof) const override {
    BoxedExperts::prove(proof);
    const std::optional<Activation> found = activation_of(proof.schedule().graph, proof.first());
    proof.require(proof.job().body.size() == 2 && found && found->node.id == proof.job().body.back(),
                  "what follows takes other results than two of each pair and point");
  }

  void add_results(const JobPlace& place, JobCode& code, Refs& refs, const Experts&) const override {
    const Activation found = *activation_of(place.context.graph(), place.node());
    const std::map<size_t, std::string> given = {{found.halves[0].instr, "first"}, {found.halves[1].instr, "second"}};
    const ProgramCode program = emit_program(place.context, refs, found.node,
                                             {.point = "point", .given = &given, .unstored = &place.job.unstored});
    code.body += constant("kColumns", found.columns) + constant("kFirstHalf", found.halves[0].first) +
                 constant("kSecondHalf", found.halves[1].first) +
                 function("void", "combine(const Job& job, int32_t point, T first, T second)", program.body);
  }
};

const GatedExperts kGatedExperts{kExpertLinear}, kQuantizedGatedExperts{kQuantizedExpertLinear};
[[maybe_unused]] const bool kRegistered = add_run_kernel(kGatedExperts) && add_run_kernel(kQuantizedGatedExperts);

}  // namespace
}  // namespace mpk
