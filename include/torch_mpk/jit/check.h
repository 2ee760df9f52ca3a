// For kernels of torch_mpk.jit on the CPU: what their data must be, which no signature says.
#pragma once

#include <sstream>
#include <stdexcept>

namespace mpk {

// Raises ValueError in Python where a condition does not hold, with the parts of its message one behind the other.
template <class... Parts>
void check(bool holds, const Parts&... parts) {
  if (holds) [[likely]]
    return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

}  // namespace mpk
