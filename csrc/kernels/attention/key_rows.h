// A cache [B, G, L, D], or a tensor like it, as a matrix that the copy engine copies boxes of.
#pragma once

#include <algorithm>
#include <optional>

#include "../../schedule/staging.h"

namespace mpk {

// Position l of (b, g) is row b * rows_of_batch + g * rows_of_group + l, and begins g * columns_of_group columns in.
struct KeyRows {
  Tensor matrix;
  int64_t rows_of_batch = 0, rows_of_group = 0, columns_of_group = 0;
  bool in_blocks = false;  // heads begin and end at multiples of 64 columns, so that one box has all of a head's
};

// Nothing if positions are not equally far apart, or do not begin at multiples of 16 bytes.
inline std::optional<KeyRows> key_rows(const Tensor& t) {
  if (t.shape.size() != 4 || t.numel() == 0 || t.strides[3] != 1 || size_bytes(t.dtype) != 2) return std::nullopt;
  const int64_t batch = t.shape[0], groups = t.shape[1], length = t.shape[2], size = t.shape[3];
  const int64_t pitch = length > 1 ? t.strides[2] : size;
  const int64_t of_batch = batch > 1 ? t.strides[0] : 0, of_group = groups > 1 ? t.strides[1] : 0;
  if (pitch < size || of_batch % pitch != 0) return std::nullopt;
  KeyRows k;
  k.rows_of_batch = of_batch / pitch;
  if (of_group % pitch == 0)
    k.rows_of_group = of_group / pitch;
  else
    k.columns_of_group = of_group;
  const int64_t rows = (batch - 1) * k.rows_of_batch + (groups - 1) * k.rows_of_group + length;
  const int64_t columns = (groups - 1) * k.columns_of_group + size;
  if (columns > pitch || rows >= int64_t{1} << 31) return std::nullopt;
  k.in_blocks = size % kBoxColumns == 0;
  if (k.in_blocks && k.columns_of_group % kBoxColumns != 0) return std::nullopt;
  k.matrix = t;
  k.matrix.shape = {rows, columns};
  k.matrix.strides = {pitch, 1};
  if (!can_be_streamed(k.matrix)) return std::nullopt;
  return k;
}

}  // namespace mpk
