#include "rewrite.h"

#include <algorithm>
#include <vector>

#include "../arch/arch.h"
#include "kernel.h"

namespace mpk {
namespace {

std::vector<Rewrite>& rewrites() {
  static std::vector<Rewrite> all;
  return all;
}

}  // namespace

bool add_rewrite(Rewrite rewrite) {
  rewrites().push_back(rewrite);
  return true;
}

TBGraph rewritten(const TBGraph& graph, const Target& target) {
  TBGraph current = graph;
  for (Rewrite rewrite : rewrites())
    if (std::optional<TBGraph> next = rewrite(current, target)) current = std::move(*next);
  return current;
}

bool multiplies_together(const TBGraph& graph, const Target& target) {
  if (target.device != "cuda" || !arch_of(target.arch).has_warpgroup_products) return false;
  return std::ranges::any_of(graph.nodes(), [](const Node& node) {
    return std::ranges::any_of(kernels_of(*node.def), [&](const Kernel* kernel) {
      const std::optional<Demands> demands = kernel->demands(node);
      return demands && demands->all_read_entries;
    });
  });
}

}  // namespace mpk
