#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include "kernel.h"
#include "passes.h"
#include "schedule_json.h"
#include "torch_mpk/schedule/mailboxes.h"
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

Input parse_input(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(Input::kEntries); i++)
    if (name == name_of(static_cast<Input>(i))) return static_cast<Input>(i);
  throw std::invalid_argument("no input comes '" + name + "'");
}

// The values of `of` for each phase.
template <class T>
std::vector<T> of_phases(const Schedule& schedule, T (*of)(const Schedule&, const Phase&)) {
  std::vector<T> all;
  for (const Phase& phase : schedule.phases) all.push_back(of(schedule, phase));
  return all;
}

void bind_mailboxes(py::module_& m) {
  py::class_<Mailbox>(m, "Mailbox")
      .def(py::init<int64_t, int64_t, int64_t>(), py::arg("turn"), py::arg("offset"), py::arg("words"))
      .def_readonly("turn", &Mailbox::turn)
      .def_readonly("offset", &Mailbox::offset)
      .def_readonly("words", &Mailbox::words);

  py::class_<Mailboxes>(
      m, "Mailboxes",
      "Made by place_mailboxes; the constructor is for mailboxes made by hand, which `validate_mailboxes` must see.")
      .def(py::init([](int ranks, std::string group, int64_t turns, bool by_turns, int64_t place_bytes,
                       std::map<int, Mailbox> of_nodes) {
             return Mailboxes{ranks, std::move(group), turns, by_turns, place_bytes, std::move(of_nodes), ""};
           }),
           py::arg("ranks"), py::arg("group"), py::arg("turns"), py::arg("by_turns"), py::arg("place_bytes"),
           py::arg("of_nodes"))
      .def_readonly("ranks", &Mailboxes::ranks)
      .def_readonly("group", &Mailboxes::group)
      .def_readonly("turns", &Mailboxes::turns)
      .def_readonly("by_turns", &Mailboxes::by_turns)
      .def_readonly("place_bytes", &Mailboxes::place_bytes)
      .def_readonly("of_nodes", &Mailboxes::of_nodes)
      .def("place_of", &Mailboxes::place_of, py::arg("launch"), py::arg("turn"));

  m.def("place_mailboxes", &place_mailboxes, py::arg("schedule"),
        "Where the exchanges of a schedule stand in the ranks' mailboxes. Raises ValueError where they are between "
        "several groups, or too many ranks.");
  m.def("validate_mailboxes", &validate_mailboxes, py::arg("schedule"), py::arg("mailboxes"),
        "Raise RuntimeError, naming a node, where ranks might wait for each other or read another exchange's words.");
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
                       int empty_arrivals, bool moves_registers, bool all_read_entries, bool loads_inputs,
                       bool hands_over_rows) {
             return WarpLayout{consumers,        loaders,       registers,      max_slots,
                               slot_bytes,       full_arrivals, empty_arrivals, moves_registers,
                               all_read_entries, loads_inputs,  hands_over_rows};
           }),
           py::arg("consumers"), py::arg("loaders"), py::arg("registers"), py::arg("max_slots"), py::arg("slot_bytes"),
           py::arg("full_arrivals"), py::arg("empty_arrivals"), py::arg("moves_registers"), py::arg("all_read_entries"),
           py::arg("loads_inputs"), py::arg("hands_over_rows"))
      .def_readonly("moves_registers", &WarpLayout::moves_registers)
      .def_readonly("all_read_entries", &WarpLayout::all_read_entries)
      .def_readonly("loads_inputs", &WarpLayout::loads_inputs)
      .def_readonly("hands_over_rows", &WarpLayout::hands_over_rows)
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
                       int64_t run, int64_t in_flight, int64_t readers, bool shares_entries, bool is_boxed,
                       int64_t x_rows) {
             return TileShape{tile_rows, parts,   chunk_parts,    row_bytes, chunk_bytes, run,
                              in_flight, readers, shares_entries, is_boxed,  x_rows};
           }),
           py::arg("tile_rows"), py::arg("parts"), py::arg("chunk_parts"), py::arg("row_bytes"), py::arg("chunk_bytes"),
           py::arg("run"), py::arg("in_flight"), py::arg("readers"), py::arg("shares_entries"), py::arg("is_boxed"),
           py::arg("x_rows"))
      .def_readonly("tile_rows", &TileShape::tile_rows)
      .def_readonly("parts", &TileShape::parts)
      .def_readonly("chunk_parts", &TileShape::chunk_parts)
      .def_readonly("row_bytes", &TileShape::row_bytes)
      .def_readonly("chunk_bytes", &TileShape::chunk_bytes)
      .def_readonly("run", &TileShape::run)
      .def_readonly("in_flight", &TileShape::in_flight)
      .def_readonly("readers", &TileShape::readers)
      .def_readonly("shares_entries", &TileShape::shares_entries)
      .def_readonly("is_boxed", &TileShape::is_boxed)
      .def_readonly("x_rows", &TileShape::x_rows);

  py::class_<Scratch>(m, "Scratch")
      .def(py::init([](int64_t bytes, int64_t offset) { return Scratch{bytes, offset}; }), py::arg("bytes"),
           py::arg("offset"))
      .def_readonly("bytes", &Scratch::bytes)
      .def_readonly("offset", &Scratch::offset);

  py::class_<RowSums>(m, "RowSums")
      .def(py::init([](int64_t count, int64_t offset) { return RowSums{count, offset}; }), py::arg("count"),
           py::arg("offset"))
      .def_readonly("count", &RowSums::count)
      .def_readonly("offset", &RowSums::offset);

  py::class_<Cut>(m, "Cut")
      .def(py::init([](std::string kernel, double cost_ns, int64_t num_tiles, std::optional<TileShape> shape,
                       const std::string& input, int64_t staged_bytes, std::optional<Scratch> scratch,
                       std::optional<RowSums> row_sums, const py::typing::Dict<py::str, py::int_>& fields) {
             Cut cut{std::move(kernel), cost_ns, num_tiles, shape, parse_input(input),
                     staged_bytes,      scratch, row_sums,  {}};
             for (const auto& [name, value] : fields)
               cut.fields.push_back({name.cast<std::string>(), value.cast<int64_t>()});
             return cut;
           }),
           py::arg("kernel"), py::arg("cost_ns"), py::arg("num_tiles"), py::arg("shape"), py::arg("input"),
           py::arg("staged_bytes"), py::arg("scratch"), py::arg("row_sums"), py::arg("fields"))
      .def_readonly("kernel", &Cut::kernel)
      .def_readonly("cost_ns", &Cut::cost_ns)
      .def_readonly("num_tiles", &Cut::num_tiles)
      .def_readonly("shape", &Cut::shape)
      .def_property_readonly("input", [](const Cut& cut) { return name_of(cut.input); })
      .def_readonly("staged_bytes", &Cut::staged_bytes)
      .def_readonly("scratch", &Cut::scratch)
      .def_readonly("row_sums", &Cut::row_sums)
      .def_property_readonly("fields", [](const Cut& cut) -> py::typing::Dict<py::str, py::int_> {
        py::typing::Dict<py::str, py::int_> fields;
        for (const Field& field : cut.fields) fields[py::str(field.name)] = field.value;
        return fields;
      });

  py::class_<Alternative>(m, "Alternative")
      .def_readonly("kernel", &Alternative::kernel)
      .def_readonly("cost_ns", &Alternative::cost_ns)
      .def_readonly("refusal", &Alternative::refusal);

  py::class_<Job>(m, "Job")
      .def(py::init([](std::vector<int> prologue, std::vector<int> body, std::string run, std::vector<int> epilogue,
                       Cut cut, std::vector<Alternative> others, const std::string& assignment, Tickets tickets,
                       std::vector<int> loader_waits, std::vector<int> unstored) {
             return Job{std::move(prologue),          std::move(body), std::move(run),
                        std::move(epilogue),          std::move(cut),  std::move(others),
                        parse_assignment(assignment), tickets,         std::move(loader_waits),
                        std::move(unstored)};
           }),
           py::arg("prologue"), py::arg("body"), py::arg("run"), py::arg("epilogue"), py::arg("cut"), py::arg("others"),
           py::arg("assignment"), py::arg("tickets"), py::arg("loader_waits"), py::arg("unstored"))
      .def_readonly("prologue", &Job::prologue)
      .def_readonly("body", &Job::body)
      .def_readonly("run", &Job::run)
      .def_readonly("epilogue", &Job::epilogue)
      .def_readonly("cut", &Job::cut)
      .def_readonly("others", &Job::others)
      .def_readonly("tickets", &Job::tickets)
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

  m.def("refusal", py::overload_cast<const TBGraph&, const Target&>(&refusal), py::arg("graph"), py::arg("target"),
        "Why no kernel takes one of the graph's nodes on a CUDA target, naming the node; None where kernels take all.");
  bind_mailboxes(m);

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
      "The draft behind a pass, as JSON: its jobs, the nodes that they recompute, their levels, and the schedule so "
      "far. Raises ValueError, listing the passes, if there is none of that name.");
  m.def("validate", &validate, py::arg("schedule"),
        "Raise RuntimeError, naming phase, node and buffer, when the schedule is unsound.");
}

}  // namespace mpk
