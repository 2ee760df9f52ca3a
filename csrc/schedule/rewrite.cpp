#include "rewrite.h"

#include <utility>
#include <vector>

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

std::optional<TBGraph> rewritten(const TBGraph& graph, const Target& target) {
  std::optional<TBGraph> result;
  for (Rewrite rewrite : rewrites())
    if (std::optional<TBGraph> next = rewrite(result ? *result : graph, target)) result = std::move(next);
  return result;
}

}  // namespace mpk
