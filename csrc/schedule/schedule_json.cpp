#include "schedule_json.h"

#include <cmath>

#include "../graph/json.h"

namespace mpk {
namespace {

const char* truth(bool v) { return v ? "true" : "false"; }
std::string field(const char* name, int64_t v) { return "\"" + std::string(name) + "\": " + std::to_string(v); }

std::string shape_json(const TileShape& s) {
  return "{" + field("tile_rows", s.tile_rows) + ", " + field("parts", s.parts) + ", " +
         field("chunk_parts", s.chunk_parts) + ", " + field("row_bytes", s.row_bytes) + ", " +
         field("chunk_bytes", s.chunk_bytes) + ", " + field("entries", s.entries()) + ", " + field("run", s.run) +
         ", " + field("in_flight", s.in_flight) + (s.readers > 1 ? ", " + field("readers", s.readers) : "") +
         ", \"shares_entries\": " + truth(s.shares_entries) + (s.is_boxed ? ", \"is_boxed\": true" : "") +
         (s.x_rows > 0 ? ", " + field("x_rows", s.x_rows) : "") + "}";
}

std::string tickets_json(const Tickets& t) {
  return "{" + field("size", t.size) + ", " + field("own", t.own) + ", " + field("drawn", t.drawn) + "}";
}

std::string place_json(const char* what, int64_t amount, int64_t offset) {
  return "{" + field(what, amount) + ", " + field("offset", offset) + "}";
}

std::string fields_json(const std::vector<Field>& fields) {
  std::string text;
  for (const Field& each : fields) text += (text.empty() ? "" : ", ") + field(each.name.c_str(), each.value);
  return "{" + text + "}";
}

std::string others_json(const std::vector<Alternative>& others) {
  return json::array(others, [](const Alternative& other) {
    const std::string kernel = "{\"kernel\": " + json::quote(other.kernel) + ", ";
    return kernel +
           (other.refusal.empty() ? field("cost_ns", std::llround(other.cost_ns))
                                  : "\"refusal\": " + json::quote(other.refusal)) +
           "}";
  });
}

// A kernel's decisions.
std::string cut_json(const Cut& cut) {
  return "\"kernel\": " + (cut.kernel.empty() ? "null" : json::quote(cut.kernel)) + ", " +
         field("cost_ns", std::llround(cut.cost_ns)) + ", " + field("tiles", cut.num_tiles) +
         ", \"shape\": " + (cut.shape ? shape_json(*cut.shape) : "null") +
         ", \"input\": " + (cut.input == Input::kInPlace ? "null" : json::quote(name_of(cut.input))) + ", " +
         field("staged_bytes", cut.staged_bytes) +
         ", \"scratch\": " + (cut.scratch ? place_json("bytes", cut.scratch->bytes, cut.scratch->offset) : "null") +
         (cut.row_sums ? ", \"row_sums\": " + place_json("count", cut.row_sums->count, cut.row_sums->offset) : "") +
         ", \"fields\": " + fields_json(cut.fields);
}

std::string warps_json(const WarpLayout& w) {
  return "{" + field("consumers", w.consumers) + ", " + field("loaders", w.loaders) + ", " +
         field("threads", w.threads()) + ", " + field("registers", w.registers) + ", " +
         field("max_slots", w.max_slots) + ", " + field("slot_bytes", w.slot_bytes) + ", " +
         field("full_arrivals", w.full_arrivals) + ", " + field("empty_arrivals", w.empty_arrivals) +
         (w.moves_registers ? ", \"moves_registers\": true" : "") +
         (w.all_read_entries ? ", \"all_read_entries\": true" : "") +
         (w.loads_inputs ? ", \"loads_inputs\": true" : "") + (w.hands_over_rows ? ", \"hands_over_rows\": true" : "") +
         "}";
}

}  // namespace

const char* name_of(Input input) {
  constexpr const char* kNames[] = {"in place", "whole", "columns", "stages", "box stages", "entries"};  // in its order
  return kNames[static_cast<int>(input)];
}

std::string job_json(const TBGraph& graph, const Job& job) {
  const auto tasks = [&](const std::vector<int>& ids) {
    return json::array(ids, [&](int n) { return json::quote(std::to_string(n) + " " + graph.nodes()[n].title()); });
  };
  return "{\"prologue\": " + tasks(job.prologue) + ", \"body\": " + tasks(job.body) +
         (job.run.empty() ? "" : ", \"run\": " + json::quote(job.run)) + ", \"epilogue\": " + tasks(job.epilogue) +
         ", " + cut_json(job.cut) + (job.others.empty() ? "" : ", \"others\": " + others_json(job.others)) +
         ", \"assignment\": \"" + (job.assignment == Assignment::kClaimed ? "claimed" : "static") +
         "\", \"tickets\": " + (job.assignment == Assignment::kClaimed ? tickets_json(job.tickets) : "null") +
         ", \"loader_waits\": " + json::numbers(job.loader_waits) + ", \"unstored\": " + json::numbers(job.unstored) +
         "}";
}

std::string Schedule::to_json() const {
  const auto job = [&](const Job& j) { return job_json(graph, j); };
  const auto phase = [&](const Phase& p) {
    return "{\"waits\": " + json::numbers(p.waits) + ", \"jobs\": " + json::array(p.jobs, job, ",\n    ") + "}";
  };
  return "{\"target\": {\"device\": " + json::quote(target.device) + ", \"arch\": " + std::to_string(target.arch) +
         ", \"workers\": " + std::to_string(target.num_workers) +
         ", \"smem_bytes\": " + std::to_string(target.smem_bytes) + ", \"fuse\": " + truth(target.fuse) +
         "},\n\"workspace_bytes\": " + std::to_string(workspace_bytes) +
         ",\n\"workspace_offsets\": " + json::numbers(workspace_offsets) +
         ",\n\"polled_bytes\": " + std::to_string(polled_bytes) +
         ",\n\"polled\": " + json::array(polled, [](bool t) { return truth(t); }) +
         ",\n\"warps\": " + warps_json(warps) + ",\n\"phases\": " + json::array(phases, phase, ",\n  ") + "}\n";
}

}  // namespace mpk
