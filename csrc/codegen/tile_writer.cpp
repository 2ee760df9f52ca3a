#include "tile_writer.h"

#include <algorithm>
#include <cctype>
#include <cstdio>

#include "checks.h"
#include "pattern.h"
#include "text.h"

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

}  // namespace

Dialect cuda_dialect(const KernelContext& context, Refs& refs, const Node& node) {
  Dialect cuda;
  cuda.type = cuda_type;
  cuda.pointer = [&](const Operand& operand) { return refs.pointer(node, operand.tensor, operand.is_write); };
  cuda.alignment = [&](const Tensor& t) -> int64_t {  // inputs may have any address
    int64_t known = 16;
    while (t.offset * size_bytes(t.dtype) % known != 0) known /= 2;
    const bool is_input = context.graph().buffers()[t.buffer].kind == BufferKind::kInput;
    return is_input ? size_bytes(t.dtype) : known;
  };
  return cuda;
}

std::string TileWriter::shared_limit() const {
  if (dialect_.max_shared_bytes == 0) return "";
  const std::string &name = node_.def->name, room = str(dialect_.max_shared_bytes);
  return "    static_assert(tasks::" + name + "::kSharedBytes<V_> <= " + room + ",\n                  \"task " + name +
         ": kSharedBytes is more than the " + room + " bytes that a tile may have: cut smaller tiles\");\n";
}

std::string TileWriter::body(bool through_ring) const {
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
  text += "  template <class V_>\n  static constexpr int shared_bytes() {\n" + shared_limit() + "    return " + task +
          "::kSharedBytes<V_>;\n  }\n";
  text +=
      std::string("  template <class V_, class Threads_") + (through_ring ? ", class Stream_" : "") +
      ">\n  static MPK_DEVICE void compute(Threads_& threads, const mpk::Job& job, uint32_t number, uint8_t* shared" +
      (through_ring ? ", Stream_& stream" : "") + ") {\n    const Tile tile = at(number);\n";
  if (!stream.empty() && !through_ring)
    text +=
        "    mpk::DirectStream<StreamT> stream{stream_data(job, tile), stream_rows(tile), kStreamSize, "
        "kStreamPitch};\n";
  return text + "    " + task + "::compute<V_>(threads, tile, shared" + arguments + ");\n  }\n";
}

// The tiled dimension of an operand's dimension d, or null if its size is literal.
const TiledDim* TileWriter::dim_of(const OperandSpec& spec, const Tensor& t, size_t d) const {
  const size_t leading = num_leading(spec, t);
  const std::string& name = d < leading ? spec.dims.front() : spec.dims[d - leading + spec.has_leading()];
  for (const TiledDim& dim : tiling_.dims)
    if (dim.name == name) return &dim;
  return nullptr;
}

std::string TileWriter::traits(const OperandSpec& spec, const Operand* operand) const {
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

// The known alignment in bytes of every tile's slice.
int64_t TileWriter::alignment(const OperandSpec& spec, const Tensor& t) const {
  int64_t known = dialect_.alignment(t);
  const auto limit = [&](int64_t elements) {
    while (elements * size_bytes(t.dtype) % known != 0) known /= 2;
  };
  for (size_t d = 0; d < t.shape.size(); d++)
    if (const TiledDim* dim = dim_of(spec, t, d); dim && dim->count() > 1) limit(dim->step * t.strides[d]);
  return known;
}

int64_t TileWriter::slice_bytes(const OperandSpec& spec, const Tensor& t) const {
  int64_t bytes = size_bytes(t.dtype);
  for (size_t d = num_leading(spec, t); d < t.shape.size(); d++) {
    const TiledDim* dim = dim_of(spec, t, d);
    bytes *= dim ? dim->step : t.shape[d];
  }
  return bytes;
}

std::string TileWriter::argument(const OperandSpec& spec, const Operand* operand) const {
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
std::string TileWriter::stream_members(const OperandSpec& spec, const Operand& operand) const {
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

// Tile number `number`: its range of each dimension.
std::string TileWriter::tile() const {
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

}  // namespace mpk::codegen
