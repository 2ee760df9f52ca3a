#include "torch_mpk/graph/tb_graph.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "json.h"

namespace mpk {
namespace {

std::string shape_text(const std::vector<int64_t>& shape) { return json::numbers(shape); }

// The bytes that a view may touch, as a half-open interval of its buffer.
struct Extent {
  int64_t begin, end;
};

Extent extent(const Tensor& t) {
  int64_t low = t.offset, high = t.offset;
  for (size_t d = 0; d < t.shape.size(); d++) {
    if (t.shape[d] == 0) return {0, 0};
    const int64_t reach = (t.shape[d] - 1) * t.strides[d];
    (reach < 0 ? low : high) += reach;
  }
  return {low * size_bytes(t.dtype), (high + 1) * size_bytes(t.dtype)};
}

// Whether two views interleave: blocks of one, a stride apart, lie between blocks of the other, as layers' pages do.
bool take_turns(const Tensor& a, const Tensor& b) {
  if (a.shape.empty() || b.shape.empty() || a.strides[0] != b.strides[0] || a.strides[0] <= 0 ||
      size_bytes(a.dtype) != size_bytes(b.dtype))
    return false;
  const auto block = [](Tensor t) {  // of the first index, from the start of its turn on
    t.shape.front() = 1, t.offset %= t.strides.front();
    return extent(t);
  };
  const Extent one = block(a), other = block(b);
  const int64_t turn = a.strides[0] * size_bytes(a.dtype);
  return std::min(one.begin, other.begin) >= 0 && std::max(one.end, other.end) <= turn &&
         (one.end <= other.begin || other.end <= one.begin);
}

// Whether two views share no element.
bool are_apart(const Tensor& a, const Tensor& b) {
  const Extent one = extent(a), other = extent(b);
  return one.end <= other.begin || other.end <= one.begin || take_turns(a, b);
}

void check_signature(const TaskDef& def, const std::vector<Operand>& operands) {
  std::map<std::string, std::pair<int64_t, std::string>> bound;         // dimension -> size, operand that bound it
  std::optional<std::pair<std::vector<int64_t>, std::string>> leading;  // the same for "..."
  size_t next = 0;
  for (const OperandSpec& spec : def.operands) {
    if (next >= operands.size() || operands[next].name != spec.name) {
      if (spec.optional) continue;
      throw std::invalid_argument(def.name + ": operand '" + spec.name + "' is missing" +
                                  (next < operands.size() ? ", found '" + operands[next].name + "' in its place" : ""));
    }
    const Operand& operand = operands[next++];
    const std::vector<int64_t>& shape = operand.tensor.shape;
    const size_t num_named = spec.dims.size() - spec.has_leading();
    if (shape.size() < num_named || (shape.size() > num_named && !spec.has_leading()))
      throw std::invalid_argument(def.name + ": " + spec.name + " has " + std::to_string(shape.size()) +
                                  " dimensions " + shape_text(shape) + ", but its signature has " +
                                  std::to_string(spec.dims.size()));
    const size_t num_leading = shape.size() - num_named;
    if (spec.has_leading()) {
      const std::vector<int64_t> sizes(shape.begin(), shape.begin() + static_cast<int64_t>(num_leading));
      if (!leading) leading = {sizes, spec.name};
      if (leading->first != sizes)
        throw std::invalid_argument(def.name + ": " + spec.name + " has leading dimensions " + shape_text(sizes) +
                                    ", but " + shape_text(leading->first) + " were bound by " + leading->second);
    }
    for (size_t d = num_leading; d < shape.size(); d++) {
      const std::string& dim = spec.dims[d - num_leading + spec.has_leading()];
      if (dim.find_first_not_of("0123456789") == std::string::npos) {
        if (shape[d] != std::stoll(dim))
          throw std::invalid_argument(def.name + ": " + spec.name + " has size " + std::to_string(shape[d]) +
                                      " in dimension " + std::to_string(d) + ", expected " + dim);
        continue;
      }
      auto [it, fresh] = bound.try_emplace(dim, shape[d], spec.name);
      if (!fresh && it->second.first != shape[d])
        throw std::invalid_argument(def.name + ": " + spec.name + " has " + dim + "=" + std::to_string(shape[d]) +
                                    ", but " + dim + "=" + std::to_string(it->second.first) + " was bound by " +
                                    it->second.second);
    }
    if (operand.is_read != spec.is_read || operand.is_write != spec.is_write)
      throw std::invalid_argument(def.name + ": " + spec.name + " must be " +
                                  (spec.is_write ? "written" : "read only"));
  }
  if (next != operands.size())
    throw std::invalid_argument(def.name + ": unexpected operand '" + operands[next].name + "'");
}

}  // namespace

int64_t Tensor::numel() const {
  int64_t n = 1;
  for (int64_t size : shape) n *= size;
  return n;
}

bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    if (shape[d] != 1 && strides[d] != expected) return false;
    expected *= shape[d];
  }
  return true;
}

