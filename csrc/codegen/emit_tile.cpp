// Tile tasks: what a task's function is told of a node at compile time, and where a tile's slices begin.
#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "emit.h"
#include "torch_mpk/codegen/cpu.h"
#include "torch_mpk/graph/tiling.h"

namespace mpk::codegen {
namespace {

// "head_dim" -> "HeadDim": no keyword of C++, and one style for all names that come from signatures.
std::string camel(const std::string& name) {
  if (name == "...") return "Leading";
  std::string text;
  bool begins = true;
  for (char c : name) {
    if (c != '_') text += begins ? static_cast<char>(std::toupper(c)) : c;
    begins = c == '_';
  }
  return text;
}

std::string attribute(const std::string& name, const Attr& value) {
  std::string type = "int64_t", text;
  if (const auto* i = std::get_if<int64_t>(&value)) text = str(*i);
  if (const auto* d = std::get_if<double>(&value)) type = "double", text = double_literal(*d);
  if (const auto* s = std::get_if<std::string>(&value)) {
    type = "const char*";
    text = "\"";
    for (char c : *s) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\%03o", static_cast<unsigned char>(c));
      text += std::isalnum(static_cast<unsigned char>(c)) || c == '_' ? std::string(1, c) : escaped;
    }
    text += "\"";
  }
  return "  static constexpr " + type + " k" + camel(name) + " = " + text + ";\n";
}

// What differs between devices: how a type is called, where an operand is, and what its address is a multiple of.
struct Dialect {
  std::function<std::string(DType)> type;
  std::function<std::string(const Operand&)> pointer;
  std::function<int64_t(const Tensor&)> alignment;
};

class TileWriter {
 public:
  TileWriter(const Node& node, Dialect dialect) : node_(node), dialect_(std::move(dialect)), tiling_(tiling(node)) {}

  // `through_ring`: the streamed operand is.
  std::string body(bool through_ring = false) const {
    const int64_t num_tiles = tiling_.num_tiles();
    if (num_tiles < 1 || num_tiles >= int64_t(1) << 31)
      fail(node_, "it is cut into " + str(num_tiles) + " tiles, expected 1 to 2^31 - 1: cut it in another size");
    std::string text = "  static constexpr uint32_t kTiles = " + str(num_tiles) + ";\n";
    for (const TiledDim& dim : tiling_.dims)
      text += "  static constexpr int64_t k" + camel(dim.name) + " = " + str(dim.size) + ";\n";
    for (const auto& [name, value] : node_.attrs) text += attribute(name, value);
    std::string arguments, stream;
    int64_t most = 0;
    for (const OperandSpec& spec : node_.def->operands) {
      const Operand* operand = node_.find(spec.name);
      text += traits(spec, operand);
      const bool streamed = operand != nullptr && spec.name == node_.def->stream;
      arguments += ",\n        " + (streamed ? "stream" : argument(spec, operand));
      if (streamed) stream = stream_members(spec, *operand);
      if (operand != nullptr) most = std::max(most, slice_bytes(spec, operand->tensor));
    }
    const std::string task = "tasks::" + node_.def->name;
    text +=
        "  static constexpr int kTileBytes = " + str(std::min<int64_t>(most, 1 << 30)) + ";  // of the largest slice\n";
    text += tile() + stream;
    // Names that end in _ are none of the signature's.
    text +=
        "  template <class V_>\n  static constexpr int shared_bytes() {\n    return " + task +
        "::kSharedBytes<V_>;\n  }\n  template <class V_, class Threads_" + (through_ring ? ", class Stream_" : "") +
        ">\n  static MPK_DEVICE void compute(Threads_& threads, const mpk::Job& job, uint32_t number, uint8_t* shared" +
        (through_ring ? ", Stream_& stream" : "") + ") {\n    const Tile tile = at(number);\n";
    if (!stream.empty() && !through_ring)
      text +=
          "    mpk::DirectStream<StreamT> stream{stream_data(job, tile), stream_rows(tile), kStreamSize, "
          "kStreamPitch};\n";
    return text + "    " + task + "::compute<V_>(threads, tile, shared" + arguments + ");\n  }\n";
  }

  uint32_t num_tiles() const { return static_cast<uint32_t>(tiling_.num_tiles()); }

 private:
  // The tiled dimension that is an operand's dimension number d, or null where its size is literal.
  const TiledDim* dim_of(const OperandSpec& spec, const Tensor& t, size_t d) const {
    const size_t leading = num_leading(spec, t);
    const std::string& name = d < leading ? spec.dims.front() : spec.dims[d - leading + spec.has_leading()];
    for (const TiledDim& dim : tiling_.dims)
      if (dim.name == name) return &dim;
    return nullptr;
  }

