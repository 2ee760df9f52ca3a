#include "checks.h"

#include "text.h"

namespace mpk::codegen {

void fail(const Node& node, const std::string& why) {
  throw Unsupported(node.def->name + (node.label.empty() ? "" : " (" + node.label + ")") + ": " + why);
}

}  // namespace mpk::codegen
