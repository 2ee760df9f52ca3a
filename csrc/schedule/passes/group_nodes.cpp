#include <algorithm>

#include "../passes.h"

namespace mpk {
namespace {

struct Group {
  std::vector<int> body, epilogue;

  std::vector<int> nodes() const {
    std::vector<int> all = body;
    all.insert(all.end(), epilogue.begin(), epilogue.end());
    return all;
  }
  void add(const Group& other) {
    body.insert(body.end(), other.body.begin(), other.body.end());
    epilogue.insert(epilogue.end(), other.epilogue.begin(), other.epilogue.end());
  }
};

// The node with its epilogues, if it may share a job. With epilogues it may only if rows are many: then tiles are few
// and large, and of two jobs some workers would have a tile of each.
bool find_member(const Draft& draft, int n, Group& member) {
  if (!draft.joins(n)) return false;
  member.body = {n};
  if (draft.job_of[n] < 0) return true;
  const Job& job = draft.jobs[draft.job_of[n]];
  member.epilogue = job.epilogue;
  return job.body.size() == 1 && draft.schedule.warps.hands_over_rows;
}

// Whether neither group needs or overwrites anything of the other.
bool are_independent(const Draft& draft, const Group& a, const Group& b) {
  const std::vector<int> nodes = a.nodes(), others = b.nodes();
  const auto holds = [](const std::vector<int>& list, int n) {
    return std::find(list.begin(), list.end(), n) != list.end();
  };
  return std::none_of(draft.edges.begin(), draft.edges.end(), [&](const Dependency& edge) {
    return (holds(nodes, edge.from) && holds(others, edge.to)) || (holds(others, edge.from) && holds(nodes, edge.to));
  });
}

}  // namespace

void group_nodes(Draft& draft) {
  std::vector<Group> groups;
  for (int n = 0; n < draft.num_nodes(); n++) {
    Group member;
    if (!find_member(draft, n, member)) continue;
    const auto takes_member = [&](const Group& group) {
      Group both = group;
      both.add(member);
      return draft.have_same_input(both.body) && are_independent(draft, group, member) &&
             draft.contractible(both.nodes());
    };
    const auto group = std::find_if(groups.begin(), groups.end(), takes_member);
    if (group == groups.end())
      groups.push_back(member);
    else
      group->add(member);
  }
  for (Group& group : groups) {
    for (int n : group.body)
      if (draft.job_of[n] >= 0) draft.jobs[draft.job_of[n]] = {};
    const int j = draft.new_job(group.body);
    draft.jobs[j].epilogue = group.epilogue;
    for (int n : group.epilogue) draft.job_of[n] = j;
  }
}

}  // namespace mpk
