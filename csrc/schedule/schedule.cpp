// Placement: which nodes share a job, in which phase each job runs, where intermediates live.
#include "torch_mpk/schedule/schedule.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "../graph/json.h"
#include "access.h"
#include "torch_mpk/graph/tiling.h"

namespace mpk {
namespace {

constexpr int64_t kAlignment = 256;
// Staged activations and the ring share shared memory; the ring must keep most of what covers the memory latency.
constexpr int64_t kMaxStagedFraction = 2;
// Tiles are drawn eight at a time, so fewer than this of a worker are shared out more evenly beforehand.
constexpr int64_t kMinClaimedTiles = 40;
constexpr int64_t kRingSlotBytes = 8192;
// Polls of long vectors delay each other; beyond this the event is cheaper.
constexpr int64_t kMaxPolledElements = 16384;

// The operands of stream tasks that consumers bring to shared memory row by row.
bool is_staged(const Operand& operand) {
  static constexpr const char* kStaged[] = {"x", "q", "k_new", "v_new"};
  return std::find(std::begin(kStaged), std::end(kStaged), operand.name) != std::end(kStaged);
}

int64_t align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

class Scheduler {
 public:
  Scheduler(const TBGraph& graph, const Target& target)
      : graph_(graph),
        target_(target),
        edges_(graph.dependencies()),
        num_nodes_(static_cast<int>(graph.nodes().size())) {
    job_of_.assign(num_nodes_, -1);
    in_.resize(num_nodes_);
    out_.resize(num_nodes_);
    for (const Dependency& edge : edges_) {
      in_[edge.to].push_back(&edge);
      out_[edge.from].push_back(&edge);
    }
  }

  Schedule run() {
    if (target_.fuse) {
      fuse_epilogues();
      group_linears();
      find_prologues();
    }
    for (int n = 0; n < num_nodes_; n++)
      if (job_of_[n] < 0 && !is_prologue_[n]) new_job({n});
    if (target_.fuse) attach_prologues();
    assign_levels();
    Schedule schedule{graph_, target_, {}, {}, 0, 0, std::vector<bool>(graph_.buffers().size(), false)};
    build_phases(schedule);
    if (target_.polled) choose_handover(schedule);
    place_workspace(schedule);
    return schedule;
  }

 private:
  const Node& node(int n) const { return graph_.nodes()[n]; }
  bool is(int n, const char* task) const { return node(n).def->name == task; }

  int new_job(std::vector<int> body) {
    for (int n : body) job_of_[n] = static_cast<int>(jobs_.size());
    jobs_.push_back({{}, std::move(body), {}, 1, Assignment::kStatic, {}, {}});
    return static_cast<int>(jobs_.size()) - 1;
  }

  // True when `from` reaches `to` through at least one node outside the set both belong to.
  bool reaches(int from, int to, const std::vector<int>& set) const {
    std::vector<int> stack;
    std::vector<bool> seen(num_nodes_);
    for (const Dependency* edge : out_[from])
      if (std::find(set.begin(), set.end(), edge->to) == set.end()) stack.push_back(edge->to);
    while (!stack.empty()) {
      const int n = stack.back();
      stack.pop_back();
      if (n == to) return true;
      if (seen[n]) continue;
      seen[n] = true;
      // Members of one job start and end together, so a path may continue from any of them.
      auto visit = [&](int m) {
        for (const Dependency* edge : out_[m]) stack.push_back(edge->to);
      };
      visit(n);
      if (job_of_[n] >= 0)
        for (int m : job_nodes(job_of_[n])) visit(m);
    }
    return false;
  }

  std::vector<int> job_nodes(int j) const {
    std::vector<int> nodes = jobs_[j].body;
    nodes.insert(nodes.end(), jobs_[j].epilogue.begin(), jobs_[j].epilogue.end());
    return nodes;
  }

  // Making one job of these nodes must not create a cycle with the rest of the graph.
  bool contractible(const std::vector<int>& nodes) const {
    for (int a : nodes)
      for (int b : nodes)
        if (a < b && reaches(a, b, nodes)) return false;
    return true;
  }

