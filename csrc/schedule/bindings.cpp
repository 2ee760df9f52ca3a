#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "torch_mpk/schedule/schedule.h"

namespace py = pybind11;

namespace mpk {

void bind_schedule(py::module_& m) {
  py::class_<Target>(m, "Target")
      .def(py::init([](std::string device, int arch, int num_workers, int64_t smem_bytes, bool fuse) {
             return Target{std::move(device), arch, num_workers, smem_bytes, fuse};
           }),
           py::arg("device"), py::arg("arch") = 0, py::arg("num_workers") = 1, py::arg("smem_bytes") = 0, py::arg("fuse") = true)
      .def_readonly("device", &Target::device)
      .def_readonly("arch", &Target::arch)
      .def_readonly("num_workers", &Target::num_workers)
      .def_readonly("smem_bytes", &Target::smem_bytes)
      .def_readonly("fuse", &Target::fuse);

  py::class_<Job>(m, "Job")
      .def_readonly("prologue", &Job::prologue)
      .def_readonly("body", &Job::body)
      .def_readonly("epilogue", &Job::epilogue)
      .def_readonly("num_tiles", &Job::num_tiles)
      .def_readonly("loader_waits", &Job::loader_waits)
      .def_readonly("unstored", &Job::unstored)
      .def_property_readonly("assignment", [](const Job& j) { return j.assignment == Assignment::kClaimed ? "claimed" : "static"; });

  py::class_<Phase>(m, "Phase").def_readonly("jobs", &Phase::jobs).def_readonly("waits", &Phase::waits);

  py::class_<Schedule>(m, "Schedule")
      .def_readonly("graph", &Schedule::graph)
      .def_readonly("target", &Schedule::target)
      .def_readonly("phases", &Schedule::phases)
      .def_readonly("workspace_offsets", &Schedule::workspace_offsets)
      .def_readonly("workspace_bytes", &Schedule::workspace_bytes)
      .def("to_json", &Schedule::to_json);

  m.def("make_schedule", &make_schedule, py::arg("graph"), py::arg("target"), "Place the graph's nodes on the target. A pure function.");
  m.def("validate", &validate, py::arg("schedule"), "Raise RuntimeError, naming phase, node and buffer, when the schedule is unsound.");
}

}  // namespace mpk
