#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "torch_mpk/cpu/executable.h"
#include "torch_mpk/cpu/thread_pool.h"

namespace py = pybind11;

namespace mpk {
namespace {

using cpu::CpuExecutable;

// The addresses of a sequence's items: tensors (anything with data_ptr()) or integers.
std::vector<void*> pointers(const py::handle& items, const char* what) {
  static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
  const auto sequence =
      py::reinterpret_steal<py::object>(PySequence_Fast(items.ptr(), "run: inputs and outputs must be sequences"));
  if (!sequence) throw py::error_already_set();
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(sequence.ptr());
  std::vector<void*> out(n);
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject* item = PySequence_Fast_GET_ITEM(sequence.ptr(), i);
    py::object address;
    if (!PyLong_Check(item)) {
      address = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(item, data_ptr));
      if (!address && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        throw py::type_error(std::string("run: ") + what + " " + std::to_string(i) + " is a " + Py_TYPE(item)->tp_name +
                             ", expected a tensor (an object with data_ptr()) or an address");
      }
      if (!address) throw py::error_already_set();
      item = address.ptr();
    }
    out[i] = PyLong_AsVoidPtr(item);
    if (out[i] == nullptr && PyErr_Occurred()) throw py::error_already_set();
  }
  return out;
}

// fn(operands, attrs), operands being {name: (address, dtype, shape, strides)}. It is called, and in the end freed,
// with the GIL.
cpu::Reference python_reference(const py::function& fn) {
  const std::shared_ptr<py::function> shared(new py::function(fn), [](py::function* f) {
    py::gil_scoped_acquire gil;
    delete f;
  });
  return [shared](const Node& node, std::span<uint8_t* const> addresses) {
    py::gil_scoped_acquire gil;
    py::dict operands;
    for (size_t i = 0; i < addresses.size(); i++) {
      const Tensor& t = node.operands[i].tensor;
      operands[py::str(node.operands[i].name)] =
          py::make_tuple(reinterpret_cast<uintptr_t>(addresses[i]), info(t.dtype).name, py::tuple(py::cast(t.shape)),
                         py::tuple(py::cast(t.strides)));
    }
    (*shared)(operands, py::cast(node.attrs));
  };
}

}  // namespace

void bind_cpu(py::module_& m) {
  py::class_<CpuExecutable>(m, "CpuExecutable", "Runs an unfused schedule on worker threads of this process.")
      .def(py::init<Schedule, int, const std::string&>(), py::arg("schedule"), py::arg("num_threads") = 0,
           py::arg("isa") = "",
           "num_threads 0 is one per processor; isa '' is the fastest of cpu_isas(). Raises ValueError naming the node "
           "that cannot run.")
      .def(
          "run",
          [](CpuExecutable& self, const py::object& inputs, const py::object& outputs,
             const std::vector<int64_t>& scalars, int64_t) {
            const std::vector<void*> in = pointers(inputs, "input"), out = pointers(outputs, "output");
            self.forget_lock_of_another_process();
            py::gil_scoped_release release;
            self.run(in, out, scalars);
          },
          py::arg("inputs"), py::arg("outputs"), py::arg("scalars") = std::vector<int64_t>{}, py::arg("stream") = 0,
          "Execute once. Inputs and outputs are tensors or addresses in the order of the graph's buffer indices; "
          "scalars are the "
          "call's SymInts; stream is ignored. Raises ValueError when something is missing.")
      .def(
          "set_reference",
          [](CpuExecutable& self, const std::string& task, const py::function& fn) {
            self.set_reference(task, python_reference(fn));
          },
          py::arg("task"), py::arg("fn"),
          "Execute the nodes of a task that has no CPU body with fn(operands, attrs), where operands maps names to "
          "(address, dtype, shape, "
          "strides). It runs on the calling thread and writes its results in place.")
      .def(
          "expect_index",
          [](CpuExecutable& self, int input, int64_t num_elements, int64_t stride, int element_bytes, int64_t bound,
             const std::string& message) {
            self.expect_index({input, num_elements, stride, element_bytes, bound, message});
          },
          py::arg("input"), py::arg("num_elements"), py::arg("stride"), py::arg("element_bytes"), py::arg("bound"),
          py::arg("message"),
          "Every run first checks that the elements of an input (int64 or int32, `stride` elements apart) are in [0, "
          "bound), or "
          "raises IndexError with the message and the element, and writes nothing.")
      .def_property_readonly("missing_references", &CpuExecutable::missing_references)
      .def_property_readonly("num_threads", &CpuExecutable::num_threads)
      .def_property_readonly("isa",
                             [](const CpuExecutable& self) { return cpu::kIsaNames[static_cast<int>(self.isa())]; });

  m.def(
      "cpu_isas",
      [] {
        std::vector<std::string> names;
        for (cpu::Isa isa : cpu::supported_isas()) names.emplace_back(cpu::kIsaNames[static_cast<int>(isa)]);
        return names;
      },
      "The instruction-set tiers this machine can run, slowest first.");

  m.def(
      "cpu_read_words",
      [](uintptr_t address, int64_t num_words, int num_threads) {
        const cpu::Kernels& kernels = cpu::kernels(cpu::supported_isas().back());
        const auto* words = reinterpret_cast<const uint64_t*>(address);
        const int64_t n = num_threads == 0 ? cpu::num_available_cpus() : num_threads;
        std::atomic<uint64_t> sum{0};
        py::gil_scoped_release release;
        cpu::parallel_run(static_cast<int>(n), [&](int worker, cpu::SpinBarrier&) {
          const int64_t begin = num_words * worker / n, end = num_words * (worker + 1) / n;
          sum += kernels.read_words(words + begin, end - begin);
        });
        return sum.load();
      },
      py::arg("address"), py::arg("num_words"), py::arg("num_threads") = 0,
      "Add up 64-bit words with the runtime's threads: how fast memory can be read, the ceiling of a decode step.");
}

}  // namespace mpk
