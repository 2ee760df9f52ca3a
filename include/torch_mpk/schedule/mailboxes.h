// The places of a schedule's exchanges in the ranks' mailboxes.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "torch_mpk/schedule/schedule.h"

namespace mpk {

// Whether a task exchanges: it has the attributes `ranks` and `group`.
bool is_exchange(const Node& node);

struct Mailbox {
  int64_t turn = 0;    // number of its phase among the launch's phases with exchanges
  int64_t offset = 0;  // within a place, in bytes
  int64_t words = 0;   // of each rank
};

// If a rank finishes each phase of exchanges before it begins the next, the exchange after the next reuses a place;
// otherwise the launch after the next does. A rank that pushes into it again has then received something from every
// rank which that rank pushed after it had read the place.
struct Mailboxes {
  int ranks = 1;      // 1: no exchange
  std::string group;  // its name in torch.distributed
  int64_t turns = 0;  // phases of a launch with exchanges
  bool by_turns = false;
  int64_t place_bytes = 0;
  std::map<int, Mailbox> of_nodes;
  // The common part of the ranks' schedules: two hashes, of what is exchanged, and behind a '/' of all, which is equal
  // if tiles are shared out and exchanged alike. Programs may differ, since a rank's number is a constant in them.
  std::string key;

  int64_t bytes() const;  // of a rank
  // The place of an exchange of a launch, by the launch's number.
  int64_t place_of(uint32_t launch, int64_t turn) const {
    return by_turns ? (launch * static_cast<uint32_t>(turns) + static_cast<uint32_t>(turn)) % 2 : launch % 2;
  }
};

// Throws std::invalid_argument if exchanges belong to several groups, or ranks are too many.
Mailboxes place_mailboxes(const Schedule& schedule);

// Throws std::runtime_error, naming a node, where ranks that use these mailboxes might wait for each other, or read
// what another exchange has pushed. `validate` asks it of those that `place_mailboxes` gives.
void validate_mailboxes(const Schedule& schedule, const Mailboxes& mailboxes);

}  // namespace mpk
