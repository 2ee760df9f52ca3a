// Mailboxes: memory of each rank of a group, into which the other ranks push data, as words of 64 bits.
//
// A word holds 32 bits of data and, above them, the tag of its exchange, so a poller needs no other signal and nothing
// is ever cleared. A rank's memory begins with a header: its word r says that rank r has aborted a launch. Two places
// follow, used in turn (schedule/mailboxes.h).
#pragma once

#include <cstdint>

namespace mpk {

inline constexpr int kMaxRanks = 32;
inline constexpr int kMailboxHeaderBytes = 256;
inline constexpr uint32_t kRankAborted = 1;
// A unit of words has the data of one access.
inline constexpr int kUnitBytes = 16, kUnitWords = 4;

static_assert(kMaxRanks * sizeof(uint32_t) <= kMailboxHeaderBytes);

}  // namespace mpk
