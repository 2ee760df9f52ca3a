// Where the exchanges of a schedule stand in the ranks' mailboxes.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "torch_mpk/schedule/schedule.h"

namespace mpk {

// A task exchanges where it has the attributes `ranks` and `group`.
bool is_exchange(const Node& node);

struct Mailbox {
  int64_t turn = 0;    // which of the launch's phases of exchanges it is in
  int64_t offset = 0;  // in a place, bytes
  int64_t words = 0;   // of each rank
};

// A place is used again by the exchange after the next, where a phase of exchanges is over for a rank before it begins
// the next; otherwise by the launch after the next. Who pushes into it again has then had something from every rank
// that the rank pushed when it had read what stood there.
struct Mailboxes {
  int ranks = 1;      // 1: nothing is exchanged
  std::string group;  // its name in torch.distributed
  int64_t turns = 0;  // phases of a launch that exchange
  bool by_turns = false;
  int64_t place_bytes = 0;
  std::map<int, Mailbox> of_nodes;
  // What schedules of ranks that launch together have in common: equal where tiles are dealt out and exchanged alike.
  // Programs may differ, since a rank's number is a constant in them.
  std::string key;

  int64_t bytes() const;  // of a rank
  // Which place an exchange of a launch uses, by the launch's number.
  int64_t place_of(uint32_t launch, int64_t turn) const {
    return by_turns ? (launch * static_cast<uint32_t>(turns) + static_cast<uint32_t>(turn)) % 2 : launch % 2;
  }
};

// Throws std::invalid_argument where exchanges are between several groups, or too many ranks.
Mailboxes place_mailboxes(const Schedule& schedule);

// Throws std::runtime_error, naming a node, where ranks that use these mailboxes might wait for each other, or read
// what another exchange has pushed. `validate` asks it of those that `place_mailboxes` gives.
void validate_mailboxes(const Schedule& schedule, const Mailboxes& mailboxes);

}  // namespace mpk