  // A pointwise node becomes the epilogue of the linears whose results it reads at the point it writes.
  void fuse_epilogues() {
    for (int n = 0; n < num_nodes_; n++) {
      if (node(n).def->role != Role::kPointwise) continue;
      std::vector<int> producers;  // linears, or one job's epilogue nodes
      bool fusable = true;
      for (const Dependency* edge : in_[n]) {
        const int p = edge->from;
        const bool epilogue_of_linear = job_of_[p] >= 0 && node(p).def->role == Role::kPointwise;
        if (edge->hazard != Hazard::kReadAfterWrite || !(is(p, "linear") || epilogue_of_linear)) continue;
        if (std::find(producers.begin(), producers.end(), p) == producers.end()) producers.push_back(p);
      }
      if (producers.empty()) continue;
      // An operand made by an unrelated, later linear must not drag both into one job: keep the producers of one input.
      std::vector<int> body, epilogue;
      for (int p : producers) {
        if (!reads_at_same_point(node(n), node(p))) fusable = false;
        for (int m : job_of_[p] >= 0 ? job_nodes(job_of_[p]) : std::vector<int>{p})
          (is(m, "linear") ? body : epilogue).push_back(m);
      }
      for (auto* list : {&body, &epilogue}) {
        std::sort(list->begin(), list->end());
        list->erase(std::unique(list->begin(), list->end()), list->end());
      }
      if (!same_input(body)) {
        // A residual: one producer is this phase's linear, the other was made by an earlier phase and is plain memory.
        const int last = *std::max_element(producers.begin(), producers.end());
        if (!reads_at_same_point(node(n), node(last))) continue;
        fusable = true;
        body.clear();
        epilogue.clear();
        for (int m : job_of_[last] >= 0 ? job_nodes(job_of_[last]) : std::vector<int>{last})
          (is(m, "linear") ? body : epilogue).push_back(m);
      }
      if (!fusable || !writes_each_point_once(node(n))) continue;
      for (int m : body)  // all linears of a job share one index space
        if (output(node(m)).tensor.numel() != node(n).program->num_points()) fusable = false;
      if (!fusable) continue;
      std::vector<int> all = body;
      all.insert(all.end(), epilogue.begin(), epilogue.end());
      all.push_back(n);
      if (!contractible(all) || overwrites_input(n, body) || overwrites_input(n, epilogue)) continue;
      std::vector<int> merged;
      for (int m : body)
        if (job_of_[m] >= 0 && std::find(merged.begin(), merged.end(), job_of_[m]) == merged.end())
          merged.push_back(job_of_[m]);
      const int j = merged.empty() ? new_job(body) : merged.front();
      for (size_t k = 1; k < merged.size(); k++) jobs_[merged[k]] = {};
      jobs_[j].body = body;
      jobs_[j].epilogue = epilogue;
      jobs_[j].epilogue.push_back(n);
      for (int m : all) job_of_[m] = j;
    }
  }

  // Whether `n` writes memory that other workers may still be reading for the same phase.
  bool overwrites_input(int n, const std::vector<int>& readers) const {
    for (const Dependency* edge : in_[n])
      if (edge->hazard != Hazard::kReadAfterWrite &&
          std::find(readers.begin(), readers.end(), edge->from) != readers.end())
        return true;
    return false;
  }

  bool same_input(const std::vector<int>& linears) const {
    for (int n : linears)
      if (!same_view(node(n).operand("x").tensor, node(linears.front()).operand("x").tensor)) return false;
    return true;
  }

  // The remaining linears of one input become one job: their rows form one space.
  void group_linears() {
    std::vector<std::vector<int>> groups;
    for (int n = 0; n < num_nodes_; n++) {
      if (!is(n, "linear") || job_of_[n] >= 0) continue;
      bool placed = false;
      for (std::vector<int>& group : groups) {
        std::vector<int> all = group;
        all.push_back(n);
        if (!same_input(all) || !contractible(all)) continue;
        group = all;
        placed = true;
        break;
      }
      if (!placed) groups.push_back({n});
    }
    for (const std::vector<int>& group : groups) new_job(group);
  }

