#include "rewrite.h"

#include <utility>

namespace mpk {
namespace {

std::vector<Rewrite>& rewrites() {
  static std::vector<Rewrite> all;
  return all;
}

}  // namespace

TBGraph with_buffers_of(const TBGraph& graph) {
  TBGraph made;
  for (const Buffer& b : graph.buffers()) made.add_buffer(b.name, b.kind, b.index, b.bytes);
  return made;
}

void copy_node(TBGraph& made, const Node& node) {
  made.add_node(node.def->name, node.operands, node.attrs, node.program, node.label);
}

Tensor add_matrix(TBGraph& made, const std::string& name, DType dtype, int64_t rows, int64_t columns) {
  const int buffer = made.add_buffer(name, BufferKind::kWorkspace, -1, rows * columns * size_bytes(dtype));
  return {buffer, dtype, {rows, columns}, {columns, 1}};
}

std::string label_of_part(const Node& node, const char* part) {
  return node.label.empty() ? "" : node.label + "." + part;
}

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

std::vector<TBGraph> rewritten_apart(const TBGraph& graph, const Target& target) {
  std::vector<TBGraph> all;
  for (Rewrite rewrite : rewrites())
    if (std::optional<TBGraph> next = rewrite(graph, target)) all.push_back(*std::move(next));
  return all;
}

}  // namespace mpk
