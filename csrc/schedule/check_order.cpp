#include <algorithm>
#include <map>

#include "access.h"
#include "kernel.h"
#include "proof.h"

namespace mpk {
namespace {

enum class Part : uint8_t { kPrologue, kBody, kEpilogue };

struct Place {
  int phase, job;
  Part part;
  int position;  // within its part

  bool same_job(const Place& other) const { return phase == other.phase && job == other.job; }
};

class OrderProof {
 public:
  explicit OrderProof(const Schedule& schedule)
      : s_(schedule), num_phases_(static_cast<int>(schedule.phases.size())), order_(schedule) {}

  void run() {
    if (s_.polled.size() != s_.graph.buffers().size()) fail("it does not say of every buffer whether it is polled");
    check_end();
    place_nodes();
    check_makers();
    for (const Dependency& edge : s_.graph.dependencies()) check_dependency(edge);
    check_workspace();
    check_loader_waits();
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { unsound(what); }
  std::string name(int n) const { return name_node(s_, n); }
  std::string name_buffer(int b) const { return mpk::name_buffer(s_, b); }

  void check_end() const {
    if (num_phases_ > 1 && !order_.happens_before(num_phases_ - 2, num_phases_ - 1))
      fail("the last phase, which advances counters, does not wait for the one before it");
  }

  void place_nodes() {
    const int num_nodes = static_cast<int>(s_.graph.nodes().size());
    places_.resize(num_nodes);
    for (int p = 0; p < num_phases_; p++)
      for (size_t j = 0; j < s_.phases[p].jobs.size(); j++) {
        const Job& job = s_.phases[p].jobs[j];
        if (job.body.empty()) fail("phase " + std::to_string(p) + " has a job without a body");
        const std::pair<Part, const std::vector<int>*> parts[] = {
            {Part::kPrologue, &job.prologue}, {Part::kBody, &job.body}, {Part::kEpilogue, &job.epilogue}};
        for (const auto& [part, list] : parts)
          for (size_t i = 0; i < list->size(); i++) {
            const int n = (*list)[i];
            if (n < 0 || n >= num_nodes)
              fail("phase " + std::to_string(p) + " runs node " + std::to_string(n) + ", which does not exist");
            places_[n].push_back({p, static_cast<int>(j), part, static_cast<int>(i)});
            const Role role = s_.graph.nodes()[n].def->role;
            if (part == Part::kPrologue && role != Role::kRow)
              fail(name(n) + " is no row task, but stands in a prologue");
            if (part == Part::kEpilogue && role != Role::kPointwise && role != Role::kRow && role != Role::kTile)
              fail(name(n) + " stands in an epilogue, but is neither pointwise, nor a row task, nor one of tiles");
            if (part == Part::kEpilogue && role == Role::kRow && job.cut.row_sums) check_norm(job, n);
          }
      }
    for (int n = 0; n < num_nodes; n++) {
      if (places_[n].empty()) fail(name(n) + " is never run");
      bool recomputed = true;
      for (const Place& place : places_[n]) recomputed &= place.part == Part::kPrologue;
      if (places_[n].size() > 1 && !recomputed)
        fail(name(n) + " is run " + std::to_string(places_[n].size()) + " times");
    }
  }

  // A norm in an epilogue that leaves sums of its rows: its readers multiply by the rows' factors. So it must be the
  // last epilogue, of rows that the job makes, and all its readers must multiply it with matrices, behind an event.
  void check_norm(const Job& job, int n) const {
    const Node& node = s_.graph.nodes()[n];
    const auto require = [&](bool holds, const std::string& what) {
      if (!holds) fail(name(n) + " stands in an epilogue, but " + what);
    };
    require(node.def->scales_rows && n == job.epilogue.back() && job.body.size() == 1,
            "is not the norm that a job of one node ends with");
    const Tensor& made = output(node).tensor;
    require(!s_.polled[made.buffer], "is polled before its rows' squares are added up");
    for (const Phase& phase : s_.phases)
      for (const Job& reader : phase.jobs)
        for (int m : members(reader))
          for (const Operand& operand : s_.graph.nodes()[m].operands) {
            if (m == n || operand.tensor.buffer != made.buffer) continue;
            const OperandSpec* spec = s_.graph.nodes()[m].def->find(operand.name);
            require(spec != nullptr && spec->takes_rows && !reader.cut.is_staged() && same_rows(made, operand.tensor) &&
                        applies_factors(reader),
                    "is read by " + name(m) + ", which does not multiply its results by factors of rows");
          }
  }

  bool applies_factors(const Job& reader) const {
    const Kernel* kernel = find_kernel(reader.cut.kernel);
    return kernel != nullptr && kernel->splits_norms(s_, reader);
  }

  // Readers of a polled buffer take whatever has come as the result.
  void check_makers() const {
    std::vector<int> maker(s_.polled.size(), -1);
    for (size_t n = 0; n < s_.graph.nodes().size(); n++)
      for (const Operand* made : outputs(s_.graph.nodes()[n])) {
        const int b = made->tensor.buffer;
        if (s_.polled[b] && maker[b] >= 0 && maker[b] != static_cast<int>(n))
          fail(name_buffer(b) + " is polled, but " + name(maker[b]) + " and " + name(static_cast<int>(n)) +
               " write it");
        maker[b] = static_cast<int>(n);
      }
  }

  const Job& job_at(const Place& place) const { return s_.phases[place.phase].jobs[place.job]; }
  bool unstored(const Place& place, int buffer) const {
    const std::vector<int>& list = job_at(place).unstored;
    return std::find(list.begin(), list.end(), buffer) != list.end();
  }
  bool happens_before(const Place& a, const Place& b) const { return order_.happens_before(a.phase, b.phase); }

  void check_dependency(const Dependency& edge) const {
    const std::string what = name(edge.to) + " and " + name(edge.from) + ", on " + name_buffer(edge.buffer) + ": ";
    for (const Place& to : places_[edge.to]) {
      if (edge.hazard == Hazard::kReadAfterWrite) {
        bool satisfied = false;
        for (const Place& from : places_[edge.from])
          satisfied |= from.same_job(to) ? passes_inside(edge, from, to)
                                         : !unstored(from, edge.buffer) &&
                                               (happens_before(from, to) || is_polled_later(edge, from, to));
        if (!satisfied) fail(what + "no write happens before the read");
      } else {
        // Every earlier access, repeated ones included, must be over before the write.
        for (const Place& from : places_[edge.from])
          if (!happens_before(from, to) && !follows_inside(from, to))
            fail(what + "the later write may overtake the earlier access");
      }
    }
  }

  // Readers of a polled buffer, in a later phase, wait for its elements. So the writer cannot depend on them.
  bool is_polled_later(const Dependency& edge, const Place& from, const Place& to) const {
    return s_.polled[edge.buffer] && from.phase < to.phase;
  }

  // Inside a job, values pass from prologue to body through shared memory, and from body to epilogue point by point. A
  // run's kernel passes its nodes' values on, and proves that itself.
  bool passes_inside(const Dependency& edge, const Place& from, const Place& to) const {
    if (from.part == Part::kPrologue) {
      if (to.part == Part::kEpilogue) return false;
      return to.part == Part::kBody || from.position < to.position;
    }
    if (to.part == Part::kBody) return !job_at(to).run.empty() && from.position < to.position;
    if (to.part != Part::kEpilogue) return false;
    if (from.part == Part::kEpilogue && from.position >= to.position) return false;
    const Node& reader = s_.graph.nodes()[edge.to];
    if (reader.def->role == Role::kTile) return from.part == Part::kBody && takes_result(edge);
    if (reader.def->role == Role::kRow)
      return job_at(to).cut.row_sums ? makes_rows(edge, from, reader) : hands_on_rows(edge, from, reader);
    return strides_behind(s_.graph, makers_of(job_at(to), edge.to), reader).has_value();
  }

  // Whether both are nodes of a run whose kernel computes them in sequence.
  bool follows_inside(const Place& from, const Place& to) const {
    const std::string& run = job_at(to).run;
    return from.same_job(to) && !run.empty() && from.position < to.position && find_kernel(run)->stores_values();
  }

  // Whether a norm behind it takes its results, in the rows that they have.
  bool makes_rows(const Dependency& edge, const Place& from, const Node& norm) const {
    const Node& maker = s_.graph.nodes()[edge.from];
    const Tensor& results = output(s_.graph.nodes()[job_at(from).body.front()]).tensor;
    const Tensor& rows = norm.operands.front().tensor;
    if (rows.buffer != edge.buffer || !same_row_space(results, rows)) return false;
    for (const Operand* made : outputs(maker))
      if (made->tensor.buffer == edge.buffer)
        return same_rows(made->tensor, rows) && (!maker.program || stores_at_same_point(maker, *made));
    return false;
  }

  // Whether a tile task behind a node takes the elements that the node makes; which are a tile's is the kernel's proof.
  bool takes_result(const Dependency& edge) const {
    const Node &maker = s_.graph.nodes()[edge.from], &tiles = s_.graph.nodes()[edge.to];
    return std::all_of(tiles.operands.begin(), tiles.operands.end(), [&](const Operand& operand) {
      return operand.tensor.buffer != edge.buffer || same_elements(output(maker).tensor, operand.tensor);
    });
  }

  // Whether a row task behind a node of the body takes the node's result, or that of another row task behind it.
  bool hands_on_rows(const Dependency& edge, const Place& from, const Node& row) const {
    const Node& maker = s_.graph.nodes()[edge.from];
    const Tensor& x = row.operands.front().tensor;
    const bool is_only = std::none_of(row.operands.begin() + 1, row.operands.end(),
                                      [&](const Operand& operand) { return operand.tensor.buffer == edge.buffer; });
    return is_only && x.buffer == edge.buffer && (from.part == Part::kBody || maker.def->role == Role::kRow) &&
           same_elements(output(maker).tensor, x);
  }

  void check_workspace() const {
    const std::vector<Lifetime> lifetimes = buffer_lifetimes(s_);
    if (s_.workspace_offsets.size() != lifetimes.size())
      fail("it places " + std::to_string(s_.workspace_offsets.size()) + " of " + std::to_string(lifetimes.size()) +
           " buffers");
    for (size_t a = 0; a < lifetimes.size(); a++) {
      if (!lifetimes[a].used()) continue;
      const int64_t begin = s_.workspace_offsets[a], end = begin + s_.graph.buffers()[a].bytes;
      if (begin < 0 || end > (s_.polled[a] ? s_.polled_bytes : s_.workspace_bytes))
        fail(name_buffer(a) + " lies outside the workspace");
      for (size_t b = 0; b < a; b++) {
        if (!lifetimes[b].used() || s_.polled[a] != s_.polled[b]) continue;
        const int64_t other = s_.workspace_offsets[b];
        if (begin >= other + s_.graph.buffers()[b].bytes || other >= end) continue;
        if (s_.polled[a])
          fail(name_buffer(a) + " and " + name_buffer(b) + " share workspace, but are polled: an element comes once");
        if (!order_.follow_each_other(lifetimes[a], lifetimes[b]))
          fail(name_buffer(a) + " and " + name_buffer(b) + " share workspace while both are needed");
      }
    }
  }

  // The loader runs ahead of its phase. What it reads must be written before the launch, or be awaited.
  void check_loader_waits() const {
    for (const Dependency& edge : s_.graph.dependencies()) {
      if (edge.hazard == Hazard::kWriteAfterRead) continue;
      const Node& reader = s_.graph.nodes()[edge.to];
      for (const Place& to : places_[edge.to]) {
        const std::vector<int>& waits = job_at(to).loader_waits;
        for (const Operand& operand : reader.operands) {
          if (operand.tensor.buffer != edge.buffer || !loader_reads(s_.warps, reader, operand)) continue;
          for (const Place& from : places_[edge.from]) {
            const bool ordered = std::any_of(waits.begin(), waits.end(), [&](int w) {
              return w == from.phase || (w >= 0 && w < num_phases_ && order_.happens_before(from.phase, w));
            });
            if (!ordered)
              fail("the loader of " + name(edge.to) + " may read " + name_buffer(edge.buffer) + " before " +
                   name(edge.from) + " writes it");
          }
        }
      }
    }
  }

  const Schedule& s_;
  const int num_phases_;
  const Order order_;
  std::vector<std::vector<Place>> places_;
};

}  // namespace

void check_order(const Schedule& schedule) { OrderProof(schedule).run(); }

}  // namespace mpk
