// Runs of small nodes, such as a router's softmax and choice: a worker computes all of them for a row, in sequence,
// instead of a phase for each. Values go through the workspace.
#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "../arch/arch.h"
#include "../codegen/job_code.h"
#include "../codegen/text.h"
#include "../schedule/kernel.h"
#include "../schedule/proof.h"
#include "../schedule/staging.h"
#include "torch_mpk/graph/tiling.h"

namespace mpk {
namespace {

using namespace codegen;

constexpr int64_t kMaxPoints = 4096;  // of a node and a row; more are faster with all workers
constexpr int64_t kMinPoints = 32;    // of a run's first node and a row; with fewer, several rows count as one
constexpr int64_t kMaxInner = 1024;   // of a warp's reduction
constexpr double kNodeNs = 600;       // of a node and a row: a trip to L2, and a barrier

// The elements of a buffer that a node touches for row r: `extent` from `first` + r * `pitch` on.
struct Touched {
  int buffer;
  int64_t first, pitch, extent;
};

// How an access moves from row to row, if its outermost dimensions count `rows`.
std::optional<Touched> touched(const Tensor& t, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                               int64_t rows) {
  Touched found{t.buffer, t.offset, 0, 1};
  size_t d = 0;
  for (int64_t left = rows; left > 1; d++) {
    if (d == sizes.size() || sizes[d] < 1 || left % sizes[d] != 0) return std::nullopt;
    if (sizes[d] == 1) continue;
    if (found.pitch != 0 && found.pitch != strides[d] * sizes[d]) return std::nullopt;
    left /= sizes[d];
    found.pitch = strides[d];
  }
  for (; d < sizes.size(); d++) {
    if (sizes[d] < 1 || strides[d] < 0) return std::nullopt;
    found.extent += (sizes[d] - 1) * strides[d];
  }
  return found;
}

// A node as rows, if it can be computed row by row.
struct RowsOf {
  std::vector<Touched> touched;
  std::set<int> at_offsets;  // buffers in which it computes elements' places
  int64_t points = 0;        // of a row

  void add(std::optional<Touched> access) {
    if (access)
      touched.push_back(*access);
    else
      is_whole_ = false;
  }
  explicit operator bool() const { return is_whole_; }

  RowsOf(const Node& node, int64_t rows) {
    if (node.program)
      add_program(node, rows);
    else if (node.def->role == Role::kTile)
      add_tiles(node, rows);
    else
      is_whole_ = false;
  }

 private:
  void add_program(const Node& node, int64_t rows) {
    const bool reduces = node.def->role == Role::kReduce;
    std::vector<int64_t> outer = node.program->domain;
    points = node.program->num_points();
    is_whole_ = points > 0 && points % rows == 0 && (!reduces || outer.back() <= kMaxInner);
    points /= rows;
    for (const Instr& instr : node.program->instrs) {
      if (instr.op != Op::kLoad && instr.op != Op::kStore) continue;
      const Tensor& t = node.operands[instr.operand].tensor;
      if (instr.args.size() > (instr.op == Op::kStore ? 1 : 0)) at_offsets.insert(t.buffer);
      add(mpk::touched(t, node.program->domain, instr.strides, rows));
    }
    if (!reduces) return;
    const Tensor& made = output(node).tensor;
    add(mpk::touched(made, made.shape, made.strides, rows));
  }

  // Tiles are numbered row by row if each has one row of all operands.
  void add_tiles(const Node& node, int64_t rows) {
    const Tiling tiles = tiling(node);
    is_whole_ = !tiles.dims.empty() && tiles.dims.front().name == "..." && tiles.dims.front().step == 1 &&
                tiles.dims.front().size % rows == 0 && node.def->stream.empty();
    for (const OperandSpec& spec : node.def->operands) {
      const Operand* operand = node.find(spec.name);
      if (operand == nullptr) continue;
      is_whole_ = is_whole_ && spec.has_leading();
      add(mpk::touched(operand->tensor, operand->tensor.shape, operand->tensor.strides, rows));
      points = std::max(points, operand->tensor.numel() / rows);
    }
  }

