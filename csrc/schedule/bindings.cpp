#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "torch_mpk/schedule/schedule.h"

namespace py = pybind11;

namespace mpk {

void bind_schedule(py::module_& m) {
  py::class_<Target>(m, "Target")
      .def(py::init([](std::string device, int arch, int num_workers, int64_t smem_bytes, bool fuse, bool polled) {
             return Target{std::move(device), arch, num_workers, smem_bytes, fuse, polled};
           }),
           py::arg("device"), py::arg("arch") = 0, py::arg("num_workers") = 1, py::arg("smem_bytes") = 0,
           py::arg("fuse") = true, py::arg("polled") = false)
      .def_readonly("device", &Target::device)
      .def_readonly("arch", &Target::arch)
      .def_readonly("num_workers", &Target::num_workers)
      .def_readonly("smem_bytes", &Target::smem_bytes)
      .def_readonly("fuse", &Target::fuse)
      .def_readonly("polled", &Target::polled);

  py::class_<Job>(m, "Job")
      .def(py::init([](std::vector<int> prologue, std::vector<int> body, std::vector<int> epilogue,
                       std::vector<int> loader_waits, std::vector<int> unstored) {
             Job job;
             job.prologue = std::move(prologue);
             job.body = std::move(body);
             job.epilogue = std::move(epilogue);
             job.loader_waits = std::move(loader_waits);
             job.unstored = std::move(unstored);
             return job;
           }),
           py::arg("prologue"), py::arg("body"), py::arg("epilogue"), py::arg("loader_waits"), py::arg("unstored"))
      .def_readonly("prologue", &Job::prologue)
      .def_readonly("body", &Job::body)
      .def_readonly("epilogue", &Job::epilogue)
      .def_readonly("num_tiles", &Job::num_tiles)
      .def_readonly("loader_waits", &Job::loader_waits)
      .def_readonly("unstored", &Job::unstored)
      .def_property_readonly("assignment",
                             [](const Job& j) { return j.assignment == Assignment::kClaimed ? "claimed" : "static"; });

  py::class_<Phase>(m, "Phase")
      .def(py::init(
               [](std::vector<Job> jobs, std::vector<int> waits) { return Phase{std::move(jobs), std::move(waits)}; }),
           py::arg("jobs"), py::arg("waits"))
      .def_readonly("jobs", &Phase::jobs)
      .def_readonly("waits", &Phase::waits);

  py::class_<Schedule>(
      m, "Schedule", "Made by make_schedule; the constructor is for schedules made by hand, which `validate` must see.")
      .def(py::init([](const TBGraph& graph, const Target& target, std::vector<Phase> phases,
                       std::vector<int64_t> workspace_offsets, int64_t workspace_bytes, int64_t polled_bytes,
                       std::vector<bool> polled) {
             return Schedule{graph,           target,       std::move(phases), std::move(workspace_offsets),
                             workspace_bytes, polled_bytes, std::move(polled)};
           }),
           py::arg("graph"), py::arg("target"), py::arg("phases"), py::arg("workspace_offsets"),
           py::arg("workspace_bytes"), py::arg("polled_bytes"), py::arg("polled"))
      .def_readonly("graph", &Schedule::graph)
      .def_readonly("target", &Schedule::target)
      .def_readonly("phases", &Schedule::phases)
      .def_readonly("workspace_offsets", &Schedule::workspace_offsets)
      .def_readonly("workspace_bytes", &Schedule::workspace_bytes)
      .def_readonly("polled_bytes", &Schedule::polled_bytes)
      .def_readonly("polled", &Schedule::polled)
      .def("to_json", &Schedule::to_json);

  m.def("make_schedule", &make_schedule, py::arg("graph"), py::arg("target"),
        "Place the graph's nodes on the target. A pure function.");
  m.def("validate", &validate, py::arg("schedule"),
        "Raise RuntimeError, naming phase, node and buffer, when the schedule is unsound.");
}

}  // namespace mpk
