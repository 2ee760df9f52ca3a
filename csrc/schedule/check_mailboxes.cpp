// Checks exchanges between ranks, for any number of ranks and any delay between them.
#include <algorithm>
#include <map>

#include "proof.h"
#include "torch_mpk/abi/mailboxes.h"
#include "torch_mpk/schedule/mailboxes.h"

namespace mpk {
namespace {

struct Exchange {
  int phase, node;
  Mailbox box;

  int64_t end() const { return box.offset + box.words * static_cast<int64_t>(sizeof(uint64_t)) * ranks; }
  int64_t ranks;
};

class MailboxProof {
 public:
  MailboxProof(const Schedule& schedule, const Mailboxes& boxes) : s_(schedule), order_(schedule), boxes_(boxes) {}

  void run() {
    for (size_t p = 0; p < s_.phases.size(); p++)
      for (const Job& job : s_.phases[p].jobs) place(static_cast<int>(p), job);
    for (const Exchange& a : exchanges_) {
      check_size(a);
      check_turn(a);
      for (const Exchange& b : exchanges_)
        if (a.node < b.node) check_apart(a, b);
    }
    if (boxes_.by_turns) check_turns();
  }

 private:
  // Waits have no cycle if all ranks push what others await before they wait themselves. A job's code does so for a
  // worker's part. So that part must be the same on every rank, and a job must wait for one job's part alone.
  void place(int phase, const Job& job) {
    const auto exchanges = [&](int n) { return is_exchange(s_.graph.nodes()[n]); };
    for (const std::vector<int>* list : {&job.prologue, &job.epilogue})
      for (int n : *list)
        if (exchanges(n))
          unsound(name_node(s_, n) + " exchanges, but is no body of a job: it might wait before it pushes");
    for (int n : job.body) {
      if (!exchanges(n)) continue;
      if (job.body.size() != 1 || !job.prologue.empty())
        unsound(name_node(s_, n) + " exchanges, but shares its job: others would wait with it");
      if (job.assignment != Assignment::kStatic)
        unsound(name_node(s_, n) + " exchanges, but its tiles are drawn: ranks would push and wait in other orders");
      const auto found = boxes_.of_nodes.find(n);
      if (found == boxes_.of_nodes.end()) unsound(name_node(s_, n) + " exchanges, but has no mailbox");
      exchanges_.push_back({phase, n, found->second, s_.graph.nodes()[n].int_attr("ranks")});
    }
  }

  void check_size(const Exchange& e) const {
    const Tensor& x = s_.graph.nodes()[e.node].operands.front().tensor;
    const int64_t data = e.box.words * static_cast<int64_t>(sizeof(uint32_t));
    if (data < x.numel() * size_bytes(x.dtype) || e.box.offset < 0 || e.end() > boxes_.place_bytes)
      unsound(name_node(s_, e.node) + " pushes more than its mailbox holds");
    if (e.box.offset % kUnitBytes != 0 || e.box.words % kUnitWords != 0)
      unsound(name_node(s_, e.node) + " has a mailbox that is not of whole units of " + std::to_string(kUnitBytes) +
              " bytes");
  }

  // Turns are counted from launch to launch. Were one left out or counted twice, places would not alternate, and a word
  // that stands there since an earlier launch would have the right tag.
  void check_turn(const Exchange& e) const {
    if (e.box.turn < 0 || e.box.turn >= boxes_.turns)
      unsound(name_node(s_, e.node) + " has turn " + std::to_string(e.box.turn) + " of " +
              std::to_string(boxes_.turns) + ": the next launch counts it again");
  }

  // Two exchanges of a launch that may use one place at the same time.
  void check_apart(const Exchange& a, const Exchange& b) const {
    const bool same_place = !boxes_.by_turns || a.box.turn == b.box.turn;
    if (same_place && a.box.offset < b.end() && b.box.offset < a.end())
      unsound(name_node(s_, a.node) + " and " + name_node(s_, b.node) + " push into the same words of a mailbox");
  }

  // A place is used again two turns later. A rank that pushes then has received something of the turn in between from
  // each rank, which that rank pushed after it had read the place, if all its workers had finished the earlier turn
  // before any began the next. Between a launch's last turn and the next launch's first, all workers have finished.
  void check_turns() const {
    std::map<int64_t, int> phases;  // by turn
    for (const Exchange& e : exchanges_)
      if (const auto [at, fresh] = phases.emplace(e.box.turn, e.phase); !fresh && at->second != e.phase)
        unsound(name_node(s_, e.node) + " exchanges in a phase of its own, but in another's turn");
    if (static_cast<int64_t>(phases.size()) != boxes_.turns)
      unsound("a launch has " + std::to_string(boxes_.turns) + " turns, but " + std::to_string(phases.size()) +
              " phases that exchange: places would not alternate");
    const bool is_cpu = s_.target.device != "cuda";  // whose threads synchronise between phases
    for (auto turn = phases.begin(); turn != phases.end() && std::next(turn) != phases.end(); ++turn) {
      const int now = turn->second, next = std::next(turn)->second;
      if (is_cpu ? now >= next : !order_.happens_before(now, next))
        unsound("the exchanges of phase " + std::to_string(next) + " may begin before those of phase " +
                std::to_string(now) + " are read, and their mailboxes are used in turn");
    }
  }

  const Schedule& s_;
  const Order order_;
  const Mailboxes& boxes_;
  std::vector<Exchange> exchanges_;
};

}  // namespace

void check_mailboxes(const Schedule& schedule) { validate_mailboxes(schedule, place_mailboxes(schedule)); }

void validate_mailboxes(const Schedule& schedule, const Mailboxes& mailboxes) {
  MailboxProof(schedule, mailboxes).run();
}

}  // namespace mpk
