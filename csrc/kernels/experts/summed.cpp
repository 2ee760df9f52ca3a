// Products of experts, weighted and summed row by row, and the nodes behind them. In `summed` every worker has the same
// rows of all chosen experts' weights, so it computes whole sums. It reads all of x, so this is for few rows. Tiles of
// weights that are stored as [E, K, N] are too wide for that. In `summed_columns` workers have those of `boxes`, and
// pass the products on by tagged words to those who sum them.
#include "../../arch/arch.h"
#include "../../codegen/text.h"
#include "../../schedule/access.h"
#include "../../schedule/staging.h"
#include "../reduce.h"
#include "experts.h"

namespace mpk {
namespace {

using namespace codegen;

constexpr int64_t kMaxPairs = 512;   // each worker reads all of their x, or the workspace has their products
constexpr int64_t kMaxChoices = 16;  // a thread has the products of all of them

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

class SumsOfChoices : public BoxedExperts {
 protected:
  SumsOfChoices(const char* task, const char* way, const char* compute, const char* load, bool is_transposed)
      : BoxedExperts(task, way, compute, load), is_transposed_(is_transposed) {}

  void prove(const CutProof& proof) const override {
    BoxedExperts::prove(proof);
    proof.require(proof.job().body == find_run(proof.schedule().graph, proof.first().id),
                  "what follows is not the sum over choices of each row's products");
  }

  void add_results(const JobPlace& place, JobCode& code, Refs& refs, const Experts& own) const override {
    const ChoiceSum sum = *sum_of(place.context.graph(), place.node());
    code.body += emit_short_reduction(place.context, refs, sum.reduction, place.job.unstored, {{sum.load, "product"}},
                                      ", " + std::string(cuda_type(own.y.dtype)) + " product");
  }

 private:
  std::vector<int> find_run(const TBGraph& graph, int first) const override {
    const Node& node = graph.nodes()[first];
    if (!begins(node) || Experts(node).is_transposed != is_transposed_) return {};
    const std::optional<ChoiceSum> found = sum_of(graph, node);
    return found ? nodes_of(node, *found) : std::vector<int>{};
  }

  bool takes_companions() const override { return true; }

  const bool is_transposed_;
};

class SummedExperts : public SumsOfChoices {
 public:
  explicit SummedExperts(const char* task)
      : SumsOfChoices(task, "summed", "experts::compute_summed", "experts::load_summed", false) {}

 private:
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
};

class SummedColumns : public SumsOfChoices {
 public:
  SummedColumns()
      : SumsOfChoices(kExpertLinear, "summed_columns", "experts::compute_summed_columns", "experts::load_boxes", true) {
  }

 private:
  // Two products in each word.
  int64_t scratch_bytes(const Experts& own) const override {
    return own.pairs * own.rows / 2 * static_cast<int64_t>(sizeof(uint64_t));
  }

  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    if (std::optional<std::string> why = BoxedExperts::refuses(schedule, job)) return why;
    const Experts own(schedule.graph.nodes()[job.body.front()]);
    if (own.choices > kMaxChoices) return str(own.choices) + " choices, expected at most " + str(kMaxChoices);
    if (own.pairs > kMaxPairs) return str(own.pairs) + " pairs, expected at most " + str(kMaxPairs);
    return std::nullopt;
  }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    std::vector<Cut> cuts = BoxedExperts::candidates(schedule, job);
    const Costs& costs = arch_of(schedule.target.arch).costs;
    for (Cut& cut : cuts) cut.cost_ns += costs.hop_cycles / costs.cycles_per_ns;
    return cuts;
  }

  void prove(const CutProof& proof) const override {
    SumsOfChoices::prove(proof);
    proof.require(Experts(proof.first()).choices <= kMaxChoices, "a thread has not the registers for all choices");
  }

  void add_results(const JobPlace& place, JobCode& code, Refs& refs, const Experts& own) const override {
    SumsOfChoices::add_results(place, code, refs, own);
    code.headers = {"torch_mpk/device/tasks/expert_column_sums.cuh"};
    code.body += returning("uint8_t*", "words(const Job& job)", refs.workspace(place.job.cut.scratch->offset));
  }
};

const SummedExperts kSummed{kExpertLinear}, kQuantizedSummed{kQuantizedExpertLinear};
const SummedColumns kSummedColumns{};
[[maybe_unused]] const bool kRegistered =
    add_run_kernel(kSummed) && add_run_kernel(kQuantizedSummed) && add_run_kernel(kSummedColumns);

}  // namespace
}  // namespace mpk
