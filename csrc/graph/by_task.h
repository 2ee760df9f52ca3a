// A stage keeps one object for a task, or for a role whose tasks share it. Files of tasks and roles register them in
// static initialisers.
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "torch_mpk/graph/task_registry.h"

namespace mpk {

template <class T>
class ByTask {
 public:
  explicit ByTask(std::string what) : what_(std::move(what)) {}

  // Both return true, for use in a variable's initialiser.
  bool add(const std::string& task, const T& own) {
    if (!of_tasks_.emplace(task, &own).second) throw std::logic_error("task '" + task + "' has two " + what_);
    return true;
  }
  bool add(Role role, const T& shared) {
    if (!of_roles_.emplace(role, &shared).second) throw std::logic_error("a role has two " + what_);
    return true;
  }

  // The task's object, or its role's; null if there is none.
  const T* find(const TaskDef& def) const {
    if (const auto own = of_tasks_.find(def.name); own != of_tasks_.end()) return own->second;
    const auto shared = of_roles_.find(def.role);
    return shared == of_roles_.end() ? nullptr : shared->second;
  }

 private:
  const std::string what_;
  std::map<std::string, const T*> of_tasks_;
  std::map<Role, const T*> of_roles_;
};

}  // namespace mpk
