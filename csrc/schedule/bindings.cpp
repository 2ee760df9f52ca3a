#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "passes.h"
#include "torch_mpk/schedule/schedule.h"

namespace py = pybind11;

namespace mpk {
namespace {

constexpr const char* kAssignmentNames[] = {"static", "claimed"};  // in the order of Assignment

Assignment parse_assignment(const std::string& name) {
  if (name == kAssignmentNames[0]) return Assignment::kStatic;
  if (name == kAssignmentNames[1]) return Assignment::kClaimed;
  throw std::invalid_argument("assignment '" + name + "' is neither static nor claimed");
}

// What `of` says of each phase.
template <class T>
std::vector<T> of_phases(const Schedule& schedule, T (*of)(const Schedule&, const Phase&)) {
  std::vector<T> all;
  for (const Phase& phase : schedule.phases) all.push_back(of(schedule, phase));
  return all;
}

}  // namespace

// A list of what Python sees, with nothing to follow. NOLINTNEXTLINE(readability-function-size)
void bind_schedule(py::module_& m) {
  py::class_<Target>(m, "Target")
      .def(py::init([](std::string device, int arch, int num_workers, int64_t smem_bytes, bool fuse, bool polled,
                       int device_arch) {
             return Target{
                 std::move(device), arch, num_workers, smem_bytes, fuse, polled, device_arch ? device_arch : arch};
           }),
           py::arg("device"), py::arg("arch") = 0, py::arg("num_workers") = 1, py::arg("smem_bytes") = 0,
           py::arg("fuse") = true, py::arg("polled") = false, py::arg("device_arch") = 0)
      .def_readonly("device", &Target::device)
      .def_readonly("arch", &Target::arch)
      .def_readonly("num_workers", &Target::num_workers)
      .def_readonly("smem_bytes", &Target::smem_bytes)
      .def_readonly("fuse", &Target::fuse)
      .def_readonly("polled", &Target::polled)
      .def_readonly("device_arch", &Target::device_arch);

  py::class_<WarpLayout>(m, "WarpLayout")
      .def(py::init([](int consumers, int loaders, int registers, int max_slots, int64_t slot_bytes, int full_arrivals,
                       int empty_arrivals, int warpgroups) {
             return WarpLayout{consumers,  loaders,       registers,      max_slots,
                               slot_bytes, full_arrivals, empty_arrivals, warpgroups};
           }),
           py::arg("consumers"), py::arg("loaders"), py::arg("registers"), py::arg("max_slots"), py::arg("slot_bytes"),
           py::arg("full_arrivals"), py::arg("empty_arrivals"), py::arg("warpgroups") = 0)
      .def_readonly("warpgroups", &WarpLayout::warpgroups)
      .def_readonly("full_arrivals", &WarpLayout::full_arrivals)
      .def_readonly("empty_arrivals", &WarpLayout::empty_arrivals)
      .def_readonly("consumers", &WarpLayout::consumers)
      .def_readonly("loaders", &WarpLayout::loaders)
      .def_readonly("registers", &WarpLayout::registers)
      .def_readonly("max_slots", &WarpLayout::max_slots)
      .def_readonly("slot_bytes", &WarpLayout::slot_bytes);

  py::class_<Tickets>(m, "Tickets")
      .def(py::init([](uint32_t size, uint32_t own, uint32_t drawn) { return Tickets{size, own, drawn}; }),
           py::arg("size") = 0, py::arg("own") = 0, py::arg("drawn") = 0)
      .def_readonly("size", &Tickets::size)
      .def_readonly("own", &Tickets::own)
      .def_readonly("drawn", &Tickets::drawn);

  py::class_<TileShape>(m, "TileShape")
      .def(py::init([](int64_t tile_rows, int64_t parts, int64_t chunk_parts, int64_t row_bytes, int64_t chunk_bytes,
                       int64_t run, int64_t in_flight, bool shares_entries, int64_t pass_tiles, int64_t x_rows,
                       int64_t split, int64_t window_bytes, int64_t turn_tiles) {
             return TileShape{tile_rows,      parts,      chunk_parts, row_bytes, chunk_bytes,  run,       in_flight,
                              shares_entries, pass_tiles, x_rows,      split,     window_bytes, turn_tiles};
           }),
           py::arg("tile_rows"), py::arg("parts"), py::arg("chunk_parts"), py::arg("row_bytes"), py::arg("chunk_bytes"),
           py::arg("run"), py::arg("in_flight"), py::arg("shares_entries"), py::arg("pass_tiles"),
           py::arg("x_rows") = 0, py::arg("split") = 1, py::arg("window_bytes") = 0, py::arg("turn_tiles") = 0)
      .def_readonly("x_rows", &TileShape::x_rows)
      .def_readonly("tile_rows", &TileShape::tile_rows)
      .def_readonly("parts", &TileShape::parts)
      .def_readonly("chunk_parts", &TileShape::chunk_parts)
      .def_readonly("row_bytes", &TileShape::row_bytes)
      .def_readonly("chunk_bytes", &TileShape::chunk_bytes)
      .def_readonly("run", &TileShape::run)
      .def_readonly("in_flight", &TileShape::in_flight)
      .def_readonly("shares_entries", &TileShape::shares_entries)
      .def_readonly("pass_tiles", &TileShape::pass_tiles)
      .def_readonly("split", &TileShape::split)
      .def_readonly("window_bytes", &TileShape::window_bytes)
      .def_readonly("turn_tiles", &TileShape::turn_tiles);

  py::class_<Pieces>(m, "Pieces")
      .def(py::init([](int64_t count, int64_t of_row, int64_t results, int64_t few_results, int64_t result_bytes,
                       int64_t offset, int64_t tiles, int64_t few_of_row, bool overlap, int64_t positions) {
             return Pieces{count,  of_row, results,    few_results, result_bytes,
                           offset, tiles,  few_of_row, overlap,     positions};
           }),
           py::arg("count"), py::arg("of_row"), py::arg("results"), py::arg("few_results"), py::arg("result_bytes"),
           py::arg("offset"), py::arg("tiles"), py::arg("few_of_row"), py::arg("overlap"), py::arg("positions"))
      .def_readonly("count", &Pieces::count)
      .def_readonly("of_row", &Pieces::of_row)
      .def_readonly("results", &Pieces::results)
      .def_readonly("few_results", &Pieces::few_results)
      .def_readonly("result_bytes", &Pieces::result_bytes)
      .def_readonly("offset", &Pieces::offset)
      .def_readonly("tiles", &Pieces::tiles)
      .def_readonly("few_of_row", &Pieces::few_of_row)
      .def_readonly("overlap", &Pieces::overlap)
      .def_readonly("positions", &Pieces::positions);

  py::class_<RowSums>(m, "RowSums")
      .def(py::init([](int64_t count, int64_t offset) { return RowSums{count, offset}; }), py::arg("count"),
           py::arg("offset"))
      .def_readonly("count", &RowSums::count)
      .def_readonly("offset", &RowSums::offset);

  py::class_<QueryTiles>(m, "QueryTiles")
      .def(py::init([](int64_t heads, int64_t rows, int64_t positions, int64_t ends) {
             return QueryTiles{heads, rows, positions, ends};
           }),
           py::arg("heads"), py::arg("rows"), py::arg("positions"), py::arg("ends") = 0)
      .def_readonly("heads", &QueryTiles::heads)
      .def_readonly("rows", &QueryTiles::rows)
      .def_readonly("positions", &QueryTiles::positions)
      .def_readonly("ends", &QueryTiles::ends);

  py::class_<Job>(m, "Job")
      .def(py::init([](std::vector<int> prologue, std::vector<int> body, std::vector<int> epilogue,
                       std::vector<int> loader_waits, std::vector<int> unstored, int64_t num_tiles,
                       const std::string& assignment, Tickets tickets, std::optional<TileShape> shape, bool is_staged,
                       int64_t staged_bytes, std::optional<Pieces> pieces, std::optional<RowSums> row_sums,
                       std::optional<QueryTiles> queries) {
             return Job{std::move(prologue),
                        std::move(body),
                        std::move(epilogue),
                        num_tiles,
                        parse_assignment(assignment),
                        tickets,
                        shape,
                        is_staged,
                        staged_bytes,
                        pieces,
                        row_sums,
                        queries,
                        std::move(loader_waits),
                        std::move(unstored)};
           }),
           py::arg("prologue"), py::arg("body"), py::arg("epilogue"), py::arg("loader_waits"), py::arg("unstored"),
           py::arg("num_tiles"), py::arg("assignment"), py::arg("tickets"), py::arg("shape"), py::arg("is_staged"),
           py::arg("staged_bytes"), py::arg("pieces"), py::arg("row_sums"), py::arg("queries"))
      .def_readonly("prologue", &Job::prologue)
      .def_readonly("body", &Job::body)
      .def_readonly("epilogue", &Job::epilogue)
      .def_readonly("num_tiles", &Job::num_tiles)
      .def_readonly("tickets", &Job::tickets)
      .def_readonly("shape", &Job::shape)
      .def_readonly("is_staged", &Job::is_staged)
      .def_readonly("staged_bytes", &Job::staged_bytes)
      .def_readonly("pieces", &Job::pieces)
      .def_readonly("row_sums", &Job::row_sums)
      .def_readonly("queries", &Job::queries)
      .def_readonly("loader_waits", &Job::loader_waits)
      .def_readonly("unstored", &Job::unstored)
      .def_property_readonly("assignment",
                             [](const Job& j) { return kAssignmentNames[static_cast<int>(j.assignment)]; });

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
                       std::vector<bool> polled, const WarpLayout& warps) {
             return Schedule{graph,           target,       std::move(phases), std::move(workspace_offsets),
                             workspace_bytes, polled_bytes, std::move(polled), warps};
           }),
           py::arg("graph"), py::arg("target"), py::arg("phases"), py::arg("workspace_offsets"),
           py::arg("workspace_bytes"), py::arg("polled_bytes"), py::arg("polled"), py::arg("warps"))
      .def_readonly("graph", &Schedule::graph)
      .def_readonly("target", &Schedule::target)
      .def_readonly("phases", &Schedule::phases)
      .def_readonly("workspace_offsets", &Schedule::workspace_offsets)
      .def_readonly("workspace_bytes", &Schedule::workspace_bytes)
      .def_readonly("polled_bytes", &Schedule::polled_bytes)
      .def_readonly("polled", &Schedule::polled)
      .def_readonly("warps", &Schedule::warps)
      .def_property_readonly("phase_names", [](const Schedule& s) { return of_phases(s, phase_name); })
      .def_property_readonly("phase_bytes", [](const Schedule& s) { return of_phases(s, phase_bytes); })
      .def("to_json", &Schedule::to_json);

  m.def("make_schedule", &make_schedule, py::arg("graph"), py::arg("target"),
        "Place the graph's nodes on the target. A pure function.");
  m.def(
      "schedule_passes",
      [] {
        std::vector<std::string> names;
        for (const Pass& pass : passes()) names.emplace_back(pass.name);
        return names;
      },
      "The passes that make a schedule, in order.");
  m.def(
      "draft_schedule",
      [](const TBGraph& graph, const Target& target, const std::string& last_pass) {
        return make_draft(graph, target, last_pass).to_json();
      },
      py::arg("graph"), py::arg("target"), py::arg("last_pass"),
      "The schedule in the making behind a pass, as JSON: its jobs, which nodes they recompute, their levels, and the "
      "schedule as far as it is made. Raises ValueError, listing the passes, where there is none of that name.");
  m.def("validate", &validate, py::arg("schedule"),
        "Raise RuntimeError, naming phase, node and buffer, when the schedule is unsound.");
}

}  // namespace mpk