  bool is_whole_ = true;
};

bool may_be_small(const Node& node) {
  return node.def->role == Role::kPointwise || node.def->role == Role::kReduce || node.def->role == Role::kTile;
}

bool touches(const Node& node, const std::set<int>& buffers) {
  return std::any_of(node.operands.begin(), node.operands.end(),
                     [&](const Operand& operand) { return buffers.contains(operand.tensor.buffer); });
}

// Nodes that are computed together, row by row.
struct Run {
  int64_t rows;
  std::vector<int> nodes = {};
  std::set<int> made = {};                        // buffers
  std::map<int, std::vector<Touched>> uses = {};  // of buffers

  // Takes the node if each of its rows needs only that row of the others.
  bool take(const TBGraph& graph, const Node& node) {
    const RowsOf own(node, rows);
    if (!own || own.points > kMaxPoints || touches_elsewhere(graph, node, own)) return false;
    std::map<int, std::vector<Touched>> all = uses;
    for (const Touched& each : own.touched) all[each.buffer].push_back(each);
    std::set<int> written = made;
    for (const Operand* result : outputs(node)) written.insert(result->tensor.buffer);
    for (int b : written)
      if (!is_apart(all[b])) return false;
    uses = std::move(all);
    made = std::move(written);
    nodes.push_back(node.id);
    return true;
  }

 private:
  bool touches_elsewhere(const TBGraph& graph, const Node& node, const RowsOf& own) const {
    const auto is_elsewhere = [&](const Operand& operand) {
      const int b = operand.tensor.buffer;
      const bool is_input = graph.buffers()[b].kind == BufferKind::kInput;
      return own.at_offsets.contains(b) ? operand.is_write || made.contains(b) : operand.is_write && is_input;
    };
    return std::any_of(node.operands.begin(), node.operands.end(), is_elsewhere);
  }

  // Whether no two rows touch the same elements.
  bool is_apart(const std::vector<Touched>& all) const {
    if (rows == 1) return true;
    int64_t begin = all.front().first, end = begin;
    for (const Touched& each : all) {
      if (each.pitch != all.front().pitch) return false;
      begin = std::min(begin, each.first);
      end = std::max(end, each.first + each.extent);
    }
    return end - begin <= all.front().pitch;
  }
};

// The nodes from `first` on that make a run of so many rows: each needs earlier results of the run, but none that
// depend on nodes outside.
Run run_of(const TBGraph& graph, int first, int64_t rows) {
  Run run{rows};
  if (!run.take(graph, graph.nodes()[first])) return run;
  std::set<int> of_others;  // buffers written by outside nodes that need the run
  for (size_t n = first + 1; n < graph.nodes().size(); n++) {
    const Node& node = graph.nodes()[n];
    if (!touches(node, run.made) && !touches(node, of_others)) continue;
    if (may_be_small(node) && !touches(node, of_others) && run.take(graph, node)) continue;
    for (const Operand* result : outputs(node)) of_others.insert(result->tensor.buffer);
  }
  return run;
}

class RowRuns : public Kernel {
 public:
  RowRuns() : Kernel("row_run") {}

  // The longest run that begins with a reduction or tiles. Nodes in front of these are better as the epilogue of their
  // operands' makers.
  static Run longest(const TBGraph& graph, int first) {
    const Node& node = graph.nodes()[first];
    Run best{1};
    if (!may_be_small(node) || node.def->role == Role::kPointwise) return best;
    const std::vector<int64_t> sizes = node.program ? node.program->domain : node.operands.front().tensor.shape;
    int64_t rows = 1, points = 1;
    for (int64_t size : sizes) points *= size;
    if (points < 1) return best;
    for (size_t d = 0; d < sizes.size() && (rows == 1 || points >= rows * kMinPoints); rows *= sizes[d++]) {
      Run run = run_of(graph, first, rows);
      if (run.nodes.size() >= best.nodes.size()) best = std::move(run);
    }
    return best;
  }

