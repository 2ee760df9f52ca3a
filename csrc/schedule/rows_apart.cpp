#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "access.h"
#include "choices.h"
#include "rewrite.h"

namespace mpk {
namespace {

// With more, linears take x in stages, and no rows in front of them.
constexpr int64_t kMostRows = 8;

bool reads(const Node& node, int buffer) {
  return std::ranges::any_of(
      node.operands, [&](const Operand& operand) { return operand.is_read && operand.tensor.buffer == buffer; });
}

// The readers that would take the node in front of them, if there are others as well, for which it is made anyway. None
// if one of these also awaits a taker, as a residual behind a linear does, with which it may be one job.
std::vector<int> find_takers(const TBGraph& graph, const Node& node, const Target& target) {
  const Tensor& made = output(node).tensor;
  if (node.def->role != Role::kRow || graph.buffers()[made.buffer].kind != BufferKind::kWorkspace ||
      made.shape.empty() || made.numel() / std::max<int64_t>(made.shape.back(), 1) > kMostRows)
    return {};
  std::vector<int> takers;
  std::vector<const Node*> others;
  for (const Node& reader : graph.nodes()) {
    if (reader.id == node.id) continue;
    if (writes(reader, made.buffer)) return {};
    if (!reads(reader, made.buffer)) continue;
    if (reader.def->role == Role::kRow && same_rows(made, reader.operands.front().tensor))
      continue;  // it recomputes them anyway
    if (takes_rows(reader, made, WarpLayout{}, target))
      takers.push_back(reader.id);
    else
      others.push_back(&reader);
  }
  const auto awaits_taker = [&](const Node* other) {
    return std::ranges::any_of(takers,
                               [&](int taker) { return reads(*other, output(graph.nodes()[taker]).tensor.buffer); });
  };
  return others.empty() || std::ranges::any_of(others, awaits_taker) ? std::vector<int>{} : takers;
}

}  // namespace

std::optional<TBGraph> with_rows_apart(const TBGraph& graph, const Target& target) {
  if (target.device != "cuda" || !target.fuse) return std::nullopt;
  std::map<int, std::vector<int>> takers;  // of row tasks that are made twice
  for (const Node& node : graph.nodes())
    if (std::vector<int> found = find_takers(graph, node, target); !found.empty()) takers[node.id] = std::move(found);
  if (takers.empty()) return std::nullopt;
  TBGraph made = with_buffers_of(graph);
  std::map<int, std::pair<int, int>> moved;  // of a reader: the buffer that it read, and its own
  for (const Node& node : graph.nodes()) {
    std::vector<Operand> operands = node.operands;
    if (const auto own = moved.find(node.id); own != moved.end())
      for (Operand& operand : operands)
        if (operand.tensor.buffer == own->second.first) operand.tensor.buffer = own->second.second;
    made.add_node(node.def->name, operands, node.attrs, node.program, node.label);
    const auto own_takers = takers.find(node.id);
    if (own_takers == takers.end()) continue;
    const int shared = output(node).tensor.buffer;
    const Buffer& buffer = graph.buffers()[shared];
    const int own = made.add_buffer(buffer.name + ".apart", buffer.kind, buffer.index, buffer.bytes);
    operands.back().tensor.buffer = own;
    for (const int taker : own_takers->second) moved[taker] = {shared, own};
    made.add_node(node.def->name, operands, node.attrs, node.program, label_of_part(node, "apart"));
  }
  return made;
}

}  // namespace mpk
