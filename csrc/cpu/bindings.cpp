#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../arguments.h"
#include "../errors.h"
#include "../launch_times.h"
#include "torch_mpk/cpu/executable.h"
#include "torch_mpk/cpu/thread_pool.h"

namespace py = pybind11;

namespace mpk {
namespace {

using cpu::CpuExecutable;

void run_at(CpuExecutable& executable, const std::vector<uint64_t>& inputs, const std::vector<uint64_t>& outputs,
            const std::vector<int64_t>& scalars) {
  const auto pointers = [](const std::vector<uint64_t>& addresses) {
    std::vector<void*> out;
    for (uint64_t address : addresses) out.push_back(reinterpret_cast<void*>(address));
    return out;
  };
  executable.forget_lock_of_another_process();
  const py::gil_scoped_release release;
  executable.run(pointers(inputs), pointers(outputs), scalars);
}

std::vector<LaunchTimes> stop_recording(CpuExecutable& executable) {
  executable.forget_lock_of_another_process();
  const py::gil_scoped_release release;
  return executable.stop_recording();
}

std::vector<uint64_t> addresses(const py::sequence& items, const char* what) {
  std::vector<uint64_t> out(items.size());
  read_addresses(items, what, out);
  return out;
}

// Calls fn(operands, attrs, phase), where operands is {name: (address, dtype, shape, strides)}. It is called, and at
// last freed, with the GIL.
cpu::Reference python_reference(const py::function& fn) {
  const std::shared_ptr<py::function> shared(new py::function(fn), [](py::function* f) {
    py::gil_scoped_acquire gil;
    delete f;
  });
  return [shared](const Node& node, size_t phase, std::span<uint8_t* const> addresses) {
    py::gil_scoped_acquire gil;
    py::dict operands;
    for (size_t i = 0; i < addresses.size(); i++) {
      const Tensor& t = node.operands[i].tensor;
      operands[py::str(node.operands[i].name)] =
          py::make_tuple(reinterpret_cast<uintptr_t>(addresses[i]), info(t.dtype).name, py::tuple(py::cast(t.shape)),
                         py::tuple(py::cast(t.strides)));
    }
    (*shared)(operands, py::cast(node.attrs), std::to_string(phase) + " " + node.label);
  };
}

}  // namespace

// Lets Python handle its signals, such as an interrupt, and throws what handlers raise.
void look_for_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// A list of what Python sees, with nothing to follow. NOLINTNEXTLINE(readability-function-size)
void bind_cpu(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const cpu::RankLost& error) {
      set_error("RankLostError", error);
    }
  });

  py::class_<CpuExecutable>(m, "CpuExecutable", "Runs an unfused schedule on worker threads of this process.")
      .def(py::init([](Schedule schedule, int num_threads, const std::string& isa,
                       const std::map<int, uintptr_t>& compiled) {
             std::map<int, const TileCode*> code;
             for (const auto& [node, address] : compiled) code[node] = reinterpret_cast<const TileCode*>(address);
             return std::make_unique<CpuExecutable>(std::move(schedule), num_threads, isa, code);
           }),
           py::arg("schedule"), py::arg("num_threads") = 0, py::arg("isa") = "",
           py::arg("compiled") = std::map<int, uintptr_t>{},
           "num_threads 0 is one per processor; isa '' is the fastest of cpu_isas(); compiled has the addresses of "
           "nodes' TileCode. Raises ValueError naming the node that cannot run.")
      .def(
          "run",
          [](CpuExecutable& self, const py::sequence& inputs, const py::sequence& outputs,
             const std::vector<int64_t>& scalars,
             int64_t) { run_at(self, addresses(inputs, "input"), addresses(outputs, "output"), scalars); },
          py::arg("inputs"), py::arg("outputs"), py::arg("scalars") = std::vector<int64_t>{}, py::arg("stream") = 0,
          "Execute once. Inputs and outputs are tensors or addresses in the order of the graph's buffer indices; "
          "scalars are the "
          "call's SymInts; stream is ignored. Raises ValueError when something is missing.")
      .def(
          "call",
          [](CpuExecutable& self, Arguments& arguments, const py::tuple& args, const py::sequence& outputs, int64_t) {
            std::vector<uint64_t> inputs(arguments.num_inputs());
            std::vector<int64_t> sizes(arguments.num_sizes());
            arguments.read(args, inputs, sizes);
            run_at(self, inputs, addresses(outputs, "output"), sizes);
          },
          py::arg("arguments"), py::arg("args"), py::arg("outputs"), py::arg("stream") = 0,
          "run, with inputs and sizes taken out of the arguments of a call.")
      .def(
          "join",
          [](CpuExecutable& self, int rank, const std::vector<uintptr_t>& mailboxes, int64_t watchdog_ns) {
            std::vector<uint8_t*> bases;
            for (uintptr_t address : mailboxes) bases.push_back(reinterpret_cast<uint8_t*>(address));
            self.join(rank, std::move(bases), watchdog_ns, look_for_signals);
          },
          py::arg("rank"), py::arg("mailboxes"), py::arg("watchdog_ns"),
          "Exchange with other ranks through mailboxes at these addresses, in the order of ranks, each of "
          "mailbox_bytes "
          "that are zero. Launches are counted anew. Raises ValueError where there are not as many as the schedule "
          "says.")
      .def_property_readonly("is_torn", &CpuExecutable::is_torn,
                             "Whether a run of several ranks has raised: all must join again.")
      .def_property_readonly("ranks", [](const CpuExecutable& e) { return e.mailboxes().ranks; })
      .def_property_readonly("group", [](const CpuExecutable& e) { return e.mailboxes().group; })
      .def_property_readonly("exchange_key", [](const CpuExecutable& e) { return e.mailboxes().key; })
      .def_property_readonly("mailbox_bytes", [](const CpuExecutable& e) { return e.mailboxes().bytes(); })
      .def(
          "set_reference",
          [](CpuExecutable& self, const std::string& task, const py::function& fn) {
            self.set_reference(task, python_reference(fn));
          },
          py::arg("task"), py::arg("fn"),
          "Execute the nodes of a task that has no CPU kernel with fn(operands, attrs, phase), where operands maps "
          "names "
          "to (address, dtype, shape, strides) and phase is number and name. It is called on the thread that calls "
          "run, "
          "and writes its results in place.")
      .def(
          "expect_index",
          [](CpuExecutable& self, int input, int64_t num_elements, int64_t stride, int element_bytes, int64_t bound,
             const std::string& message, int times, int less) {
            self.expect_index({input, num_elements, stride, element_bytes, bound, message, times, less});
          },
          py::arg("input"), py::arg("num_elements"), py::arg("stride"), py::arg("element_bytes"), py::arg("bound"),
          py::arg("message"), py::arg("times") = -1, py::arg("less") = -1,
          "Every run first checks that the elements of an input (int64 or int32, `stride` elements apart) are in [0, "
          "bound), or raises IndexError with the message and the element, and writes nothing. `times` and `less` "
          "number scalars of the run, which multiply the elements and reduce the bound.")
      .def_property_readonly("is_profiled", [](const CpuExecutable&) { return true; })
      .def(
          "start_recording",
          [](CpuExecutable& self) {
            self.forget_lock_of_another_process();
            const py::gil_scoped_release release;
            self.start_recording();
          },
          "Record the times of workers' phases, from the next run on.")
      .def(
          "stop_recording", [](CpuExecutable& self) { return as_bytes(stop_recording(self)); },
          "PhaseTimes[num_workers][num_phases] of each run since start_recording, and behind them, where ranks "
          "exchange, "
          "int64[num_workers][num_phases][ranks]: nanoseconds for which a worker has waited for each rank. Where there "
          "are experts, int64[num_phases][experts of the phase with most] is last: pairs of a row and a choice.")
      .def_property_readonly("phase_experts", &CpuExecutable::phase_experts,
                             "Of each phase, how many experts it chooses from, and the bytes of one expert's weights.")
      .def_property_readonly("missing_references", &CpuExecutable::missing_references)
      .def_property_readonly("num_threads", &CpuExecutable::num_threads)
      .def_property_readonly("scratch_is_intact", &CpuExecutable::scratch_is_intact,
                             "Whether nothing was written behind the last worker's scratch memory.")
      .def_property_readonly("isa",
                             [](const CpuExecutable& self) { return cpu::kIsaNames[static_cast<int>(self.isa())]; });

  m.def("cpu_enter_run", &cpu::enter_parallel_run,
        "Marks the calling thread as one that a reference began: its runs may not wait for the runtime's threads.");

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
        const cpu::Microkernels& microkernels = cpu::microkernels(cpu::supported_isas().back());
        const auto* words = reinterpret_cast<const uint64_t*>(address);
        const int64_t n = num_threads == 0 ? cpu::num_available_cpus() : num_threads;
        std::atomic<uint64_t> sum{0};
        py::gil_scoped_release release;
        cpu::parallel_run(static_cast<int>(n), [&](int worker, cpu::SpinBarrier&) {
          const int64_t begin = num_words * worker / n, end = num_words * (worker + 1) / n;
          sum += microkernels.read_words(words + begin, end - begin);
        });
        return sum.load();
      },
      py::arg("address"), py::arg("num_words"), py::arg("num_threads") = 0,
      "Add up 64-bit words with the runtime's threads: how fast memory can be read, the ceiling of a decode step.");
}

}  // namespace mpk
