// The Python face of the C++ core. Each area binds its own classes; none of them knows torch.
#include <pybind11/pybind11.h>

namespace mpk {
void bind_graph(pybind11::module_& m);     // TaskRegistry, Program, TBGraph
void bind_schedule(pybind11::module_& m);  // Target, Schedule
void bind_codegen(pybind11::module_& m);   // CudaProgram, generate_cuda
void bind_runtime(pybind11::module_& m);   // CudaExecutable, device_info
void bind_cpu(pybind11::module_& m);       // CpuExecutable
}  // namespace mpk

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ core of torch_mpk: task graph, schedule, code generation and runtimes.";
  mpk::bind_graph(m);
  mpk::bind_schedule(m);
  mpk::bind_codegen(m);
  mpk::bind_runtime(m);
  mpk::bind_cpu(m);
}
