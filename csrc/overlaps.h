// Which inputs of a call share memory where a graph was built for inputs that do not.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace mpk {

// Blocks of an input, a turn apart from each other, which may have other inputs' between them; 0 bytes: it is no such.
struct Turns {
  int64_t bytes, block;
};

// In a graph that writes an input in place, reads and writes are ordered as for inputs that lie apart. That holds until
// an address changes, so a call with the last one's addresses costs a comparison each.
class Overlaps {
 public:
  Overlaps() = default;
  // `turns`: of each input. `written`: which of them are written.
  Overlaps(std::vector<Turns> turns, std::vector<size_t> written);

  bool may_occur() const { return !written_.empty(); }

  // Two inputs that share memory, one of which is written, if there are any. `bytes`: the inputs' extents.
  std::optional<std::pair<size_t, size_t>> find(std::span<const uint64_t> addresses, std::span<const int64_t> bytes);

 private:
  bool take_turns(size_t a, uint64_t address_a, size_t b, uint64_t address_b) const;

  std::vector<Turns> turns_;
  std::vector<bool> is_written_;
  std::vector<size_t> written_;
  std::vector<uint64_t> apart_;  // where the last inputs were that lay apart, and their extents
  std::vector<int64_t> apart_bytes_;
};

}  // namespace mpk
