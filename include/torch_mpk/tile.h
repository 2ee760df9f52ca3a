// What a tile task's code knows of its tile, on every device.
#pragma once

#include <cstdint>

namespace mpk {

// A tile's range of a dimension: `size` from `begin` on. The tile is number `index` along it.
struct Range {
  int64_t index, begin, size;
};

constexpr Range range(uint32_t index, int64_t step, int64_t size) {
  const int64_t begin = index * step;
  return {index, begin, size - begin < step ? size - begin : step};
}

// The slice of a streamed operand that is read in place: `rows` rows of `size` elements.
template <class T>
struct DirectStream {
  const T* data;
  int64_t rows, size, pitch;

  // Calls f(chunk, row, begin, count): `count` elements of a row of the slice, from `begin` on.
  template <class F>
  constexpr void for_each(F f) {
    for (int64_t r = 0; r < rows; r++) f(data + r * pitch, r, int64_t{0}, size);
  }
};

// Whether a string attribute has this value: if constexpr (is(V::kStyle, "torch")).
constexpr bool is(const char* value, const char* name) {
  while (*value != 0 && *value == *name) value++, name++;
  return *value == *name;
}

}  // namespace mpk
