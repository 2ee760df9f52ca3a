// Products of experts, weighted and summed row by row, and the nodes behind them. Every worker has the same rows of all
// chosen experts' weights, so it computes whole sums. It reads all of x, so this is for few rows.
#include "../../arch/arch.h"
#include "../../codegen/text.h"
#include "../../schedule/access.h"
#include "../../schedule/staging.h"
#include "../reduce.h"
#include "experts.h"

namespace mpk {
namespace {

using namespace codegen;

constexpr int64_t kMaxPairs = 512;  // each worker reads all of their x

// The sum over a node's choices, and its load of products.
struct ChoiceSum {
  ShortReduction reduction;
  size_t load;
};

// Whether a load takes, at choice `inner` of result `outer`, the product of that row, choice and weight row.
bool loads_products(const Experts& own, const Node& sum, const Instr& load) {
  const std::vector<int64_t>& domain = sum.program->domain;
  const Tensor& t = sum.operands[load.operand].tensor;
  const size_t last = domain.size() - 1;
  if (!load.args.empty() || t.offset != own.y.offset || t.dtype != own.y.dtype || !own.y.is_contiguous() ||
      domain.size() < 2 || domain[last] != own.choices || domain[last - 1] != own.rows ||
      (own.choices > 1 && load.strides[last] != own.rows) || load.strides[last - 1] != 1)
    return false;
  return are_stacked(domain, load.strides, last - 1, own.pairs / own.choices, own.choices * own.rows);
}

std::optional<ChoiceSum> sum_of(const TBGraph& graph, const Node& node) {
  const Experts own(node);
  const Node* reader = only_reader(graph, node);
  if (reader == nullptr) return std::nullopt;
  const std::optional<ShortReduction> reduction = short_reduction(graph, *reader);
  if (!reduction || !output(*reader).tensor.is_contiguous()) return std::nullopt;
  std::optional<ChoiceSum> found;
  for (size_t i = 0; i < reader->program->instrs.size(); i++) {
    const Instr& instr = reader->program->instrs[i];
    if (instr.op != Op::kLoad || reader->operands[instr.operand].tensor.buffer != own.y.buffer) continue;
    if (found || !loads_products(own, *reader, instr)) return std::nullopt;
    found.emplace(ChoiceSum{*reduction, i});
  }
  return found;
}

std::vector<int> nodes_of(const Node& node, const ChoiceSum& sum) {
  std::vector<int> nodes = {node.id, sum.reduction.reduction.id};
  if (sum.reduction.behind != nullptr) nodes.push_back(sum.reduction.behind->id);
  return nodes;
}

class SummedExperts : public BoxedExperts {
 public:
  explicit SummedExperts(const char* task)
      : BoxedExperts(task, "summed", "experts::compute_summed", "experts::load_summed") {}

 private:
  std::vector<int> find_run(const TBGraph& graph, int first) const override {
    const Node& node = graph.nodes()[first];
    if (!begins(node) || Experts(node).is_transposed) return {};
    const std::optional<ChoiceSum> found = sum_of(graph, node);
    return found ? nodes_of(node, *found) : std::vector<int>{};
  }

  bool takes_companions() const override { return true; }

  // Adds the products of a tile with all pairs.
  int64_t staged_bytes(const Schedule& schedule, const Experts& own) const override {
    return own.list_bytes(schedule) + own.pairs * kExpertTileRows * size_bytes(own.y.dtype);
  }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    std::vector<Cut> cuts = BoxedExperts::candidates(schedule, job);
    const Experts own(schedule.graph.nodes()[job.body.front()]);
    if (own.pairs > kMaxPairs) return {};
    const Costs& costs = arch_of(schedule.target.arch).costs;
    const int64_t tiles = own.tiles_of_expert(), workers = schedule.target.num_workers;
    for (Cut& cut : cuts) {
      const auto turns = static_cast<double>(divide_up(tiles, workers));
      const auto bytes = static_cast<double>(own.pairs * own.size * size_bytes(own.x.dtype));  // of x, for each tile
      cut.num_tiles = tiles;
      cut.cost_ns *= turns * static_cast<double>(workers) / static_cast<double>(tiles);
      cut.cost_ns += turns * bytes / costs.own_bytes_per_cycle / costs.cycles_per_ns;
    }
    return cuts;
  }

  void prove(const CutProof& proof) const override {
    BoxedExperts::prove(proof);
    const std::optional<ChoiceSum> found = sum_of(proof.schedule().graph, proof.first());
    proof.require(found && proof.job().body == nodes_of(proof.first(), *found),
                  "what follows is not the sum over choices of each row's products");
  }

  void add_results(const JobPlace& place, JobCode& code, Refs& refs, const Experts& own) const override {
    const ChoiceSum sum = *sum_of(place.context.graph(), place.node());
    code.body += emit_short_reduction(place.context, refs, sum.reduction, place.job.unstored, {{sum.load, "product"}},
                                      ", " + std::string(cuda_type(own.y.dtype)) + " product");
  }
};

const SummedExperts kSummedExperts{kExpertLinear}, kQuantizedSummedExperts{kQuantizedExpertLinear};
[[maybe_unused]] const bool kRegistered = add_run_kernel(kSummedExperts) && add_run_kernel(kQuantizedSummedExperts);

}  // namespace
}  // namespace mpk
