#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../errors.h"
#include "torch_mpk/abi/control.h"
#include "torch_mpk/abi/table.h"
#include "torch_mpk/codegen/cpu.h"
#include "torch_mpk/codegen/cuda.h"

namespace py = pybind11;

namespace mpk {

namespace {

void bind_program(py::module_& m) {
  py::class_<CudaProgram>(m, "CudaProgram", "One kernel's source and the tables it reads.")
      .def_readonly("source", &CudaProgram::source)
      .def_readonly("kernel_name", &CudaProgram::kernel_name)
      .def_property_readonly(
          "table",
          [](const CudaProgram& p) { return py::bytes(reinterpret_cast<const char*>(p.table.data()), p.table.size()); })
      .def_readonly("arch", &CudaProgram::arch)
      .def_readonly("num_workers", &CudaProgram::num_workers)
      .def_readonly("num_threads", &CudaProgram::num_threads)
      .def_readonly("smem_bytes", &CudaProgram::smem_bytes)
      .def_readonly("workspace_bytes", &CudaProgram::workspace_bytes)
      .def_readonly("control_bytes", &CudaProgram::control_bytes)
      .def_readonly("stalls_offset", &CudaProgram::stalls_offset)
      .def_readonly("stamps_offset", &CudaProgram::stamps_offset)
      .def_readonly("num_phases", &CudaProgram::num_phases)
      .def_readonly("num_inputs", &CudaProgram::num_inputs)
      .def_readonly("num_outputs", &CudaProgram::num_outputs)
      .def_readonly("num_scalars", &CudaProgram::num_scalars)
      .def_property_readonly("maps",
                             [](const CudaProgram& p) {
                               std::vector<std::vector<int64_t>> maps;
                               for (const MatrixMap& map : p.maps) {
                                 const MatrixMap::Fields fields = map.fields();
                                 maps.emplace_back(fields.begin(), fields.end());
                               }
                               return maps;
                             })
      .def_readonly("input_alignment", &CudaProgram::input_alignment)
      .def_readonly("phase_names", &CudaProgram::phase_names)
      .def_readonly("phase_bytes", &CudaProgram::phase_bytes)
      .def_property_readonly("phase_experts",
                             [](const CudaProgram& p) {
                               std::vector<std::vector<int64_t>> experts;  // lists, as those of a kernel that was kept
                               for (const auto& [number, bytes] : p.phase_experts) experts.push_back({number, bytes});
                               return experts;
                             })
      .def_readonly("ranks", &CudaProgram::ranks)
      .def_readonly("group", &CudaProgram::group)
      .def_readonly("exchange_key", &CudaProgram::exchange_key)
      .def_readonly("mailbox_bytes", &CudaProgram::mailbox_bytes);
}

}  // namespace

void bind_codegen(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Unsupported& error) {
      set_error("UnsupportedError", error);
    }
  });

  bind_program(m);
  m.def(
      "event_offset", [](int64_t phase) { return kEventsOffset + phase * kEventBytes; }, py::arg("phase"),
      "The place of a phase's event in a kernel's control block.");
  m.def("workspace_index", [] { return kWorkspaceIndex; }, "The pointer number of matrices in a kernel's workspace.");
  m.def("generate_cuda", &generate_cuda, py::arg("schedule"), py::arg("profiled") = false, py::arg("named") = false,
        "Write the kernel of a schedule for a CUDA target; named, with comments that describe its jobs. "
        "Raises UnsupportedError naming the node that cannot be generated.");
  m.def(
      "generate_cpu_tiles",
      [](const TBGraph& graph) {
        const CpuTiles tiles = generate_cpu_tiles(graph);
        return std::pair(tiles.source, tiles.functions);
      },
      py::arg("graph"),
      "The C++ source of a graph's tasks with C++ code for the CPU, empty if there are none, and [(node, place in its "
      "table torch_mpk_tiles)].");
}

}  // namespace mpk
