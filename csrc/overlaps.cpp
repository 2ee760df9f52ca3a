#include "overlaps.h"

#include <algorithm>

namespace mpk {

Overlaps::Overlaps(size_t num_inputs, std::vector<size_t> written)
    : is_written_(num_inputs), written_(std::move(written)), apart_(num_inputs), apart_bytes_(num_inputs) {
  for (const size_t input : written_) is_written_.at(input) = true;
}

std::optional<std::pair<size_t, size_t>> Overlaps::find(std::span<const uint64_t> addresses,
                                                        std::span<const int64_t> bytes) {
  const auto meet = [&](size_t a, size_t b) {
    const uint64_t end = std::min(addresses[a] + bytes[a], addresses[b] + bytes[b]);
    return a != b && std::max(addresses[a], addresses[b]) < end;
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
