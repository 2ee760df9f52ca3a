#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <span>

#include "../arguments.h"
#include "../errors.h"
#include "../launch_times.h"
#include "torch_mpk/runtime/cuda_executable.h"

namespace py = pybind11;

namespace mpk {
namespace {

// A launch's parameters: of these 32 KB, only what the kernel reads is written.
struct Launch {
  explicit Launch(const CudaExecutable& executable)
      : inputs(block.pointers, executable.num_inputs()),
        outputs(block.pointers + executable.num_inputs(), executable.num_outputs()),
        sizes(block.params.scalars, executable.num_scalars()) {
    std::fill(std::begin(block.params.scalars), std::end(block.params.scalars), 0);
  }

  void make(CudaExecutable& executable, uint64_t stream) {
    // Launching blocks while the device's queue is full, and the executable's mutex must not be awaited under the GIL.
    const py::gil_scoped_release release;
    executable.run(block, reinterpret_cast<cu::Stream>(stream));
  }

  LaunchBlock block;
  const std::span<uint64_t> inputs, outputs;
  const std::span<int64_t> sizes;
};

void run(CudaExecutable& executable, py::handle inputs, py::handle outputs, py::handle scalars, uint64_t stream) {
  Launch launch(executable);
  read_addresses(inputs, "input", launch.inputs);
  read_addresses(outputs, "output", launch.outputs);
  read_sizes(scalars, launch.sizes);
  launch.make(executable, stream);
}

void call(CudaExecutable& executable, Arguments& arguments, const py::tuple& args, py::handle outputs,
          uint64_t stream) {
  Launch launch(executable);
  arguments.read(args, launch.inputs, launch.sizes);
  read_addresses(outputs, "output", launch.outputs);
  launch.make(executable, stream);
}

// `owner`, shared with code that does not hold Python's lock.
std::shared_ptr<void> shared(py::object owner) {
  return {new py::object(std::move(owner)), [](py::object* held) {
            const py::gil_scoped_acquire acquire;
            delete held;
          }};
}

void join(CudaExecutable& executable, int rank, const std::vector<uint64_t>& mailboxes, py::object owner) {
  std::shared_ptr<void> kept = shared(std::move(owner));
  const py::gil_scoped_release release;
  executable.join(rank, mailboxes, std::move(kept));
}

std::vector<LaunchTimes> stop_recording(CudaExecutable& executable) {
  const py::gil_scoped_release release;
  return executable.stop_recording();
}

// Any object with CudaProgram's fields: generated, or handwritten by a test.
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
  MPK_READ(phase_experts);
  MPK_READ(ranks);
  MPK_READ(group);
  MPK_READ(exchange_key);
  MPK_READ(mailbox_bytes);
#undef MPK_READ
  for (const MatrixMap::Fields& fields : object.attr("maps").cast<std::vector<MatrixMap::Fields>>())
    program.maps.push_back(MatrixMap::of(fields));
  const std::string table = py::bytes(object.attr("table"));
  program.table.assign(table.begin(), table.end());
  return program;
}

void bind_executable(py::module_& m) {
  py::class_<CudaExecutable, std::shared_ptr<CudaExecutable>>(
      m, "CudaExecutable", "A megakernel loaded on one device. CUDA graphs keep what their launches need of it.")
      .def(py::init([](py::handle program, const py::bytes& image, int device, uint64_t watchdog_ns) {
             const CudaProgram fields = read_program(program);
             const std::string copy = image;
             const py::gil_scoped_release release;
             return std::make_shared<CudaExecutable>(fields, copy, device, watchdog_ns);
           }),
           py::arg("program"), py::arg("image"), py::arg("device"), py::arg("watchdog_ns"))
      .def("run", &run, py::arg("inputs"), py::arg("outputs"), py::arg("scalars"), py::arg("stream"),
           "Launch on a stream (its handle as int) and return at once. Inputs and outputs: tensors of this device, or "
           "addresses.\n\n"
           "Raises ValueError for a wrong number of arguments or an unaligned address, MegakernelTimeout when an "
           "earlier launch was\n"
           "aborted, LaunchError when the driver refuses.")
      .def("call", &call, py::arg("arguments"), py::arg("args"), py::arg("outputs"), py::arg("stream"),
           "run, with inputs and sizes from a call's arguments.")
      .def("check", &CudaExecutable::check, py::call_guard<py::gil_scoped_release>(),
           "Raise MegakernelTimeout when a launch was aborted since the last call. Does not wait for launches in "
           "flight.")
      .def("join", &join, py::arg("rank"), py::arg("mailboxes"), py::arg("owner") = py::none(),
           "Exchange with other ranks through mailboxes at these addresses, in the order of ranks, each of "
           "mailbox_bytes that are zero. The executable keeps their owner, as do CUDA graphs that launch it. Launches "
           "are counted anew. Raises ValueError if they are not as many as the program's ranks.")
      .def_property_readonly("is_torn", &CudaExecutable::is_torn,
                             "Whether MegakernelTimeout was raised for a launch of several ranks: all must join again.")
      .def_property_readonly("ranks", &CudaExecutable::ranks)
      .def_property_readonly("group", &CudaExecutable::group)
      .def_property_readonly("exchange_key", &CudaExecutable::exchange_key)
      .def_property_readonly("mailbox_bytes", &CudaExecutable::mailbox_bytes)
      .def_property_readonly("is_profiled", &CudaExecutable::is_profiled)
      .def_property_readonly("phase_experts", &CudaExecutable::phase_experts,
                             "Of each phase, how many experts it chooses from, and the bytes of one expert's weights.")
      .def("start_recording", &CudaExecutable::start_recording, py::call_guard<py::gil_scoped_release>(),
           "Record a profiled kernel's stamps, from the next launch on. Raises ValueError when it is not profiled.")
      .def(
          "stop_recording", [](CudaExecutable& e) { return as_bytes(stop_recording(e)); },
          "Wait for all launches, and return what CpuExecutable.stop_recording does of each since start_recording, in "
          "any "
          "order.")
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
  bind_executable(m);
  m.def("synchronize_captured", &CudaExecutable::synchronize_captured, py::call_guard<py::gil_scoped_release>(),
        "Wait for the launches of all executables that CUDA graphs keep or have kept, and free those that nothing "
        "keeps any more. Returns how many are left. Raises MegakernelTimeout when a launch was aborted.");
}

}  // namespace mpk
