#pragma once

#include <stdexcept>

namespace mpk {

// Codegen cannot write a node or graph, and says why. Python raises it as torch_mpk.errors.UnsupportedError.
struct Unsupported : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace mpk
