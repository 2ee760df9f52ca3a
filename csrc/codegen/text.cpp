#include "text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace mpk::codegen {

std::string str(int64_t v) { return std::to_string(v); }

std::string float_literal(double v) {
  if (std::isnan(v)) return "__int_as_float(0x7fc00000)";
  if (std::isinf(v)) return v > 0 ? "infinity()" : "-infinity()";
  char text[40];
  std::snprintf(text, sizeof(text), "%.9g", v);
  std::string literal = text;
  if (literal.find_first_of(".e") == std::string::npos) literal += ".0";
  return literal + "f";
}

std::string double_literal(double v) {
  if (std::isnan(v)) return "static_cast<double>(__int_as_float(0x7fc00000))";
  if (std::isinf(v)) return v > 0 ? "static_cast<double>(infinity())" : "static_cast<double>(-infinity())";
  char text[40];
  std::snprintf(text, sizeof(text), "%.17g", v);
  std::string literal = text;
  return literal.find_first_of(".e") == std::string::npos ? literal + ".0" : literal;
}

std::string constant(const std::string& name, int64_t v) {
  return "  static constexpr int " + name + " = " + str(v) + ";\n";
}

std::string flag(const std::string& name, bool v) {
  return "  static constexpr bool " + name + " = " + truth(v) + ";\n";
}

std::string function(const std::string& result, const std::string& signature, const std::string& body) {
  return "  static MPK_DEVICE " + result + " " + signature + " {\n" + body + "  }\n";
}

std::string returning(const std::string& result, const std::string& signature, const std::string& value) {
  return function(result, signature, "    return " + value + ";\n");
}

std::string choose(const std::string& i, const std::vector<std::string>& values) {
  if (std::all_of(values.begin(), values.end(), [&](const std::string& v) { return v == values.front(); }))
    return values.front();
  std::string text;
  for (size_t k = 0; k + 1 < values.size(); k++)
    text += i + " == " + str(static_cast<int64_t>(k)) + " ? " + values[k] + " : ";
  return text + values.back();
}

}  // namespace mpk::codegen
