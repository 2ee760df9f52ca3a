#pragma once

#include <stdexcept>

namespace mpk {

// What codegen cannot write a node, or a graph, for. Python raises it as torch_mpk.errors.UnsupportedError.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace mpk