  // Row tasks read only by stream tasks, as the operand those stage in shared memory, are recomputed by each reader.
  void find_prologues() {
    is_prologue_.assign(num_nodes_, false);
    for (int n = num_nodes_; n-- > 0;) {
      const Node& row = node(n);
      if (row.def->role != Role::kRow || graph_.buffers()[output(row).tensor.buffer].kind != BufferKind::kWorkspace)
        continue;
      bool fusable = !out_[n].empty();
      for (const Dependency* edge : out_[n]) {
        const Node& reader = node(edge->to);
        bool staged = edge->hazard == Hazard::kReadAfterWrite;
        if (reader.def->role == Role::kRow) {
          staged &= is_prologue_[reader.id] && same_rows(output(row).tensor, reader.operands.front().tensor);
        } else if (reader.def->name == "linear") {
          staged &= reads_whole(reader, "x", output(row).tensor) && fits_staging(reader);
        } else if (reader.def->name == "attention") {
          staged &= reads_whole(reader, "q", output(row).tensor) || reads_whole(reader, "k_new", output(row).tensor);
        } else {
          staged = false;
        }
        fusable &= staged;
      }
      is_prologue_[n] = fusable;
    }
  }

  bool reads_whole(const Node& reader, const char* name, const Tensor& made) const {
    const Operand* operand = reader.find(name);
    return operand && same_rows(made, operand->tensor);
  }

  bool fits_staging(const Node& linear) const {
    const Tensor& x = linear.operand("x").tensor;
    return x.numel() * size_bytes(x.dtype) * kMaxStagedFraction <= target_.smem_bytes;
  }

  void attach_prologues() {
    for (Job& job : jobs_) {
      std::vector<int> stack = job.body;
      while (!stack.empty()) {
        const int n = stack.back();
        stack.pop_back();
        for (const Dependency* edge : in_[n])
          if (is_prologue_[edge->from] && edge->hazard == Hazard::kReadAfterWrite) {
            job.prologue.push_back(edge->from);
            stack.push_back(edge->from);
          }
      }
      std::sort(job.prologue.begin(), job.prologue.end());
      job.prologue.erase(std::unique(job.prologue.begin(), job.prologue.end()), job.prologue.end());
    }
  }

  std::vector<int> members(const Job& job) const {
    std::vector<int> nodes = job.prologue;
    nodes.insert(nodes.end(), job.body.begin(), job.body.end());
    nodes.insert(nodes.end(), job.epilogue.begin(), job.epilogue.end());
    return nodes;
  }

  // level = length of the longest chain of jobs before it. Several jobs may hold the same prologue node.
  void assign_levels() {
    std::vector<std::vector<int>> jobs_of_node(num_nodes_);
    for (size_t j = 0; j < jobs_.size(); j++)
      for (int n : members(jobs_[j])) jobs_of_node[n].push_back(static_cast<int>(j));
    std::vector<std::vector<int>> before(jobs_.size()), after(jobs_.size());
    for (const Dependency& edge : edges_)
      for (int to : jobs_of_node[edge.to])
        for (int from : jobs_of_node[edge.from]) {
          if (from == to) continue;
          // Where the reader recomputes the value itself, other holders of it do not matter.
          const bool local = edge.hazard == Hazard::kReadAfterWrite && is_prologue(edge.from);
          if (local) continue;
          before[to].push_back(from);
          after[from].push_back(to);
        }
    levels_.assign(jobs_.size(), -1);
    std::vector<int> pending(jobs_.size());
    std::vector<int> ready;
    for (size_t j = 0; j < jobs_.size(); j++) {
      pending[j] = static_cast<int>(before[j].size());
      if (pending[j] == 0) ready.push_back(static_cast<int>(j));
    }
    int num_levels = 0;
    size_t done = 0;
    while (!ready.empty()) {
      const int j = ready.back();
      ready.pop_back();
      done++;
      levels_[j] = 0;
      for (int b : before[j]) levels_[j] = std::max(levels_[j], levels_[b] + 1);
      if (!jobs_[j].body.empty()) num_levels = std::max(num_levels, levels_[j] + 1);
      for (int a : after[j])
        if (--pending[a] == 0) ready.push_back(a);
    }
    if (done != jobs_.size())
      throw std::logic_error("schedule: fusion made a cycle; please report the graph (TORCH_MPK_DUMP)");
    // In-place updates of the caller's tensors that nothing waits for go last: an aborted launch leaves counters alone.
    for (size_t j = 0; j < jobs_.size(); j++) {
      const Job& job = jobs_[j];
      if (job.body.size() != 1 || node(job.body[0]).def->role != Role::kPointwise || !after[j].empty()) continue;
      bool in_place = true;
      for (const Operand* made : outputs(node(job.body[0])))
        in_place &= graph_.buffers()[made->tensor.buffer].kind == BufferKind::kInput;
      if (in_place) levels_[j] = num_levels - 1;
    }
  }

