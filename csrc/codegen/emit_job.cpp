// One function per kind of job.
#include <algorithm>
#include <bit>
#include <limits>
#include <map>

#include "../schedule/access.h"
#include "emit.h"

namespace mpk::codegen {
namespace {

constexpr int64_t kMaxBatch = 16;

std::string constant(const std::string& name, int64_t v) {
  return "  static constexpr int " + name + " = " + str(v) + ";\n";
}
std::string flag(const std::string& name, bool v) {
  return "  static constexpr bool " + name + " = " + (v ? "true" : "false") + ";\n";
}
std::string function(const std::string& result, const std::string& signature, const std::string& body) {
  return "  static MPK_DEVICE " + result + " " + signature + " {\n" + body + "  }\n";
}
std::string returning(const std::string& result, const std::string& signature, const std::string& value) {
  return function(result, signature, "    return " + value + ";\n");
}
// switch (i) over values; the last is the default.
std::string choose(const std::string& i, const std::vector<std::string>& values) {
  if (std::all_of(values.begin(), values.end(), [&](const std::string& v) { return v == values.front(); }))
    return values.front();
  std::string text;
  for (size_t k = 0; k + 1 < values.size(); k++)
    text += i + " == " + str(static_cast<int64_t>(k)) + " ? " + values[k] + " : ";
  return text + values.back();
}

bool contains(const std::vector<int>& list, int v) { return std::find(list.begin(), list.end(), v) != list.end(); }

void require(bool condition, const Node& node, const std::string& why) {
  if (!condition) fail(node, why);
}

void check_dtype(const Node& node, const Operand& operand, DType expected) {
  require(operand.tensor.dtype == expected, node,
          "operand " + operand.name + " is " + info(operand.tensor.dtype).name + ", expected " + info(expected).name);
}

void require_stream_dtype(const Node& node, DType t) {
  require(is_float(t) && t != DType::kF64, node,
          std::string(info(t).name) + " is not supported, expected float32, float16 or bfloat16");
}

// ---- programs

JobCode emit_points(Plan& plan, const Node& node) {
  JobCode code{"Points", "run_points"};
  Refs refs(plan, code.refs);
  const int64_t points = node.program->num_points();
  const bool wide = points > (int64_t(1) << 31) - kConsumerThreads * plan.schedule.target.num_workers - 1;
  const std::string index = wide ? "int64_t" : "int32_t";
  const ProgramCode program = emit_program(plan, refs, node, {.prefix = "", .index_type = index, .point = "point"});
  code.body = "  using Index = " + index + ";\n  static constexpr Index kPoints = " + str(points) + ";\n" +
              function("void", "point(const Job& job, Index point)", program.body);
  code.num_small_workers =
      static_cast<uint32_t>(std::min<int64_t>((points + kConsumerThreads - 1) / kConsumerThreads, 1 << 20));
  return code;
}

// Scratch for partial results of a phase. They are polled, with no event between writer and reader, so a place is used
// again only by a phase that begins to write, behind its events, when all workers have signalled this one or a later:
// their polls are over. Otherwise a phase has its own. Launches follow each other.
int64_t allocate_partials(Plan& plan, int phase, int64_t bytes) {
  bytes = (bytes + 255) / 256 * 256;
  for (Plan::Scratch& place : plan.scratch)
    if (place.phase < phase && place.bytes >= bytes && plan.happens_before(place.phase, phase)) {
      place.phase = phase;
      return place.offset;
    }
  const int64_t offset = (plan.workspace_bytes + 255) / 256 * 256;
  plan.scratch.push_back({phase, offset, bytes});
  plan.workspace_bytes = offset + bytes;
  return offset;
}

// Pieces that a row is cut into: as many as there are workers for, if a row is worth it.
int64_t pieces_of_row(int64_t outer, int64_t inner, int64_t workers) {
  constexpr int64_t kLeast = 2048;  // elements of a piece
  return outer == 0 ? 1 : std::max<int64_t>(std::min(workers / outer, inner / kLeast), 1);
}

JobCode emit_reduce(Plan& plan, int phase, const Node& node) {
  JobCode code{"Reduce", "run_reduce", "", "256"};
  Refs refs(plan, code.refs);
  const Program& program = *node.program;
  const std::string op = node.string_attr("op");
  const std::map<std::string, std::string> classes = {{"sum", "Sum"},   {"mean", "Mean"},     {"prod", "Prod"},
                                                      {"amax", "AMax"}, {"amin", "AMin"},     {"any", "Any"},
                                                      {"all", "All"},   {"argmax", "ArgMax"}, {"argmin", "ArgMin"}};
  const auto found = classes.find(op);
  require(found != classes.end(), node, "unknown reduction '" + op + "'");
  const DType value_type = program.instrs.back().dtype;
  const std::string computed = value_type == DType::kF64 ? "double" : is_float(value_type) ? "float" : "int64_t";
  const int64_t inner = program.domain.back(), outer = inner == 0 ? 0 : program.num_points() / inner;
  const ProgramCode value =
      emit_program(plan, refs, node, {.prefix = "", .index_type = "int64_t", .point = "outer", .inner = "inner"});
  const Operand& out = node.operands.back();
  Tensor rows = out.tensor;  // every element a row
  rows.shape.push_back(1);
  rows.strides.push_back(1);
  const std::string out_type = cuda_type(out.tensor.dtype);
  code.body = "  using Op = reduce::" + found->second + "<" + computed +
              ">;\n  static constexpr int64_t kOuter = " + str(outer) + ", kInner = " + str(inner) + ";\n" +
              function(computed, "value(const Job& job, int64_t outer, int64_t inner)",
                       value.body + "    return cast<" + computed + ">(" + value.result + ");\n") +
              "  template <class R>\n" +
              function("void", "finish(const Job& job, int64_t outer, R result)",
                       "    " + refs.pointer(node, out.tensor, true) + "[" + row_offset(rows, "outer") + "] = cast<" +
                           out_type + ">(result);\n");
  const int64_t pieces = pieces_of_row(outer, inner, plan.schedule.target.num_workers);
  code.body += constant("kPieces", pieces);
  if (pieces > 1) {
    constexpr int64_t kPieceBytes = 32;
    const int64_t partials = allocate_partials(plan, phase, outer * pieces * kPieceBytes);
    code.body += constant("kPieceBytes", kPieceBytes) +
                 returning("uint8_t*", "partials(const Job& job)",
                           "job.pointer<uint8_t>(" + str(refs.add_raw(kWorkspaceIndex, partials)) + ")");
  }
  return code;
}

// ---- row tasks

JobCode emit_row(Plan& plan, int phase, const Node& node) {
  JobCode code{"Row", "run_rows", "", "kRowStagedBytes<V>"};
  Refs refs(plan, code.refs);
  const Tensor& x = node.operands.front().tensor;
  const Chain chain{{&node}, &x};
  const ChainCode rows = emit_chain(plan, refs, node, chain, {.phase = phase, .target = &node.operands.back().tensor});
  const int64_t size = x.shape.back();
  code.headers = rows.headers;
  code.body = "  using T = " + std::string(cuda_type(x.dtype)) + ";\n" +
              constant("kRows", x.numel() / std::max<int64_t>(size, 1)) + constant("kSize", size) + rows.text;
  return code;
}

// ---- linear

// Whether x is small enough to be brought into shared memory.
bool stages(const Plan& plan, const Node& linear) {
  const Tensor& x = linear.operand("x").tensor;
  return x.numel() * size_bytes(x.dtype) <= plan.schedule.target.smem_bytes / 2;
}

struct LinearShape {
  int64_t batch, size, parts, element, slot_bytes;
  int64_t tile_rows, chunk_parts, chunk_size;

