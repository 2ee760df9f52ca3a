#include "overlaps.h"

#include <algorithm>

namespace mpk {

Overlaps::Overlaps(std::vector<Turns> turns, std::vector<size_t> written)
    : turns_(std::move(turns)),
      is_written_(turns_.size()),
      written_(std::move(written)),
      apart_(turns_.size()),
      apart_bytes_(turns_.size()) {
  for (const size_t input : written_) is_written_.at(input) = true;
}

bool Overlaps::take_turns(size_t a, uint64_t address_a, size_t b, uint64_t address_b) const {
  const int64_t turn = turns_[a].bytes;
  if (turn == 0 || turn != turns_[b].bytes) return false;
  const auto behind = static_cast<int64_t>(address_b - address_a) % turn;  // b's block begins this far behind a's
  const int64_t offset = behind < 0 ? behind + turn : behind;
  return offset >= turns_[a].block && offset + turns_[b].block <= turn;
}

std::optional<std::pair<size_t, size_t>> Overlaps::find(std::span<const uint64_t> addresses,
                                                        std::span<const int64_t> bytes) {
  const auto meet = [&](size_t a, size_t b) {
    const uint64_t end = std::min(addresses[a] + bytes[a], addresses[b] + bytes[b]);
    return a != b && std::max(addresses[a], addresses[b]) < end && !take_turns(a, addresses[a], b, addresses[b]);
  };
  bool is_known = true;
  for (size_t i = 0; i < addresses.size(); i++) {
    if (addresses[i] == apart_[i] && bytes[i] == apart_bytes_[i]) continue;
    is_known = false;
    for (const size_t w : written_)
      if (meet(i, w)) return std::pair(i, w);
    for (size_t other = 0; is_written_[i] && other < addresses.size(); other++)
      if (meet(i, other)) return std::pair(i, other);
  }
  if (is_known) return std::nullopt;
  apart_.assign(addresses.begin(), addresses.end());
  apart_bytes_.assign(bytes.begin(), bytes.end());
  return std::nullopt;
}

}  // namespace mpk
