#include "schedule_json.h"

#include "../graph/json.h"

namespace mpk {
namespace {

const char* truth(bool v) { return v ? "true" : "false"; }
std::string field(const char* name, int64_t v) { return "\"" + std::string(name) + "\": " + std::to_string(v); }

std::string shape_json(const TileShape& s) {
  return "{" + field("tile_rows", s.tile_rows) + ", " + field("parts", s.parts) + ", " +
         field("chunk_parts", s.chunk_parts) + ", " + field("row_bytes", s.row_bytes) + ", " +
         field("chunk_bytes", s.chunk_bytes) + ", " + field("entries", s.entries()) + ", " + field("run", s.run) +
         ", " + field("in_flight", s.in_flight) + ", \"shares_entries\": " + truth(s.shares_entries) +
         (s.pass_tiles > 0 ? ", " + field("pass_tiles", s.pass_tiles) : "") +
         (s.x_rows > 0 ? ", " + field("x_rows", s.x_rows) : "") + (s.split > 1 ? ", " + field("split", s.split) : "") +
         (s.window_bytes > 0 ? ", " + field("window_bytes", s.window_bytes) : "") +
         (s.turn_tiles > 0 ? ", " + field("turn_tiles", s.turn_tiles) : "") + "}";
}

std::string tickets_json(const Tickets& t) {
  return "{" + field("size", t.size) + ", " + field("own", t.own) + ", " + field("drawn", t.drawn) + "}";
}

std::string pieces_json(const Pieces& p) {
  return "{" + field("count", p.count) + ", " + field("of_row", p.of_row) + ", " + field("results", p.results) + ", " +
         field("few_results", p.few_results) + ", " + field("result_bytes", p.result_bytes) + ", " +
         field("offset", p.offset) +
         (p.tiles > 0 ? ", " + field("tiles", p.tiles) + ", " + field("few_of_row", p.few_of_row) : "") +
         (p.overlap ? ", \"overlap\": true" : "") + (p.positions > 0 ? ", " + field("positions", p.positions) : "") +
         "}";
}

std::string queries_json(const QueryTiles& q) {
  return "{" + field("heads", q.heads) + ", " + field("rows", q.rows) + ", " + field("positions", q.positions) +
         (q.ends > 0 ? ", " + field("ends", q.ends) : "") + "}";
}

std::string warps_json(const WarpLayout& w) {
  return "{" + field("consumers", w.consumers) + ", " + field("loaders", w.loaders) + ", " +
         field("threads", w.threads()) + ", " + field("registers", w.registers) + ", " +
         field("max_slots", w.max_slots) + ", " + field("slot_bytes", w.slot_bytes) + ", " +
         field("full_arrivals", w.full_arrivals) + ", " + field("empty_arrivals", w.empty_arrivals) +
         (w.warpgroups > 0 ? ", " + field("warpgroups", w.warpgroups) : "") + "}";
}

}  // namespace

std::string job_json(const TBGraph& graph, const Job& job) {
  const auto tasks = [&](const std::vector<int>& ids) {
    return json::array(ids, [&](int n) { return json::quote(std::to_string(n) + " " + graph.nodes()[n].title()); });
  };
  return "{\"prologue\": " + tasks(job.prologue) + ", \"body\": " + tasks(job.body) +
         ", \"epilogue\": " + tasks(job.epilogue) + ", \"tiles\": " + std::to_string(job.num_tiles) +
         ", \"assignment\": \"" + (job.assignment == Assignment::kClaimed ? "claimed" : "static") +
         "\", \"tickets\": " + (job.assignment == Assignment::kClaimed ? tickets_json(job.tickets) : "null") +
         ", \"shape\": " + (job.shape ? shape_json(*job.shape) : "null") + ", \"staged\": " + truth(job.is_staged) +
         ", " + field("staged_bytes", job.staged_bytes) +
         ", \"pieces\": " + (job.pieces ? pieces_json(*job.pieces) : "null") +
         (job.row_sums ? ", \"row_sums\": {" + field("count", job.row_sums->count) + ", " +
                             field("offset", job.row_sums->offset) + "}"
                       : "") +
         (job.queries ? ", \"queries\": " + queries_json(*job.queries) : "") +
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
