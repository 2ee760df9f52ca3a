// C++ exceptions as the errors of torch_mpk.errors.
#pragma once
#include <pybind11/pybind11.h>

#include <exception>

namespace mpk {

inline void set_error(const char* type, const std::exception& error) {
  try {
    pybind11::set_error(pybind11::module_::import("torch_mpk.errors").attr(type), error.what());
  } catch (pybind11::error_already_set& import_error) {
    import_error.restore();
  }
}

}  // namespace mpk