  std::string traits(const OperandSpec& spec, const Operand* operand) const {
    const Tensor& t = (operand ? *operand : node_.operands.front()).tensor;
    std::string strides;
    if (operand != nullptr) {
      const size_t leading = num_leading(spec, t), count = t.shape.size() - leading;
      for (size_t d = 0; d < count; d++)
        strides += (d + 1 < count ? "d == " + str(static_cast<int64_t>(d)) + " ? " : "") + str(t.strides[leading + d]) +
                   (d + 1 < count ? " : " : "");
    }
    return "  struct " + camel(spec.name) + " {\n    using T = " + dialect_.type(t.dtype) +
           ";\n    static constexpr bool kPresent = " + (operand ? "true" : "false") +
           ";\n    static constexpr int kAlignment = " + str(operand ? alignment(spec, t) : 16) +
           ";\n    static constexpr int64_t stride([[maybe_unused]] int d) { return " +
           (strides.empty() ? "0" : strides) + "; }\n  };\n";
  }

  // Bytes that the address of every tile's slice is known to be a multiple of.
  int64_t alignment(const OperandSpec& spec, const Tensor& t) const {
    int64_t known = dialect_.alignment(t);
    const auto limit = [&](int64_t elements) {
      while (elements * size_bytes(t.dtype) % known != 0) known /= 2;
    };
    for (size_t d = 0; d < t.shape.size(); d++)
      if (const TiledDim* dim = dim_of(spec, t, d); dim && dim->count() > 1) limit(dim->step * t.strides[d]);
    return known;
  }

  int64_t slice_bytes(const OperandSpec& spec, const Tensor& t) const {
    int64_t bytes = size_bytes(t.dtype);
    for (size_t d = num_leading(spec, t); d < t.shape.size(); d++) {
      const TiledDim* dim = dim_of(spec, t, d);
      bytes *= dim ? dim->step : t.shape[d];
    }
    return bytes;
  }

  std::string argument(const OperandSpec& spec, const Operand* operand) const {
    if (operand == nullptr) return "static_cast<const typename " + camel(spec.name) + "::T*>(nullptr)";
    const Tensor& t = operand->tensor;
    std::string text = dialect_.pointer(*operand);
    const size_t leading = num_leading(spec, t);
    if (leading > 0) {
      Tensor rows = t;
      rows.shape.resize(leading);
      rows.strides.resize(leading);
      rows.shape.push_back(1);
      rows.strides.push_back(1);
      text += " + " + row_offset(rows, "tile.Leading.begin");
    }
    for (size_t d = leading; d < t.shape.size(); d++)
      if (const TiledDim* dim = dim_of(spec, t, d); dim && dim->count() > 1 && t.strides[d] != 0)
        text += " + tile." + camel(dim->name) + ".begin * " + str(t.strides[d]);
    return text;
  }

  // The slice of the streamed operand: rows of its last dimension, which is not cut.
  std::string stream_members(const OperandSpec& spec, const Operand& operand) const {
    const Tensor& t = operand.tensor;
    const bool is_matrix = t.shape.size() - num_leading(spec, t) == 2;
    const TiledDim* dim = is_matrix ? dim_of(spec, t, t.shape.size() - 2) : nullptr;
    const int64_t rows = !is_matrix ? 1 : dim ? dim->step : t.shape[t.shape.size() - 2];
    const auto constant = [](const char* name, int64_t v) {
      return std::string("  static constexpr int64_t ") + name + " = " + str(v) + ";\n";
    };
    return "  using StreamT = " + dialect_.type(t.dtype) + ";\n" + constant("kStreamRows", rows) +
           constant("kStreamSize", t.shape.back()) +
           constant("kStreamPitch", is_matrix ? t.strides[t.strides.size() - 2] : t.shape.back()) +
           "  static MPK_DEVICE const StreamT* stream_data(const mpk::Job& job, [[maybe_unused]] const Tile& tile) "
           "{\n" +
           "    return " + argument(spec, &operand) + ";\n  }\n" +
           "  static MPK_DEVICE int64_t stream_rows([[maybe_unused]] const Tile& tile) { return " +
           (dim ? "tile." + camel(dim->name) + ".size" : "kStreamRows") + "; }\n";
  }

