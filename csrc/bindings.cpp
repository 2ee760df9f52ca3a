// The Python face of the C++ core. Each area binds its own classes; none of them knows torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "arguments.h"

namespace py = pybind11;

namespace mpk {
void bind_arch(py::module_& m);      // Arch
void bind_graph(py::module_& m);     // TaskRegistry, Program, TBGraph
void bind_schedule(py::module_& m);  // Target, Schedule
void bind_codegen(py::module_& m);   // CudaProgram, generate_cuda
void bind_runtime(py::module_& m);   // CudaExecutable, device_info
void bind_cpu(py::module_& m);       // CpuExecutable
void bind_jit(py::module_& m);       // JitKernel
}  // namespace mpk

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ core of torch_mpk: task graph, schedule, code generation and runtimes.";
  mpk::bind_graph(m);
  mpk::bind_schedule(m);
  mpk::bind_arch(m);
  mpk::bind_codegen(m);
  py::class_<mpk::Arguments>(m, "Arguments", "Which of a call's arguments are the inputs and sizes of an executable.")
      .def(py::init([](std::vector<int> inputs, std::vector<int> sizes, bool freeze,
                       const std::vector<std::tuple<std::string, int64_t, bool, int64_t, int64_t>>& memory) {
             std::vector<mpk::InputMemory> memories;
             for (const auto& [name, bytes, is_written, turn, block] : memory)
               memories.push_back({name, bytes, is_written, {turn, block}});
             return mpk::Arguments(std::move(inputs), std::move(sizes), freeze, memories);
           }),
           py::arg("inputs"), py::arg("sizes"), py::arg("freeze") = false,
           py::arg("memory") = std::vector<std::tuple<std::string, int64_t, bool, int64_t, int64_t>>{},
           "Positions among the arguments. With freeze, a tensor object of the last call keeps its address, and the "
           "last "
           "call's arguments are kept alive. memory: each input's name, extent (-1 if calls differ), whether it is "
           "written in place, the distance of its blocks, and their length (0: no blocks), in bytes. A call in which a "
           "written input overlaps another raises SharedMemoryError.")
      .def("check", &mpk::Arguments::check, py::arg("args"),
           "Raises what a call with these arguments would raise, SharedMemoryError among it.");
  mpk::bind_runtime(m);
  mpk::bind_cpu(m);
  mpk::bind_jit(m);
}