std::string Node::title() const { return def->name + (label.empty() ? "" : " " + label); }

const Operand* Node::find(const std::string& name) const {
  for (const Operand& operand : operands)
    if (operand.name == name) return &operand;
  return nullptr;
}

const Operand& Node::operand(const std::string& name) const {
  if (const Operand* found = find(name)) return *found;
  throw std::invalid_argument(def->name + " (" + label + "): no operand '" + name + "'");
}

namespace {
template <class T>
const T& attr(const Node& node, const std::string& name, const char* type) {
  auto found = node.attrs.find(name);
  if (found == node.attrs.end())
    throw std::invalid_argument(node.def->name + " (" + node.label + "): attribute '" + name + "' is missing");
  if (const T* value = std::get_if<T>(&found->second)) return *value;
  throw std::invalid_argument(node.def->name + " (" + node.label + "): attribute '" + name + "' is not a " + type);
}
}  // namespace

int64_t Node::int_attr(const std::string& name) const { return attr<int64_t>(*this, name, "integer"); }
double Node::float_attr(const std::string& name) const { return attr<double>(*this, name, "float"); }
double Node::float_attr(const std::string& name, double otherwise) const {
  return attrs.count(name) ? float_attr(name) : otherwise;
}
std::string Node::string_attr(const std::string& name) const { return attr<std::string>(*this, name, "string"); }

int TBGraph::add_buffer(std::string name, BufferKind kind, int index, int64_t bytes) {
  if (bytes < 0) throw std::invalid_argument("buffer '" + name + "' has a negative size");
  buffers_.push_back({std::move(name), kind, index, bytes});
  return static_cast<int>(buffers_.size()) - 1;
}

int TBGraph::add_node(const std::string& task, std::vector<Operand> operands, std::map<std::string, Attr> attrs,
                      std::optional<Program> program, std::string label) {
  const TaskDef& def = TaskRegistry::global().get(task);
  for (const Operand& operand : operands) {
    const Tensor& t = operand.tensor;
    const std::string where = task + ": " + operand.name;
    if (t.buffer < 0 || t.buffer >= static_cast<int>(buffers_.size()))
      throw std::invalid_argument(where + " refers to buffer " + std::to_string(t.buffer) + " of " +
                                  std::to_string(buffers_.size()));
    if (t.shape.size() != t.strides.size()) throw std::invalid_argument(where + " has as many strides as dimensions");
    const Buffer& buffer = buffers_[t.buffer];
    const Extent e = extent(t);
    if (e.begin < 0 || (buffer.bytes > 0 && e.end > buffer.bytes))
      throw std::invalid_argument(where + " reaches byte " + std::to_string(e.begin < 0 ? e.begin : e.end) +
                                  " of buffer '" + buffer.name + "', which has " + std::to_string(buffer.bytes));
  }
  const bool has_program = def.role == Role::kPointwise || def.role == Role::kReduce;
  if (has_program != program.has_value())
    throw std::invalid_argument(task + ": a program is " +
                                (has_program ? "required for this role" : "only for pointwise and reduce tasks"));
  if (program) {
    check(*program, static_cast<int>(operands.size()));
  } else {
    check_signature(def, operands);
  }
  for (const std::string& name : def.attrs)
    if (!attrs.count(name)) throw std::invalid_argument(task + " (" + label + "): attribute '" + name + "' is missing");
  const int id = static_cast<int>(nodes_.size());
  nodes_.push_back({id, &def, std::move(operands), std::move(attrs), std::move(program), std::move(label)});
  return id;
}

