#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <optional>

#include "arch.h"

namespace py = pybind11;

namespace mpk {

void bind_arch(py::module_& m) {
  py::class_<Arch, std::unique_ptr<Arch, py::nodelete>>(m, "Arch",
                                                        "A generation of GPUs that kernels are generated for.")
      .def_readonly("number", &Arch::number)
      .def_readonly("devices", &Arch::devices, "Compute capabilities of its devices, as 90 for 9.0.")
      .def_readonly("num_sms", &Arch::num_sms)
      .def_readonly("smem_bytes", &Arch::smem_bytes)
      .def_readonly("is_compiled_by_device", &Arch::is_compiled_by_device)
      .def_readonly("has_bulk_copies", &Arch::has_bulk_copies)
      .def_readonly("has_warpgroup_products", &Arch::has_warpgroup_products)
      .def_readonly("moves_registers", &Arch::moves_registers)
      .def_readonly("has_clusters", &Arch::has_clusters)
      .def_readonly("overlaps_launches", &Arch::overlaps_launches)
      .def_property_readonly(
          "measured_on", [](const Arch& arch) { return std::string(arch.costs.measured_on); },
          "The GPU on which the costs were measured; empty: they are estimates.")
      .def_property_readonly(
          "hop_ns", [](const Arch& arch) { return arch.costs.hop_cycles / arch.costs.cycles_per_ns; },
          "The hop to the next phase by polled words.")
      .def_property_readonly(
          "event_ns", [](const Arch& arch) { return arch.costs.event_cycles / arch.costs.cycles_per_ns; },
          "The hop to the next phase by an event.");
  constexpr auto kStays = py::return_value_policy::reference;
  m.def("archs", &archs, kStays, "All generations, by number.");
  m.def("known_archs", &known_archs, "Their numbers, as a message lists them.");
  m.def("arch_of", &arch_of, py::arg("number"), kStays, "Raises ValueError where there is none of this number.");
  m.def(
      "arch_of_device",
      [](int capability) -> std::optional<std::reference_wrapper<const Arch>> {
        if (const Arch* arch = arch_of_device(capability)) return *arch;
        return std::nullopt;
      },
      py::arg("capability"), kStays, "The generation of a device, by its compute capability. None: it is too old.");
  m.def("can_run", &can_run, py::arg("capability"), py::arg("arch"),
        "Whether a device of this compute capability has all features that code of a generation may use.");
  m.def("compiled_name", &compiled_name, py::arg("capability"), py::arg("as_ptx") = false);
  m.def("runs_on", &runs_on, py::arg("compiled_for"), py::arg("capability"),
        "Whether a device runs machine code for a compute capability.");
  m.def("capability_text", &capability_text, py::arg("capability"));
}

}  // namespace mpk
