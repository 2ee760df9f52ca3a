// What the code of a tile task is told of its tile, on every device.
#pragma once

#include <cstdint>

namespace mpk {

// What a tile has of a dimension: `size` from `begin` on; the tile is number `index` along it.
struct Range {
  int64_t index, begin, size;
};

constexpr Range range(uint32_t index, int64_t step, int64_t size) {
  const int64_t begin = index * step;
  return {index, begin, size - begin < step ? size - begin : step};
}

// Whether a string attribute has this value: if constexpr (is(V::kStyle, "torch")).
constexpr bool is(const char* value, const char* name) {
  while (*value != 0 && *value == *name) value++, name++;
  return *value == *name;
}

}  // namespace mpk
