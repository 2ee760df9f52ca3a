#include "torch_mpk/schedule/mailboxes.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "access.h"
#include "torch_mpk/abi/mailboxes.h"

namespace mpk {
namespace {

int64_t words_of(const Node& node) {
  const Tensor& x = node.operands.front().tensor;
  const int64_t units = (x.numel() * size_bytes(x.dtype) + kUnitBytes - 1) / kUnitBytes;
  return units * kUnitWords;
}

// The phases with exchanges, in order, and their nodes.
std::vector<std::pair<int, std::vector<int>>> exchanges(const Schedule& schedule) {
  std::vector<std::pair<int, std::vector<int>>> found;
  for (size_t p = 0; p < schedule.phases.size(); p++) {
    std::vector<int> nodes;
    for (const Job& job : schedule.phases[p].jobs)
      for (int n : job.body)
        if (is_exchange(schedule.graph.nodes()[n])) nodes.push_back(n);
    if (!nodes.empty()) found.emplace_back(static_cast<int>(p), nodes);
  }
  return found;
}

void join_group(Mailboxes& mailboxes, const Node& node) {
  const auto ranks = static_cast<int>(node.int_attr("ranks"));
  const std::string group = node.string_attr("group");
  if (ranks < 1 || ranks > kMaxRanks)
    throw std::invalid_argument(node.title() + " is between " + std::to_string(ranks) + " ranks, expected 1 to " +
                                std::to_string(kMaxRanks));
  if (ranks == 1) return;
  if (mailboxes.ranks != 1 && (mailboxes.ranks != ranks || mailboxes.group != group))
    throw std::invalid_argument(node.title() + " is between the ranks of group " + group +
                                ", others between those of " + mailboxes.group +
                                ": the exchanges of a graph must be within one group");
  mailboxes.ranks = ranks;
  mailboxes.group = group;
}

void describe(std::string& text, const Node& node) {
  text += " " + node.def->name;
  if (node.program) return;
  for (const Operand& operand : node.operands) {
    text += std::string(" ") + info(operand.tensor.dtype).name;
    for (int64_t n : operand.tensor.shape) text += " " + std::to_string(n);
  }
}

std::string describe(const Schedule& schedule, const Mailboxes& mailboxes) {
  std::string text = schedule.target.device + " " + std::to_string(schedule.target.arch);
  if (schedule.target.device == "cuda") text += " " + std::to_string(schedule.target.num_workers);
  text += " " + mailboxes.group + " " + std::to_string(mailboxes.place_bytes);
  for (const Phase& phase : schedule.phases)
    for (const Job& job : phase.jobs) {
      text += "\n" + job.cut.kernel + " " + std::to_string(job.cut.num_tiles);
      for (int n : members(job)) describe(text, schedule.graph.nodes()[n]);
    }
  return text;
}

std::string describe_exchanges(const Schedule& schedule, const std::vector<std::pair<int, std::vector<int>>>& phases) {
  std::string text;
  for (const auto& [phase, nodes] : phases)
    for (int n : nodes) describe(text, schedule.graph.nodes()[n]);
  return text;
}

// FNV-1a.
std::string hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001b3;
  return std::to_string(hash);
}

}  // namespace

bool is_exchange(const Node& node) { return node.attrs.contains("ranks") && node.attrs.contains("group"); }

int64_t Mailboxes::bytes() const { return ranks == 1 ? 0 : kMailboxHeaderBytes + 2 * place_bytes; }

Mailboxes place_mailboxes(const Schedule& schedule) {
  Mailboxes mailboxes;
  const auto phases = exchanges(schedule);
  mailboxes.turns = static_cast<int64_t>(phases.size());
  // CPU threads synchronise between phases. On a GPU a phase is over for all workers once a later phase has awaited its
  // event.
  mailboxes.by_turns = true;
  for (size_t i = 1; i < phases.size() && schedule.target.device == "cuda"; i++)
    mailboxes.by_turns &= happens_before(schedule, phases[i - 1].first, phases[i].first);
  int64_t end = 0;
  for (size_t turn = 0; turn < phases.size(); turn++) {
    if (mailboxes.by_turns) end = 0;
    for (int n : phases[turn].second) {
      const Node& node = schedule.graph.nodes()[n];
      join_group(mailboxes, node);
      const int64_t words = words_of(node);
      mailboxes.of_nodes[n] = {static_cast<int64_t>(turn), end, words};
      end += words * static_cast<int64_t>(sizeof(uint64_t)) * node.int_attr("ranks");
    }
    mailboxes.place_bytes = std::max(mailboxes.place_bytes, end);
  }
  if (mailboxes.ranks > 1)
    mailboxes.key = hash_of(describe_exchanges(schedule, phases)) + "/" + hash_of(describe(schedule, mailboxes));
  return mailboxes;
}

}  // namespace mpk
