#include "proof.h"

namespace mpk {

Order::Order(const Schedule& schedule) {
  const int num_phases = static_cast<int>(schedule.phases.size());
  before_.assign(num_phases, std::vector<bool>(num_phases, false));
  for (int p = 0; p < num_phases; p++)
    for (int w : schedule.phases[p].waits) {
      if (w < 0 || w >= p)
        unsound("phase " + std::to_string(p) + " waits for phase " + std::to_string(w) + ", which does not precede it");
      before_[w][p] = true;
      // Workers run the phases in order, so a completed event also orders what came before its phase.
      for (int q = 0; q < w; q++) before_[q][p] = true;
    }
  for (int p = 1; p < num_phases; p++)  // and an event that has come once need not be awaited again
    for (int q = 0; q < p; q++) before_[q][p] = before_[q][p] || before_[q][p - 1];
}

bool Order::follow_each_other(const Lifetime& a, const Lifetime& b) const {
  const auto& [first, second] = a.first <= b.first ? std::pair(a, b) : std::pair(b, a);
  return first.last < second.first && happens_before(first.last, second.first);
}

std::vector<const Node*> CutProof::rows_behind() const {
  std::vector<const Node*> rows;
  for (int n : job_.body)
    for (const Node* row : mpk::rows_behind(schedule_.graph, job_, schedule_.graph.nodes()[n])) rows.push_back(row);
  return rows;
}

void CutProof::require_scratch(int64_t bytes) const {
  const int64_t found = cut().scratch ? cut().scratch->bytes : 0;
  require(found == bytes,
          "its workers leave " + str(bytes) + " bytes in the workspace, which has " + str(found) + " bytes for them");
}

void CutProof::require_no_rows_behind() const {
  require(rows_behind().empty(), "row tasks end it, but its tiles have no whole rows");
}

void CutProof::require_plain_end() const {
  require_no_rows_behind();
  require(!cut().row_sums, "a norm ends it, but it leaves no sums of rows");
}

void CutProof::require_nothing_else(int64_t scratch_bytes) const {
  require_plain_end();
  require(!cut().shape && cut().fields.empty(), "its cut has what " + cut().kernel + " knows nothing of");
  require_scratch(scratch_bytes);
}

}  // namespace mpk