  bool is_prologue(int n) const { return !is_prologue_.empty() && is_prologue_[n]; }

  void build_phases(Schedule& schedule) {
    int num_phases = 0;
    for (size_t j = 0; j < jobs_.size(); j++)
      if (!jobs_[j].body.empty()) num_phases = std::max(num_phases, levels_[j] + 1);
    schedule.phases.resize(num_phases);
    std::vector<int> phase_of_node(num_nodes_, -1);
    for (size_t j = 0; j < jobs_.size(); j++)
      for (int n : job_nodes(static_cast<int>(j))) phase_of_node[n] = levels_[j];
    for (size_t j = 0; j < jobs_.size(); j++) {
      Job& job = jobs_[j];
      if (job.body.empty()) continue;
      finish(job, phase_of_node);
      schedule.phases[levels_[j]].jobs.push_back(job);
    }
    for (int p = 0; p < num_phases; p++) {
      std::sort(schedule.phases[p].jobs.begin(), schedule.phases[p].jobs.end(),
                [](const Job& a, const Job& b) { return a.body.front() < b.body.front(); });
      if (p > 0) schedule.phases[p].waits = {p - 1};
    }
  }

  void finish(Job& job, const std::vector<int>& phase_of_node) const {
    const Node& first = node(job.body.front());
    int64_t streamed_bytes = 0;
    if (first.program) {
      job.num_tiles = first.program->num_points();
    } else if (first.def->name == "linear") {
      job.num_tiles = 0;
      for (int n : job.body) {
        const Tensor& weight = node(n).operand("weight").tensor;
        job.num_tiles += weight.shape[0];
        streamed_bytes += weight.numel() * size_bytes(weight.dtype);
      }
    } else if (first.def->role == Role::kTile) {
      job.num_tiles = tiling(first).num_tiles();
    } else {
      const Tensor& y = output(first).tensor;
      job.num_tiles = y.shape.empty() ? 1 : y.shape[0];
    }
    if (streamed_bytes > kMinClaimedTiles * kRingSlotBytes * target_.num_workers) job.assignment = Assignment::kClaimed;

    const std::vector<int> all = members(job);
    auto inside = [&](int n) { return std::find(all.begin(), all.end(), n) != all.end(); };
    for (int n : all) {
      if (job.body.size() == 1 && job.body[0] == n && job.epilogue.empty()) continue;
      for (const Operand* made : outputs(node(n))) {
        const int b = made->tensor.buffer;
        if (graph_.buffers()[b].kind != BufferKind::kWorkspace) continue;
        bool local = true;
        for (const Dependency* edge : out_[n])
          if (edge->buffer == b) local &= inside(edge->to) || is_prologue(n);
        if (local) job.unstored.push_back(b);
      }
    }
    // What the loader reads is known before the launch, or its maker must have signalled.
    if (first.def->streams())
      for (int n : job.body)
        for (const Dependency* edge : in_[n]) {
          if (edge->hazard == Hazard::kWriteAfterRead) continue;
          const std::vector<Operand>& operands = node(n).operands;
          if (std::none_of(operands.begin(), operands.end(), [&](const Operand& o) {
                return o.tensor.buffer == edge->buffer && loader_reads(*first.def, o);
              }))
            continue;
          const int p = phase_of_node[edge->from];
          if (p >= 0 && std::find(job.loader_waits.begin(), job.loader_waits.end(), p) == job.loader_waits.end())
            job.loader_waits.push_back(p);
        }
    std::sort(job.loader_waits.begin(), job.loader_waits.end());
  }

