#include "pattern.h"

#include <algorithm>

#include "text.h"

namespace mpk::codegen {

Pattern pattern(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t offset) {
  Pattern p{offset, {}};
  for (size_t d = 0; d < sizes.size(); d++) {
    if (sizes[d] == 1) continue;
    if (!p.dims.empty() && p.dims.back().second == strides[d] * sizes[d]) {
      p.dims.back() = {p.dims.back().first * sizes[d], strides[d]};
    } else {
      p.dims.emplace_back(sizes[d], strides[d]);
    }
  }
  return p;
}

std::string row_offset(const Tensor& t, const std::string& row) {
  Pattern leading;
  if (t.shape.size() > 1)
    leading = pattern({t.shape.begin(), t.shape.end() - 1}, {t.strides.begin(), t.strides.end() - 1}, 0);
  std::string text;
  int64_t step = 1;
  for (size_t d = leading.dims.size(); d-- > 0;) {
    const auto [size, stride] = leading.dims[d];
    std::string index = step == 1 ? "(" + row + ")" : "(" + row + ") / " + str(step);
    if (d > 0) index = "(" + index + ") % " + str(size);
    if (stride != 0) text = "int64_t(" + index + ") * " + str(stride) + (text.empty() ? "" : " + ") + text;
    step *= size;
  }
  return text.empty() ? "0" : text;
}

std::string element_offset(Tensor t, const std::string& element) {
  t.shape.push_back(1);
  t.strides.push_back(1);
  return row_offset(t, element);
}

std::string element_at(const Tensor& t, const std::vector<std::string>& indices) {
  std::string text;
  for (size_t d = 0; d < indices.size(); d++) text += " + int64_t(" + indices[d] + ") * " + str(t.strides[d]);
  return text;
}

}  // namespace mpk::codegen
