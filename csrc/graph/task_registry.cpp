#include "torch_mpk/graph/task_registry.h"

#include <stdexcept>

namespace mpk {
namespace {

bool same(const TaskDef& a, const TaskDef& b) {
  if (a.role != b.role || a.attrs != b.attrs || a.header != b.header || a.headers != b.headers || a.tile != b.tile ||
      a.stream != b.stream || a.cpu_body != b.cpu_body || a.joined_by != b.joined_by || a.tiled_by != b.tiled_by ||
      a.hands_over != b.hands_over || a.scales_rows != b.scales_rows || a.behind_rows != b.behind_rows ||
      a.operands.size() != b.operands.size())
    return false;
  for (size_t i = 0; i < a.operands.size(); i++) {
    const OperandSpec &x = a.operands[i], &y = b.operands[i];
    if (x.name != y.name || x.dims != y.dims || x.optional != y.optional || x.is_read != y.is_read ||
        x.is_write != y.is_write || x.is_loaded != y.is_loaded || x.is_staged != y.is_staged ||
        x.is_whole != y.is_whole || x.is_boxed != y.is_boxed || x.takes_rows != y.takes_rows)
      return false;
  }
  return true;
}

}  // namespace

const OperandSpec* TaskDef::find(const std::string& operand) const {
  for (const OperandSpec& spec : operands)
    if (spec.name == operand) return &spec;
  return nullptr;
}

TaskRegistry& TaskRegistry::global() {
  static TaskRegistry registry = [] {
    TaskRegistry r;
    // Tasks that lowering makes from plain ATen nodes. Their operands are whatever their programs access.
    r.add({"pointwise", Role::kPointwise, {}, {}, "", {}, {}, "", ""});
    r.add({"reduce", Role::kReduce, {}, {"op"}, "", {}, {}, "", ""});
    return r;
  }();
  return registry;
}

const TaskDef& TaskRegistry::add(TaskDef def) {
  for (OperandSpec& spec : def.operands) spec.is_loaded |= spec.name == def.stream;
  auto found = defs_.find(def.name);
  if (found != defs_.end()) {
    if (!same(*found->second, def))
      throw std::invalid_argument("task '" + def.name +
                                  "' is already registered with another signature; give yours another name");
    return *found->second;
  }
  std::string name = def.name;
  return *defs_.emplace(name, std::make_unique<TaskDef>(std::move(def))).first->second;
}

const TaskDef* TaskRegistry::find(const std::string& name) const {
  auto found = defs_.find(name);
  return found == defs_.end() ? nullptr : found->second.get();
}

const TaskDef& TaskRegistry::get(const std::string& name) const {
  if (const TaskDef* def = find(name)) return *def;
  std::string known;
  for (const auto& [other, def] : defs_) known += (known.empty() ? "" : ", ") + other;
  throw std::invalid_argument("no task is named '" + name + "'; registered are: " + known);
}

std::vector<std::string> TaskRegistry::names() const {
  std::vector<std::string> names;
  for (const auto& [name, def] : defs_) names.push_back(name);
  return names;
}

}  // namespace mpk