  // A vector that stream tasks make and stage is polled. What a phase reads otherwise, it reads behind a completed
  // event. So does the last phase.
  void choose_handover(Schedule& schedule) const {
    for (int n = 0; n < num_nodes_; n++)
      for (const Operand* made : outputs(node(n))) schedule.polled[made->tensor.buffer] = travels_polled(n, *made);
    struct Place {
      int phase;
      const Job* job;
    };
    std::vector<std::vector<Place>> places(num_nodes_);
    for (size_t p = 0; p < schedule.phases.size(); p++)
      for (const Job& job : schedule.phases[p].jobs)
        for (int n : members(job)) places[n].push_back({static_cast<int>(p), &job});
    std::vector<int> newest(schedule.phases.size(), -1);  // the newest phase whose plain results a phase needs
    for (const Dependency& edge : edges_) {
      if (edge.hazard == Hazard::kReadAfterWrite && (schedule.polled[edge.buffer] || is_prologue_[edge.from])) continue;
      for (const Place& to : places[edge.to])
        for (const Place& from : places[edge.from])
          if (from.job != to.job) newest[to.phase] = std::max(newest[to.phase], from.phase);
    }
    int complete = -1;                                              // all phases up to here are over for every worker
    const int last = static_cast<int>(schedule.phases.size()) - 1;  // advances counters, for a launch that succeeds
    for (int p = 1; p <= last; p++) {
      if (newest[p] > complete || p == last) {
        complete = p - 1;
      } else {
        schedule.phases[p].waits.clear();
      }
    }
  }

  bool travels_polled(int n, const Operand& made) const {
    const Tensor& t = made.tensor;
    const int maker = job_of_[n] < 0 ? n : jobs_[job_of_[n]].body.front();
    if (!(is(maker, "linear") || is(n, "attention")) || graph_.buffers()[t.buffer].kind != BufferKind::kWorkspace ||
        !is_float(t.dtype) || size_bytes(t.dtype) != 2 || t.numel() > kMaxPolledElements || !t.is_contiguous() ||
        t.numel() * size_bytes(t.dtype) != graph_.buffers()[t.buffer].bytes)
      return false;
    // An element that has come stays as it is.
    for (const Dependency* edge : in_[n])
      if (edge->buffer == t.buffer) return false;
    for (const Dependency* edge : out_[n]) {
      if (edge->buffer != t.buffer) continue;
      const Node& reader = node(edge->to);
      if (edge->hazard != Hazard::kReadAfterWrite || writes(reader, t.buffer)) return false;
      if (reader.def->role == Role::kRow) {
        if (!is_prologue_[reader.id] || reader.operands.front().tensor.buffer != t.buffer) return false;
        for (size_t i = 1; i < reader.operands.size(); i++)
          if (reader.operands[i].tensor.buffer == t.buffer) return false;
      } else if (reader.def->role == Role::kStream) {
        for (const Operand& operand : reader.operands)
          if (operand.tensor.buffer == t.buffer && !is_staged(operand)) return false;
      } else if (jobs_[job_of_[reader.id]].epilogue.empty() || !reads_at_same_point(reader, made)) {
        return false;
      }
    }
    return true;
  }