std::vector<Dependency> TBGraph::dependencies() const {
  struct Access {
    int node;
    const Tensor* tensor;
    bool read, write;
  };
  std::vector<std::vector<Access>> accesses(buffers_.size());
  std::vector<bool> written(buffers_.size());
  for (const Node& node : nodes_)
    for (const Operand& operand : node.operands) {
      accesses[operand.tensor.buffer].push_back({node.id, &operand.tensor, operand.is_read, operand.is_write});
      if (operand.is_write) written[operand.tensor.buffer] = true;
    }
  std::vector<Dependency> edges;
  for (size_t b = 0; b < buffers_.size(); b++) {
    if (!written[b]) continue;
    const std::vector<Access>& list = accesses[b];
    for (size_t j = 0; j < list.size(); j++)
      for (size_t i = 0; i < j; i++) {
        const Access &earlier = list[i], &later = list[j];
        if (earlier.node == later.node || are_apart(*earlier.tensor, *later.tensor)) continue;
        auto add = [&](Hazard hazard) { edges.push_back({earlier.node, later.node, static_cast<int>(b), hazard}); };
        if (earlier.write && later.read) add(Hazard::kReadAfterWrite);
        if (earlier.read && later.write) add(Hazard::kWriteAfterRead);
        if (earlier.write && later.write) add(Hazard::kWriteAfterWrite);
      }
  }
  std::sort(edges.begin(), edges.end(), [](const Dependency& a, const Dependency& b) {
    return std::tie(a.to, a.from, a.buffer, a.hazard) < std::tie(b.to, b.from, b.buffer, b.hazard);
  });
  edges.erase(std::unique(edges.begin(), edges.end(),
                          [](const Dependency& a, const Dependency& b) {
                            return a.to == b.to && a.from == b.from && a.buffer == b.buffer && a.hazard == b.hazard;
                          }),
              edges.end());
  return edges;
}

std::string TBGraph::to_json() const {
  static constexpr const char* kKinds[] = {"input", "output", "workspace"};
  static constexpr const char* kHazards[] = {"read after write", "write after read", "write after write"};
  auto tensor = [&](const Tensor& t) {
    return "{\"buffer\": " + std::to_string(t.buffer) + ", \"dtype\": " + json::quote(info(t.dtype).name) +
           ", \"shape\": " + json::numbers(t.shape) + ", \"strides\": " + json::numbers(t.strides) +
           ", \"offset\": " + std::to_string(t.offset) + "}";
  };
  auto node = [&](const Node& n) {
    std::string out = "{\"id\": " + std::to_string(n.id) + ", \"task\": " + json::quote(n.def->name) +
                      ", \"label\": " + json::quote(n.label);
    out += ", \"operands\": " + json::array(n.operands, [&](const Operand& o) {
             return "{\"name\": " + json::quote(o.name) + ", \"read\": " + (o.is_read ? "true" : "false") +
                    ", \"write\": " + (o.is_write ? "true" : "false") + ", \"tensor\": " + tensor(o.tensor) + "}";
           });
    out += ", \"attrs\": {";
    bool first = true;
    for (const auto& [name, value] : n.attrs) {
      out += (first ? "" : ", ") + json::quote(name) + ": ";
      first = false;
      if (const auto* i = std::get_if<int64_t>(&value)) out += std::to_string(*i);
      if (const auto* s = std::get_if<std::string>(&value)) out += json::quote(*s);
      if (const auto* d = std::get_if<double>(&value)) {
        std::ostringstream text;
        text.precision(17);
        text << *d;
        out += text.str();
      }
    }
    out += "}";
    if (n.program) out += ", \"program\": " + json::quote(to_string(*n.program));
    return out + "}";
  };
  return "{\"buffers\": " +
         json::array(
             buffers_,
             [&](const Buffer& b) {
               return "{\"name\": " + json::quote(b.name) + ", \"kind\": \"" + kKinds[static_cast<int>(b.kind)] +
                      "\", \"index\": " + std::to_string(b.index) + ", \"bytes\": " + std::to_string(b.bytes) + "}";
             },
             ",\n  ") +
         ",\n\"nodes\": " + json::array(nodes_, node, ",\n  ") + ",\n\"dependencies\": " +
         json::array(
             dependencies(),
             [&](const Dependency& d) {
               return "{\"from\": " + std::to_string(d.from) + ", \"to\": " + std::to_string(d.to) +
                      ", \"buffer\": " + std::to_string(d.buffer) + ", \"hazard\": \"" +
                      kHazards[static_cast<int>(d.hazard)] + "\"}";
             },
             ",\n  ") +
         "}\n";
}

}  // namespace mpk