  int64_t rows_in_chunk() const { return chunk_parts * tile_rows; }
  int64_t chunks() const { return (size + chunk_size - 1) / chunk_size; }  // of a row
  int64_t entries() const { return parts / chunk_parts * chunks(); }       // of a tile
  bool exceeds_slot() const { return size * element > slot_bytes; }        // a row
  int64_t entry_bytes() const { return rows_in_chunk() * chunk_size * element; }
  // Entries that a warp takes one after the other, with one row of x.
  int64_t run() const { return exceeds_slot() ? 1 : chunks(); }
};

// How rows are cut into tiles. What a worker's slowest warp takes decides: it takes `rounds` tiles one after the other,
// each of which costs its elements and, for waiting, summing over the warp and storing, as much as some more. With one
// row of x it takes runs of a tile's chunks: of rows that fit a slot all, and otherwise one.
//
// Chunks of a tile fit one slot. With several rows of x, a chunk holds several weight rows, so that a value of x read
// from shared memory is used more than once. With one, tiles that leave slots unfilled, or cut rows that would fit,
// are taken only where the ring holds all of a worker's rows at once; and rows longer than a slot stand alone, so that
// the bits of their sums, which several warps add up, depend on their length alone.
LinearShape choose_shape(int64_t batch, int64_t size, int64_t parts, int64_t element, const std::vector<int64_t>& rows,
                         int64_t workers, int64_t slot_bytes) {
  constexpr int64_t kTileCost = 1024, kBytesAtOnce = 20 * 8192, kNever = std::numeric_limits<int64_t>::max();
  const int64_t slot = slot_bytes / element;  // elements
  const auto chunked = [&](int64_t tile_rows, int64_t chunk_parts) {
    LinearShape s{batch, size, parts, element, slot_bytes, tile_rows, chunk_parts, size};
    if (s.rows_in_chunk() * size <= slot) return s;
    s.chunk_size = std::max<int64_t>(slot / s.rows_in_chunk() / 256, 1) * 256;
    for (int64_t equal = s.chunk_size; equal >= s.chunk_size / 2 && equal > 0; equal -= 256)  // equal ones are quicker
      if (size % equal == 0) {
        s.chunk_size = equal;
        break;
      }
    return s;
  };
  const auto cost = [&](const LinearShape& s) {
    int64_t tiles = 0;
    for (int64_t n : rows) tiles += (n + s.tile_rows - 1) / s.tile_rows;
    const int64_t mine = (tiles + workers - 1) / workers;
    const auto rounds = [](int64_t n) { return (n + kConsumerWarps - 1) / kConsumerWarps; };
    if (batch > 1) return rounds(mine) * (kTileCost + s.tile_rows * parts * size);
    const bool streams_well = s.chunk_size == size && s.rows_in_chunk() * size * 8 >= slot * 7;
    const bool fits = mine * s.entries() * slot_bytes <= kBytesAtOnce;
    if (s.exceeds_slot() ? s.tile_rows > 1 : !streams_well && !fits) return kNever;
    return rounds(mine * s.entries() / s.run()) *
           (kTileCost + s.rows_in_chunk() * std::min(size, s.run() * s.chunk_size));
  };
  const int64_t most = batch == 1 ? 4 : batch <= 4 ? 2 : batch <= 8 ? 4 : 2;  // weight rows in a chunk
  const auto parts_in_chunk = [&](int64_t tile_rows) {
    return parts * tile_rows <= most && (batch > 1 || parts * tile_rows * size <= slot) ? parts : 1;
  };
  LinearShape best = chunked(1, parts_in_chunk(1));
  for (int64_t tile_rows = 2; tile_rows <= most; tile_rows += batch == 1 ? 1 : tile_rows) {
    const LinearShape s = chunked(tile_rows, parts_in_chunk(tile_rows));
    if (const int64_t c = cost(s); c != kNever && c <= cost(best)) best = s;
  }
  return best;
}

// The shape of a job's tiles. Linears with a common epilogue are computed side by side, others one after the other.
LinearShape shape_of(const Schedule& schedule, const Job& job, int64_t slot_bytes) {
  const auto operand = [&](int n, const char* name) -> const Tensor& {
    return schedule.graph.nodes()[n].operand(name).tensor;
  };
  const Tensor& x = operand(job.body.front(), "x");
  const bool paired = !job.epilogue.empty();
  std::vector<int64_t> rows;
  for (int n : job.body)
    if (rows.empty() || !paired) rows.push_back(operand(n, "weight").shape[0]);
  return choose_shape(x.shape[0], x.shape[1], paired ? static_cast<int64_t>(job.body.size()) : 1, size_bytes(x.dtype),
                      rows, schedule.target.num_workers, slot_bytes);
}

JobCode emit_linear(Plan& plan, int phase, const Job& job, bool may_claim) {
  const Node& first = plan.node(job.body.front());
  JobCode code{"Linear", "linear::compute", "", "linear::Shape<V>::kStagedBytes", "", {first.def->header}};
  Refs refs(plan, code.refs);
  const Tensor& x = first.operand("x").tensor;
  const DType dtype = x.dtype;
  const std::string type = cuda_type(dtype);
  const int64_t batch = x.shape[0], size = x.shape[1], element = size_bytes(dtype);
  require_stream_dtype(first, dtype);
  require(batch >= 1 && batch <= kMaxBatch, first,
          "x has " + str(batch) + " rows, at most " + str(kMaxBatch) + " are supported");
  require(size >= 1, first, "x has no columns");
  const bool paired = !job.epilogue.empty();
  const int64_t parts = paired ? static_cast<int64_t>(job.body.size()) : 1;
  std::vector<int64_t> rows;
  bool aligned = size * element % 16 == 0;
  for (int n : job.body) {
    const Node& node = plan.node(n);
    for (const Operand& operand : node.operands) {
      check_dtype(node, operand, dtype);
      require(operand.tensor.shape.back() == 1 || operand.tensor.strides.back() == 1, node,
              "operand " + operand.name + " needs stride 1 in its last dimension");
    }
    require(pattern(node.operand("x").tensor) == pattern(x) && node.operand("x").tensor.buffer == x.buffer, node,
            "linears of one job must have one input");
    const Tensor& weight = node.operand("weight").tensor;
    aligned &= aligned_rows(plan, weight, false) && has_short_rows(weight);
    rows.push_back(weight.shape[0]);
    require(!paired || rows.back() == rows.front(), node, "linears with a common epilogue must have equally many rows");
  }

  const Chain chain = find_chain(plan, job.prologue, first, x);
  const bool staged = !chain.tasks.empty() || !aligned || stages(plan, first);
  require(!staged || batch * ((size * element + 15) / 16 * 16) <= plan.schedule.target.smem_bytes * 3 / 5, first,
          "x of " + str(batch) + " x " + str(size) + " elements does not fit shared memory" +
              (chain.tasks.empty() ? "" : "; schedule the row tasks in front of it as jobs of their own"));
  require(staged || aligned_rows(plan, x, true), first, "x is too large to stage and not aligned to 16 bytes");
  require(staged || !plan.polled(x.buffer), first, "x is too large to stage, but polled");
  LinearShape shape = shape_of(plan.schedule, job, plan.slot_bytes);
  if (!aligned) {
    shape.tile_rows = 1;
    shape.chunk_parts = 1;
    shape.chunk_size = size;
    code.compute = "linear::compute_direct";
  }

  std::vector<std::string> first_tile, num_rows, weights, pitches;
  int64_t tiles = 0;
  for (size_t i = 0; i < job.body.size(); i++) {
    const Node& node = plan.node(job.body[i]);
    const Tensor& weight = node.operand("weight").tensor;
    const int64_t first = paired ? 0 : tiles, pitch = weight.strides[0] * element;
    first_tile.push_back(str(first) + "u");
    num_rows.push_back(str(rows[i]) + "u");
    tiles = first + (rows[i] + shape.tile_rows - 1) / shape.tile_rows;
    weights.push_back("job.pointer<const uint8_t>(" + str(refs.add(node, weight)) + ")");
    pitches.push_back("int64_t(" + str(pitch) + ")");
    if (aligned)
      code.matrices.push_back({static_cast<uint32_t>(pitch), static_cast<uint32_t>(rows[i]),
                               static_cast<uint32_t>(first), static_cast<uint32_t>(tiles)});
  }
  if (paired) first_tile = {"0u"}, num_rows = {num_rows.front()};
  const auto u32 = [](int64_t v) { return static_cast<uint32_t>(v); };
  const uint32_t entries = u32(shape.entries()), run = u32(shape.run());
  const bool keeps_sums = u32(shape.rows_in_chunk()) <= kSumsOfRun && mpk::keeps_sums(entries, run);
  if (aligned && staged && batch == 1 && parts * shape.tile_rows <= 4 && (run == entries || keeps_sums))
    code.shared_loop = type;
  const bool claimed =
      may_claim && aligned && job.assignment == Assignment::kClaimed && (run == 1 || code.shared_loop.empty());
  code.stream = {{u32(shape.tile_rows), u32(parts), u32(shape.chunk_parts), u32(size * element),
                  u32(shape.chunk_size * element), u32(shape.chunks()), entries, inverse(u32(shape.chunks())),
                  inverse(entries), entries_in_flight(u32(shape.entry_bytes()))},
                 claimed ? make_tickets(u32(tiles), entries, plan.schedule.target.num_workers) : Tickets{},
                 run};

  const ChainCode prologue = emit_chain(plan, refs, first, chain, {.phase = phase});
  code.headers.insert(code.headers.end(), prologue.headers.begin(), prologue.headers.end());
  std::string& body = code.body;
  body = "  using T = " + type + ";\n" + constant("kBatch", batch) + constant("kSize", size) +
         constant("kSegments", static_cast<int64_t>(first_tile.size())) + constant("kParts", parts) +
         constant("kTileRows", shape.tile_rows) + constant("kChunkParts", shape.chunk_parts) +
         constant("kChunkSize", shape.chunk_size) + "  static constexpr uint32_t kNumTiles = " + str(tiles) + ";\n" +
         flag("kStaged", staged) + flag("kRowTasks", !chain.tasks.empty()) + flag("kClaimed", claimed) +
         flag("kSharesLoop", !code.shared_loop.empty()) +
         returning("uint32_t", "first_tile(int i)", choose("i", first_tile)) +
         returning("uint32_t", "num_rows(int i)", choose("i", num_rows)) + prologue.text;
  if (!aligned)
    body += returning("const uint8_t*", "weight(const Job& job, int i)", choose("i", weights)) +
            returning("int64_t", "weight_pitch(int i)", choose("i", pitches));
  body += constant("kPitchX", x.strides[0]) +
          returning("const T*", "x(const Job& job)", staged ? "nullptr" : refs.pointer(first, x));

  bool early = prologue.early;
  for (const std::vector<int>* nodes : {&job.body, &job.epilogue})
    for (int n : *nodes)
      for (const Operand& operand : plan.node(n).operands) {
        const int b = operand.tensor.buffer;
        const bool made_here =
            std::any_of(job.body.begin(), job.body.end(), [&](int m) { return writes(plan.node(m), b); }) ||
            std::any_of(job.epilogue.begin(), job.epilogue.end(), [&](int m) { return writes(plan.node(m), b); });
        if (!operand.is_write && operand.name != "x" && !made_here)
          early &= plan.polled(b) || plan.known_before(b, phase);
      }
  body += flag("kEarly", early);

  // What becomes of a value: bias, rounding, the linear's own result, the epilogue.
  std::string fields, preload, finish;
  std::vector<LocalValue> locals;
  for (size_t i = 0; i < job.body.size(); i++) {
    const Node& node = plan.node(job.body[i]);
    const Tensor& y = node.operands.back().tensor;
    const std::string number = str(static_cast<int64_t>(i));
    const std::string part = paired ? number : "0";
    std::string value = "results[" + part + "]", store;
    if (const Operand* bias = node.find("bias")) {
      const std::string field = paired ? "bias" + number : "bias0";
      if (fields.find(" " + field + ";") == std::string::npos) fields += "    uint32_t " + field + ";\n";
      const std::string load = "extra." + field + " = to_word(" + refs.pointer(node, bias->tensor) + "[n]);\n";
      preload += "    " + (paired ? load : "if (segment == " + number + ") " + load);
      value += " + to_float(from_word<T>(extra." + field + "))";
    }
    const std::string name = "y" + number;
    if (!contains(job.unstored, y.buffer))
      store = "    " + emit_store(plan, refs, node, y, "int64_t(r) * " + str(y.strides[0]) + " + n", name) + "\n";
    std::string statements = "    const T " + name + " = cast<T>(" + value + ");\n" + store;
    if (!paired && job.body.size() > 1) statements = "    if (segment == " + number + ") {\n" + statements + "    }\n";
    finish += statements;
    if (paired) locals.push_back({y.buffer, pattern(y), name, dtype});
  }
  if (paired) {
    const int64_t n = rows.front();
    require(batch * n < (int64_t(1) << 31), first, "more than 2^31 results");
    finish += "    const int32_t point = r * " + str(n) + " + n;\n";
    std::string epilogue_preload;
    for (size_t i = 0; i < job.epilogue.size(); i++) {
      const Node& node = plan.node(job.epilogue[i]);
      require(node.program && node.program->num_points() == batch * n, node,
              "an epilogue of " + str(batch * n) + " results must have as many points");
      const ProgramCode program = emit_program(plan, refs, node,
                                               {.prefix = "e" + str(static_cast<int64_t>(i)) + "_",
                                                .point = "point",
                                                .early_loads = true,
                                                .locals = &locals,
                                                .unstored = &job.unstored});
      fields += program.preload_fields;
      epilogue_preload += program.preload;
      finish += program.body;
    }
    if (!epilogue_preload.empty()) preload += "    const int32_t point = r * " + str(n) + " + n;\n" + epilogue_preload;
  }
  code.has_extra = !fields.empty();
  body += flag("kHasExtra", code.has_extra) + "  struct Extra {\n" + fields + "  };\n" +
          function("Extra", "preload(const Job& job, int segment, int r, uint32_t n)",
                   "    Extra extra{};\n" + preload + "    return extra;\n") +
          "  template <class C>\n" +
          function("void",
                   "finish(C& c, const Job& job, int segment, int r, uint32_t n, const float (&results)[kParts], const "
                   "Extra& extra)",
                   finish);
  return code;
}

// ---- attention

// Heads that share a key-value head are worked on together, as far as registers hold them.
int64_t heads_at_a_time(const Node& attention) {
  const Tensor& q = attention.operand("q").tensor;
  const int64_t shared = q.shape[1] / attention.operand("k_cache").tensor.shape[1];
  const int64_t most = q.shape[2] <= 128 ? 8 : 2;
  int64_t passes = 1;
  while (shared % passes != 0 || shared / passes > most) passes++;
  return shared / passes;
}

JobCode emit_attention(Plan& plan, int phase, const Job& job) {
  const Node& node = plan.node(job.body.front());
  require(job.body.size() == 1 && job.epilogue.empty(), node, "attention takes no companions and no epilogue");
  JobCode code{"Attention", "attention::compute", "attention::load", "attention::Shape<V>::kStagedBytes",
               "",          {node.def->header}};
  Refs refs(plan, code.refs);
  const Tensor& q = node.operand("q").tensor;
  const Operand& k_cache = node.operand("k_cache");
  const Operand& v_cache = node.operand("v_cache");
  const Operand *k_new = node.find("k_new"), *v_new = node.find("v_new"), *slot = node.find("slot"),
                *mask = node.find("mask"), *limit = node.find("limit");
  const Tensor& y = node.operands.back().tensor;
  const DType dtype = q.dtype;
  const std::string type = cuda_type(dtype);
  const int64_t element = size_bytes(dtype);
  const int64_t batch = q.shape[0], heads = q.shape[1], size = q.shape[2], groups = k_cache.tensor.shape[1],
                length = k_cache.tensor.shape[2];
  require_stream_dtype(node, dtype);
  require(groups > 0 && heads % groups == 0, node, str(heads) + " heads are no multiple of " + str(groups) + " groups");
  require(size % 8 == 0 && size >= 8 && size <= 256, node,
          "the head size must be a multiple of 8 up to 256, got " + str(size));
  require(length > 0 && length < (int64_t(1) << 31), node, "a cache of " + str(length) + " positions is not supported");
  require((k_new == nullptr) == (v_new == nullptr) && (k_new == nullptr) == (slot == nullptr), node,
          "k_new, v_new and slot go together");
  for (const Operand* operand : {&k_cache, &v_cache}) {
    check_dtype(node, *operand, dtype);
    require(aligned_rows(plan, operand->tensor, false) && has_short_rows(operand->tensor), node,
            "operand " + operand->name +
                " needs offsets and strides that are multiples of 16 bytes, and less than 4 GiB between positions");
  }
  for (const Operand& operand : node.operands)
    if (operand.name != "mask" && operand.name != "limit" && operand.name != "slot")
      require(operand.tensor.strides.back() == 1, node,
              "operand " + operand.name + " needs stride 1 in its last dimension");
  if (slot) check_dtype(node, *slot, DType::kI64);
  if (limit) check_dtype(node, *limit, DType::kI64);

  const int64_t together = heads_at_a_time(node), passes = heads / groups / together;
  const int64_t workers = plan.schedule.target.num_workers;
  // Of a head of a piece: up to 256 elements, as the 32 lanes of a warp share them, the maximum and the sum.
  const int64_t partial = 8 * std::max<int64_t>(std::bit_ceil(static_cast<uint64_t>(size)), 64) + 32;
  const int64_t pieces = kv_max_pieces(batch, groups * passes, workers);
  const int64_t partials = allocate_partials(plan, phase, pieces * together * partial);
  const std::string style = node.string_attr("style");
  require(style == "sdpa" || style == "eager", node, "the style must be sdpa or eager, got " + style);

  std::string& body = code.body;
  body = "  using T = " + type + ";\n" + constant("kBatch", batch) + constant("kGroups", groups) +
         constant("kPasses", passes) + constant("kHeads", together) + constant("kFewHeads", together % 2 == 0 ? 2 : 1) +
         constant("kSize", size) + constant("kLength", length) + flag("kZeroWithoutKeys", style == "sdpa") +
         constant("kWorkers", workers) +
         returning("int64_t", "limit(const Job& job, uint32_t b)",
                   limit ? refs.pointer(node, limit->tensor) + "[int64_t(b) * " + str(limit->tensor.strides[0]) + "]"
                         : "kLength") +
         constant("kPartialBytes", partial) +
         returning("uint8_t*", "partials(const Job& job)",
                   "job.pointer<uint8_t>(" + str(refs.add_raw(kWorkspaceIndex, partials)) + ")") +
         "  static constexpr float kScale = " + float_literal(node.float_attr("scale")) + ";\n" +
         flag("kHasNew", k_new != nullptr) + flag("kHasMask", mask != nullptr) +
         "  static constexpr uint32_t kPitchK = " + str(k_cache.tensor.strides[2] * element) +
         ", kPitchV = " + str(v_cache.tensor.strides[2] * element) + ";\n";
  body += returning("int64_t", "slot(const Job& job)", slot ? "*" + refs.pointer(node, slot->tensor) : "-1");
  bool early = true;
  for (const Operand* first : {slot, limit})
    if (first) early &= plan.known_before(first->tensor.buffer, phase);
  for (const Operand* cache : {&k_cache, &v_cache})
    body += returning("T*", cache->name + "(const Job& job, uint32_t b, uint32_t g)",
                      refs.pointer(node, cache->tensor, true) + " + int64_t(b) * " + str(cache->tensor.strides[0]) +
                          " + int64_t(g) * " + str(cache->tensor.strides[1]));
  if (mask) {
    const Tensor& m = mask->tensor;
    require(m.dtype == DType::kBool || (is_float(m.dtype) && m.dtype != DType::kF64), node,
            "the mask must be bool, float32, float16 or bfloat16");
    const std::string at = refs.pointer(node, m) + "[int64_t(b) * " + str(m.strides[0]) + " + int64_t(h) * " +
                           str(m.strides[1]) + " + int64_t(position) * " + str(m.strides[2]) + "]";
    body += returning("float", "mask(const Job& job, uint32_t b, uint32_t h, uint32_t position)",
                      m.dtype == DType::kBool ? at + " ? 0.0f : -infinity()" : "to_float(" + at + ")");
  }
  body += flag("kPolled", plan.polled(y.buffer));
  body += returning(
      plan.polled(y.buffer) ? "uint16_t*" : "T*", "y(const Job& job, uint32_t b, uint32_t h)",
      refs.pointer(node, y, true) + " + int64_t(b) * " + str(y.strides[0]) + " + int64_t(h) * " + str(y.strides[1]));
  // Chains number their references from 0, so that equal chains have equal code.
  std::vector<ChainCode> chains;
  std::vector<bool> applies;
  using Named = std::pair<const char*, const Operand*>;
  for (const auto& [name, operand] : {Named{"Q", node.find("q")}, Named{"K", k_new}, Named{"V", v_new}}) {
    if (!operand) continue;
    check_dtype(node, *operand, dtype);
    const Chain chain = find_chain(plan, job.prologue, node, operand->tensor);
    std::vector<uint64_t> numbered;
    Refs own(plan, numbered);
    chains.push_back(emit_chain(plan, own, node, chain, {.phase = phase, .batch_row = true}));
    applies.push_back(!chain.tasks.empty());
    const ChainCode& made = chains.back();
    const std::string first = std::string("kRefs") + name;
    body += "  static constexpr uint32_t " + first + " = " + str(static_cast<int64_t>(code.refs.size())) + ";\n" +
            (made.text == chains.front().text && chains.size() > 1
                 ? std::string("  using Rows") + name + " = RowsQ;\n"
                 : std::string("  struct Rows") + name + " {\n" + made.text + "  };\n");
    code.refs.insert(code.refs.end(), numbered.begin(), numbered.end());
    early &= made.early;
    code.headers.insert(code.headers.end(), made.headers.begin(), made.headers.end());
  }
  body += flag("kOneChain", chains.size() == 3 && chains[0].text == chains[1].text && !applies[2] &&
                                chains[2].fetch == chains[0].fetch);
  body += flag("kEarly", early);
  return code;
}

}  // namespace

// Candidates are compared by the bytes of the slots that a launch fills with weights; a larger one must spare a
// twentieth, and leave slots for all warps. Linears of several rows of x do not count: there x takes the ring's room.
int64_t choose_slot_bytes(const Schedule& schedule) {
  const auto needed = [&](int64_t slot_bytes) {
    double total = 0;
    for (const Phase& phase : schedule.phases)
      for (const Job& job : phase.jobs) {
        const Node& first = schedule.graph.nodes()[job.body.front()];
        if (first.def->name != "linear") continue;
        const Tensor& x = first.operand("x").tensor;
        if (x.shape[0] != 1 || x.shape[1] < 1) continue;
        const LinearShape shape = shape_of(schedule, job, slot_bytes);
        int64_t rows = 0;
        for (int n : job.body) rows += schedule.graph.nodes()[n].operand("weight").tensor.shape[0];
        total += double(rows) * double(shape.chunks() * slot_bytes) / double(shape.rows_in_chunk());
      }
    return total;
  };
  constexpr int64_t kFewestSlots = 16;
  const int64_t most = std::min<int64_t>(kMaxSlotBytes, schedule.target.smem_bytes / kFewestSlots);
  int64_t best = kMinSlotBytes;
  double least = needed(best);
  for (int64_t bytes = best + 1024; bytes <= most; bytes += 1024)
    if (const double total = needed(bytes); total < 0.95 * least) best = bytes, least = total;
  return best;
}

JobCode emit_job(Plan& plan, int phase, const Job& job, bool may_claim) {
  const Node& node = plan.node(job.body.front());
  const bool alone = job.body.size() == 1 && job.prologue.empty() && job.epilogue.empty();
  if (node.def->name == "linear") return emit_linear(plan, phase, job, may_claim);
  if (node.def->name == "attention") return emit_attention(plan, phase, job);
  require(alone, node, "only linear and attention take companions");
  switch (node.def->role) {
    case Role::kPointwise:
      return emit_points(plan, node);
    case Role::kReduce:
      return emit_reduce(plan, phase, node);
    case Role::kRow:
      return emit_row(plan, phase, node);
    case Role::kTile:
      return emit_tile(plan, node);
    case Role::kStream:
      break;
  }
  fail(node, "this stream task has no CUDA code");
}

}  // namespace mpk::codegen
