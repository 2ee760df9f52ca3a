// Which inputs of a call share memory where a graph was built for inputs that do not.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace mpk {

// In a graph that writes an input in place, reads and writes are ordered as for inputs that lie apart. That holds until
// an address changes, so a call with the last one's addresses costs a comparison each.
class Overlaps {
 public:
  Overlaps() = default;
  // `written`: which of `num_inputs` are written.
  Overlaps(size_t num_inputs, std::vector<size_t> written);

  bool may_occur() const { return !written_.empty(); }

  // Two inputs that share memory, one of which is written, if there are any. `bytes`: the inputs' extents.
  std::optional<std::pair<size_t, size_t>> find(std::span<const uint64_t> addresses, std::span<const int64_t> bytes);

 private:
  std::vector<bool> is_written_;
  std::vector<size_t> written_;
  std::vector<uint64_t> apart_;  // where the last inputs were that lay apart, and their extents
  std::vector<int64_t> apart_bytes_;
};

}  // namespace mpk