  // Tile number `number`: of each dimension, what it has of it.
  std::string tile() const {
    std::string fields, statements;
    for (size_t i = tiling_.dims.size(); i-- > 0;) {
      const TiledDim& dim = tiling_.dims[i];
      const std::string name = camel(dim.name);
      fields = "    mpk::Range " + name + ";\n" + fields;
      if (dim.count() == 1) {
        statements += "    tile." + name + " = {0, 0, " + str(dim.size) + "};\n";
      } else {
        statements += "    tile." + name + " = range(number % " + str(dim.count()) + "u, " + str(dim.step) + ", " +
                      str(dim.size) + ");\n    number /= " + str(dim.count()) + "u;\n";
      }
    }
    return "  struct Tile {\n" + fields + "  };\n  static MPK_DEVICE Tile at([[maybe_unused]] uint32_t number) {\n" +
           "    Tile tile;\n" + statements + "    return tile;\n  }\n";
  }

  const Node& node_;
  const Dialect dialect_;
  const Tiling tiling_;
};

}  // namespace

JobCode emit_tile(Plan& plan, const Node& node) {
  const std::string& header = node.def->header_for(plan.schedule.target.arch);
  if (header.empty()) fail(node, "it has no device code: declare its header with @task(header=...)");
  JobCode code{"Tile", "run_tiles", "", "kTileStagedBytes<V>", "", {"torch_mpk/device/tile.cuh", header}};
  Refs refs(plan, code.refs);
  Dialect cuda;
  cuda.type = cuda_type;
  cuda.pointer = [&](const Operand& operand) { return refs.pointer(node, operand.tensor, operand.is_write); };
  cuda.alignment = [&](const Tensor& t) -> int64_t {  // inputs may come from anywhere
    int64_t known = 16;
    while (t.offset * size_bytes(t.dtype) % known != 0) known /= 2;
    const bool is_input = plan.graph().buffers()[t.buffer].kind == BufferKind::kInput;
    return is_input ? size_bytes(t.dtype) : known;
  };
  const TileWriter writer(node, cuda);
  const Operand* streamed = node.find(node.def->stream);
  const bool through_ring =
      streamed != nullptr && aligned_rows(plan, streamed->tensor, false) && has_short_rows(streamed->tensor);
  if (through_ring) {
    code.compute = "run_stream_tiles";
    code.load = "load_tiles";
    code.staged_bytes = "kStreamStagedBytes<V>";
  }
  code.body = writer.body(through_ring);
  code.num_small_workers = std::min<uint32_t>(writer.num_tiles(), 1 << 20);
  return code;
}

}  // namespace mpk::codegen

namespace mpk {

CpuTiles generate_cpu_tiles(const TBGraph& graph) {
  using namespace codegen;
  std::set<std::string> headers = {"torch_mpk/cpu/tile.h"};
  std::map<std::string, int> numbers;
  std::vector<std::string> bodies;
  CpuTiles tiles;
  for (const Node& node : graph.nodes()) {
    if (node.def->cpu_body.empty()) continue;
    headers.insert(node.def->cpu_body);
    Dialect cpu;
    cpu.type = [](DType t) -> std::string {
      return t == DType::kF16 ? "Float16" : t == DType::kBF16 ? "BFloat16" : cuda_type(t);
    };
    cpu.pointer = [&](const Operand& operand) {
      const std::string type = (operand.is_write ? "" : "const ") + cpu.type(operand.tensor.dtype);
      return "job.pointer<" + type + ">(" + str(&operand - node.operands.data()) + ")";
    };
    cpu.alignment = [](const Tensor& t) { return size_bytes(t.dtype); };
    const std::string body = TileWriter(node, cpu).body();
    const auto [found, fresh] = numbers.try_emplace(body, static_cast<int>(bodies.size()));
    if (fresh) bodies.push_back(body);
    tiles.functions.emplace_back(node.id, found->second);
  }
  if (bodies.empty()) return tiles;
  for (const std::string& header : headers) tiles.source += "#include \"" + header + "\"\n";
  tiles.source += "\nnamespace {\n\nusing namespace mpk;\n\n";
  std::string table;
  for (size_t i = 0; i < bodies.size(); i++) {
    const std::string name = "Tile" + std::to_string(i);
    tiles.source += "struct " + name + " {\n" + bodies[i] + "};\n\n";
    table += (i > 0 ? ", " : "") + ("kTileCode<" + name + ">");
  }
  tiles.source += "}  // namespace\n\nextern \"C\" __attribute__((visibility(\"default\"))) const mpk::TileCode " +
                  std::string("torch_mpk_tiles[] = {") + table + "};\n";
  return tiles;
}

}  // namespace mpk
