// Finds inputs of a call that share memory, though the graph was built for separate inputs.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace mpk {

// An input's blocks, one in each turn; other inputs' blocks may lie in between. 0 bytes: it has no blocks.
struct Turns {
  int64_t bytes, block;
};

// A graph that writes an input in place orders reads and writes as if inputs were separate. That remains true until an
// address changes, so a call with the last call's addresses costs a comparison each.
class Overlaps {
 public:
  Overlaps() = default;
  // `turns`: each input's. `written`: the inputs that are written.
  Overlaps(std::vector<Turns> turns, std::vector<size_t> written);

  bool may_occur() const { return !written_.empty(); }

  // Two inputs that share memory, of which one is written; nothing if there are none. `bytes`: the inputs' extents.
  std::optional<std::pair<size_t, size_t>> find(std::span<const uint64_t> addresses, std::span<const int64_t> bytes);

 private:
  bool take_turns(size_t a, uint64_t address_a, size_t b, uint64_t address_b) const;

  std::vector<Turns> turns_;
  std::vector<bool> is_written_;
  std::vector<size_t> written_;
  std::vector<uint64_t> apart_;  // addresses and extents of the last separate inputs
  std::vector<int64_t> apart_bytes_;
};

}  // namespace mpk
