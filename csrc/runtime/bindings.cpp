#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>

#include "torch_mpk/runtime/cuda_executable.h"

namespace py = pybind11;

namespace mpk {
namespace {

// The addresses of a sequence of tensors, or of ints. Called for every tensor of every launch: no attribute lookup by
// string, no argument tuple, no pybind11 cast.
void read_pointers(py::handle sequence, int num_expected, const char* what, uint64_t* pointers) {
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  // A tuple: data_ptr() may run Python code, which must not change the sequence under us.
  const auto tuple = py::reinterpret_steal<py::object>(PySequence_Tuple(sequence.ptr()));
  if (!tuple) throw py::error_already_set();
  const Py_ssize_t size = PyTuple_GET_SIZE(tuple.ptr());
  if (size != num_expected)
    throw py::value_error("the megakernel expects " + std::to_string(num_expected) + " " + what + "s, got " +
                          std::to_string(size));
  for (Py_ssize_t i = 0; i < size; i++) {
    PyObject* item = PyTuple_GET_ITEM(tuple.ptr(), i);
    py::object number;
    if (PyLong_Check(item)) {
      number = py::reinterpret_borrow<py::object>(item);
    } else {
      number = py::reinterpret_steal<py::object>(
          PyObject_VectorcallMethod(data_ptr, &item, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
    }
    if (number) pointers[i] = PyLong_AsUnsignedLongLong(number.ptr());
    if (PyErr_Occurred()) {
      const std::string message = std::string(what) + " " + std::to_string(i) +
                                  " of the megakernel: expected a tensor or an address, got " + Py_TYPE(item)->tp_name;
      py::raise_from(PyExc_TypeError, message.c_str());
      throw py::error_already_set();
    }
  }
}

void read_scalars(py::handle sequence, int num_expected, int64_t* scalars) {
  const auto tuple = py::reinterpret_steal<py::object>(PySequence_Tuple(sequence.ptr()));
  if (!tuple) throw py::error_already_set();
  const Py_ssize_t size = PyTuple_GET_SIZE(tuple.ptr());
  if (size != num_expected)
    throw py::value_error("the megakernel expects " + std::to_string(num_expected) + " sizes, got " +
                          std::to_string(size));
  for (Py_ssize_t i = 0; i < size; i++) scalars[i] = py::cast<int64_t>(PyTuple_GET_ITEM(tuple.ptr(), i));
}

void run(CudaExecutable& executable, py::handle inputs, py::handle outputs, py::handle scalars, uint64_t stream) {
  LaunchBlock block;  // 32 KB, of which only what the kernel reads is written
  read_pointers(inputs, executable.num_inputs(), "input", block.pointers);
  read_pointers(outputs, executable.num_outputs(), "output", block.pointers + executable.num_inputs());
  std::fill(std::begin(block.params.scalars), std::end(block.params.scalars), 0);
  read_scalars(scalars, executable.num_scalars(), block.params.scalars);
  // Launching blocks while the device's queue is full, and the executable's mutex must not be awaited under the GIL.
  const py::gil_scoped_release release;
  executable.run(block, reinterpret_cast<cu::Stream>(stream));
}

// Any object with CudaProgram's fields: what code generation returns, or what a test writes by hand.
CudaProgram read_program(py::handle object) {
  CudaProgram program;
#define MPK_READ(field) program.field = object.attr(#field).cast<decltype(program.field)>()
  MPK_READ(kernel_name);
  MPK_READ(num_workers);
  MPK_READ(num_threads);
  MPK_READ(smem_bytes);
  MPK_READ(workspace_bytes);
  MPK_READ(control_bytes);
  MPK_READ(stalls_offset);
  MPK_READ(stamps_offset);
  MPK_READ(num_inputs);
  MPK_READ(num_outputs);
  MPK_READ(num_scalars);
  MPK_READ(input_alignment);
  MPK_READ(phase_names);
#undef MPK_READ
  const std::string table = py::bytes(object.attr("table"));
  program.table.assign(table.begin(), table.end());
  return program;
}

void set_error(const char* type, const std::exception& error) {
  try {
    py::set_error(py::module_::import("torch_mpk.errors").attr(type), error.what());
  } catch (py::error_already_set& import_error) {
    import_error.restore();
  }
}

}  // namespace

void bind_runtime(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const LaunchAborted& error) {
      set_error("MegakernelTimeout", error);
    } catch (const cu::Error& error) {
      set_error("LaunchError", error);
    }
  });

  py::class_<cu::DeviceInfo>(m, "DeviceInfo", "What the schedule needs to know of a CUDA device.")
      .def_readonly("ordinal", &cu::DeviceInfo::ordinal)
      .def_readonly("name", &cu::DeviceInfo::name)
      .def_readonly("arch", &cu::DeviceInfo::arch, "10 * major + minor of the compute capability.")
      .def_readonly("num_sms", &cu::DeviceInfo::num_sms)
      .def_readonly("smem_optin_bytes", &cu::DeviceInfo::smem_optin_bytes, "Shared memory one CTA may use.")
      .def_readonly("driver_version", &cu::DeviceInfo::driver_version, "12080 is CUDA 12.8.");
  m.def("num_devices", &cu::num_devices, "CUDA devices of this process; 0 without a driver.");
  m.def("device_info", &cu::device_info, py::arg("ordinal"), "Raises LaunchError without a driver or such a device.");

  py::class_<CudaExecutable>(m, "CudaExecutable", "A megakernel loaded on one device.")
      .def(py::init([](py::handle program, const py::bytes& image, int device, uint64_t watchdog_ns) {
             const CudaProgram fields = read_program(program);
             const std::string copy = image;
             const py::gil_scoped_release release;
             return std::make_unique<CudaExecutable>(fields, copy, device, watchdog_ns);
           }),
           py::arg("program"), py::arg("image"), py::arg("device"), py::arg("watchdog_ns"))
      .def("run", &run, py::arg("inputs"), py::arg("outputs"), py::arg("scalars"), py::arg("stream"),
           "Launch on a stream (its handle as int) and return at once. Inputs and outputs: tensors of this device, or "
           "addresses.\n\n"
           "Raises ValueError for a wrong number of arguments or an unaligned address, MegakernelTimeout when an "
           "earlier launch was\n"
           "aborted, LaunchError when the driver refuses.")
      .def("check", &CudaExecutable::check, py::call_guard<py::gil_scoped_release>(),
           "Raise MegakernelTimeout when a launch was aborted since the last call. Does not wait for launches in "
           "flight.")
      .def_property_readonly("phase_names", &CudaExecutable::phase_names)
      .def(
          "stamps",
          [](CudaExecutable& e) {
            const std::vector<PhaseStamps> stamps = e.stamps();
            return py::bytes(reinterpret_cast<const char*>(stamps.data()), stamps.size() * sizeof(PhaseStamps));
          },
          "PhaseStamps[num_workers][num_phases] of the latest launch of a profiled kernel, uint32 each; empty if it is "
          "not.")
      .def(
          "control_address",
          [](CudaExecutable& e, uint64_t stream) { return e.control_address(reinterpret_cast<cu::Stream>(stream)); },
          py::arg("stream"), py::call_guard<py::gil_scoped_release>(),
          "The device address of the control block that launches on a stream use, for tests that damage it.")
      .def_property(
          "jitter", [](const CudaExecutable& e) { return e.jitter.load(); },
          [](CudaExecutable& e, uint32_t seed) { e.jitter = seed; },
          "Nonzero: random delays in the kernel, seeded by it, to test its synchronisation.");
}

}  // namespace mpk