  // First fit in order of first use; a byte is reused only after the phase of its last use. A launch writes every
  // polled element once: their places are not shared.
  void place_workspace(Schedule& schedule) const {
    const std::vector<Lifetime> lifetimes = buffer_lifetimes(schedule);
    schedule.workspace_offsets.assign(graph_.buffers().size(), -1);
    std::vector<int> order;
    for (size_t b = 0; b < lifetimes.size(); b++)
      if (lifetimes[b].used()) order.push_back(static_cast<int>(b));
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return lifetimes[a].first < lifetimes[b].first; });
    std::vector<int> placed;
    for (int b : order) {
      const int64_t bytes = align(graph_.buffers()[b].bytes);
      if (schedule.polled[b]) {
        schedule.workspace_offsets[b] = schedule.polled_bytes;
        schedule.polled_bytes += bytes;
        continue;
      }
      std::vector<std::pair<int64_t, int64_t>> taken;
      for (int other : placed)
        if (lifetimes[other].overlaps(lifetimes[b])) {
          const int64_t begin = schedule.workspace_offsets[other];
          taken.emplace_back(begin, begin + align(graph_.buffers()[other].bytes));
        }
      std::sort(taken.begin(), taken.end());
      int64_t offset = 0;
      for (const auto& [begin, end] : taken) {
        if (offset + bytes <= begin) break;
        offset = std::max(offset, end);
      }
      schedule.workspace_offsets[b] = offset;
      schedule.workspace_bytes = std::max(schedule.workspace_bytes, offset + bytes);
      placed.push_back(b);
    }
  }

  const TBGraph& graph_;
  const Target& target_;
  const std::vector<Dependency> edges_;
  const int num_nodes_;
  std::vector<std::vector<const Dependency*>> in_, out_;
  std::vector<Job> jobs_;
  std::vector<int> job_of_;
  std::vector<bool> is_prologue_ = std::vector<bool>(num_nodes_, false);
  std::vector<int> levels_;
};

}  // namespace

Schedule make_schedule(const TBGraph& graph, const Target& target) {
  if (target.num_workers < 1)
    throw std::invalid_argument("schedule: a target needs at least one worker, got " +
                                std::to_string(target.num_workers));
  return Scheduler(graph, target).run();
}

std::string Schedule::to_json() const {
  auto job = [&](const Job& j) {
    auto tasks = [&](const std::vector<int>& ids) {
      return json::array(ids, [&](int n) {
        const Node& node = graph.nodes()[n];
        return json::quote(std::to_string(n) + " " + node.def->name + (node.label.empty() ? "" : " " + node.label));
      });
    };
    return "{\"prologue\": " + tasks(j.prologue) + ", \"body\": " + tasks(j.body) +
           ", \"epilogue\": " + tasks(j.epilogue) + ", \"tiles\": " + std::to_string(j.num_tiles) +
           ", \"assignment\": \"" + (j.assignment == Assignment::kClaimed ? "claimed" : "static") +
           "\", \"loader_waits\": " + json::numbers(j.loader_waits) + ", \"unstored\": " + json::numbers(j.unstored) +
           "}";
  };
  return "{\"target\": {\"device\": " + json::quote(target.device) + ", \"arch\": " + std::to_string(target.arch) +
         ", \"workers\": " + std::to_string(target.num_workers) +
         ", \"smem_bytes\": " + std::to_string(target.smem_bytes) + ", \"fuse\": " + (target.fuse ? "true" : "false") +
         "},\n\"workspace_bytes\": " + std::to_string(workspace_bytes) +
         ",\n\"workspace_offsets\": " + json::numbers(workspace_offsets) +
         ",\n\"polled_bytes\": " + std::to_string(polled_bytes) +
         ",\n\"polled\": " + json::array(polled, [](bool t) { return t ? "true" : "false"; }) + ",\n\"phases\": " +
         json::array(
             phases,
             [&](const Phase& p) {
               return "{\"waits\": " + json::numbers(p.waits) + ", \"jobs\": " + json::array(p.jobs, job, ",\n    ") +
                      "}";
             },
             ",\n  ") +
         "}\n";
}

}  // namespace mpk
