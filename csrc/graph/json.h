// Just enough JSON writing for the stages' artefacts.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace mpk::json {

inline std::string quote(const std::string& s) {
  std::string out = "\"";
  for (char c : s) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      constexpr char kDigits[] = "0123456789abcdef";
      out += std::string("\\u00") + kDigits[c >> 4] + kDigits[c & 15];
    } else {
      out += c;
    }
  }
  return out + "\"";
}

template <class Range, class Write>
std::string array(const Range& range, Write write, const char* separator = ", ") {
  std::string out = "[";
  bool first = true;
  for (const auto& item : range) {
    if (!first) out += separator;
    first = false;
    out += write(item);
  }
  return out + "]";
}

template <class T>
std::string numbers(const std::vector<T>& values) {
  return array(values, [](T v) { return std::to_string(v); });
}

}  // namespace mpk::json