 private:
  std::vector<int> find_run(const TBGraph& graph, int first) const override { return longest(graph, first).nodes; }

  bool stores_values() const override { return true; }
  bool takes_companions() const override { return true; }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    Cut cut = job.cut;
    cut.input = Input::kInPlace;
    cut.num_tiles = longest(schedule.graph, job.body.front()).rows;
    cut.staged_bytes = std::clamp<int64_t>(room(schedule), 0, kMaxTileBytes);
    const double turns = std::ceil(double(cut.num_tiles) / double(schedule.target.num_workers));
    cut.cost_ns = turns * kNodeNs * double(job.body.size());
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    const TBGraph& graph = proof.schedule().graph;
    const auto is_row_by_row = [&](int64_t rows) {
      Run run{rows};
      return std::all_of(proof.job().body.begin(), proof.job().body.end(),
                         [&](int n) { return run.take(graph, graph.nodes()[n]); });
    };
    proof.require(proof.cut().num_tiles > 0 && is_row_by_row(proof.cut().num_tiles),
                  "its nodes cannot be computed in " + CutProof::str(proof.cut().num_tiles) + " rows, one by one");
    for (int b : proof.job().unstored) proof.fail(name_buffer(proof.schedule(), b) + " has no place in memory");
    proof.require_nothing_else();
  }

  JobCode emit(const JobPlace& place) const override {
    JobCode code{"RowRun", "run_rows_of_nodes", "", "kRowRunStagedBytes<V>"};
    code.headers = {"torch_mpk/device/row_run.cuh"};
    code.body = constant("kRows", place.job.cut.num_tiles);
    std::string calls, staged = "0";
    for (size_t i = 0; i < place.job.body.size(); i++) {
      Job alone;
      alone.body = {place.job.body[i]};
      alone.cut = place.job.cut;
      const Node& node = place.context.node(alone.body.front());
      const Part part = part_of(node);
      alone.cut.fields = part.fields;
      const JobCode own = find_kernel(part.kernel)->emit({place.context, place.phase, alone});
      const std::string name = "Node" + str(int64_t(i));
      calls += std::string(i ? " && " : "") + "run.template " + part.call + "<" + name + ">(job.from(" +
               str(int64_t(code.refs.size())) + "), row)";
      if (!own.staged_bytes.empty() && node.def->role == Role::kTile) staged += ", kTileStagedBytes<" + name + ">";
      code.body += "  struct " + name + " {\n" + own.body + "  };\n";
      code.refs.insert(code.refs.end(), own.refs.begin(), own.refs.end());
      for (const std::string& header : own.headers)
        if (std::ranges::find(code.headers, header) == code.headers.end()) code.headers.push_back(header);
    }
    code.body +=
        "  static constexpr int staged_bytes() { return largest(" + staged + "); }\n" +
        "  template <class Run>\n  static MPK_DEVICE bool compute(Run& run, const Job& job, uint32_t row) {\n" +
        "    return " + calls + ";\n  }\n";
    code.num_small_workers = static_cast<uint32_t>(std::min<int64_t>(place.job.cut.num_tiles, 1 << 20));
    return code;
  }

  struct Part {
    const char *kernel, *call;
    std::vector<Field> fields = {};
  };

  static Part part_of(const Node& node) {
    if (node.def->role == Role::kPointwise) return {"pointwise", "points"};
    if (node.def->role == Role::kTile) return {"tile", "tiles"};
    return {"reduce", "reduce", {{"splits", 1}}};
  }
};

const RowRuns kRowRuns{};
[[maybe_unused]] const bool kRegistered = add_run_kernel(kRowRuns);

}  // namespace
}  // namespace mpk
