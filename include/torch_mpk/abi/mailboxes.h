// Mailboxes: memory of each rank of a group, into which the other ranks push what they have, as words of 64 bits.
//
// A word holds 32 bits of data and, above them, the tag of the exchange that pushed it: whoever polls it needs no other
// sign that it has come, and nothing is ever cleared. A rank's memory begins with a header, whose word of rank r says
// that r has given a launch up. Behind it are two places, which are used in turn (schedule/mailboxes.h).
#pragma once

#include <cstdint>

namespace mpk {

inline constexpr int kMaxRanks = 32;
inline constexpr int kMailboxHeaderBytes = 256;
inline constexpr uint32_t kGaveUp = 1;
// Words come in units of as many bytes of data as one access has.
inline constexpr int kUnitBytes = 16, kUnitWords = 4;

static_assert(kMaxRanks * sizeof(uint32_t) <= kMailboxHeaderBytes);

}  // namespace mpk
