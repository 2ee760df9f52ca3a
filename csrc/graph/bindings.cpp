#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "torch_mpk/graph/tb_graph.h"

namespace py = pybind11;

namespace mpk {
namespace {

constexpr const char* kRoleNames[] = {"pointwise", "reduce", "row", "stream", "tile"};  // in the order of Role
constexpr const char* kKindNames[] = {"input", "output", "workspace"};                  // in the order of BufferKind
constexpr const char* kHazardNames[] = {"RAW", "WAR", "WAW"};                           // in the order of Hazard

template <class Enum, size_t n>
Enum parse(const char* const (&names)[n], const std::string& name, const char* what) {
  std::string known;
  for (size_t i = 0; i < n; i++) {
    if (name == names[i]) return static_cast<Enum>(i);
    known += (i ? ", " : "") + std::string(names[i]);
  }
  throw std::invalid_argument(std::string(what) + " '" + name + "' is not one of " + known);
}

int emit(Program& program, const std::string& op, const std::string& dtype, std::vector<int> args, int operand,
         std::vector<int64_t> strides, const py::object& imm) {
  Instr instr{parse_op(op), parse_dtype(dtype), std::move(args), operand, std::move(strides)};
  if (!imm.is_none()) {
    if (is_float(instr.dtype)) {
      instr.imm = imm.cast<double>();
    } else {
      instr.imm_int = imm.cast<int64_t>();
    }
  }
  program.instrs.push_back(std::move(instr));
  return static_cast<int>(program.instrs.size()) - 1;
}

bool& trait_of(OperandSpec& spec, const std::string& name) {
  if (name == "loaded") return spec.is_loaded;
  if (name == "staged") return spec.is_staged;
  if (name == "whole") return spec.is_whole;
  if (name == "boxed") return spec.is_boxed;
  if (name == "takes_rows") return spec.takes_rows;
  throw std::invalid_argument("trait '" + name + "' is not one of loaded, staged, whole, boxed, takes_rows");
}

using OperandTuple = std::tuple<std::string, Tensor, bool, bool>;

int add_node(TBGraph& graph, const std::string& task, const std::vector<OperandTuple>& operands,
             std::map<std::string, Attr> attrs, std::optional<Program> program, std::string label) {
  std::vector<Operand> list;
  for (const auto& [name, tensor, is_read, is_write] : operands) list.push_back({name, tensor, is_read, is_write});
  return graph.add_node(task, std::move(list), std::move(attrs), std::move(program), std::move(label));
}

}  // namespace

// A list of what Python sees, with nothing to follow. NOLINTNEXTLINE(readability-function-size)
void bind_graph(py::module_& m) {
  m.def(
      "register_task",
      [](std::string name, const std::string& role,
         const std::vector<std::tuple<std::string, std::vector<std::string>, bool, bool, bool>>& operands,
         std::vector<std::string> attrs, std::string header, std::map<int, std::string> headers,
         std::vector<std::pair<std::string, int64_t>> tile, std::string stream, std::string cpu_body,
         const std::map<std::string, std::vector<std::string>>& traits, std::string joined_by, std::string tiled_by,
         bool hands_over, bool scales_rows, bool behind_rows) {
        std::vector<OperandSpec> specs;
        for (const auto& [operand, dims, optional, is_read, is_write] : operands)
          specs.push_back({operand, dims, optional, is_read, is_write});
        for (const auto& [trait, names] : traits)
          for (OperandSpec& spec : specs)
            if (std::find(names.begin(), names.end(), spec.name) != names.end()) trait_of(spec, trait) = true;
        TaskRegistry::global().add({std::move(name), parse<Role>(kRoleNames, role, "role"), std::move(specs),
                                    std::move(attrs), std::move(header), std::move(headers), std::move(tile),
                                    std::move(stream), std::move(cpu_body), std::move(joined_by), std::move(tiled_by),
                                    hands_over, scales_rows, behind_rows});
      },
      py::arg("name"), py::arg("role"), py::arg("operands"), py::arg("attrs"), py::arg("header"),
      py::arg("headers") = std::map<int, std::string>{},
      py::arg("tile") = std::vector<std::pair<std::string, int64_t>>{}, py::arg("stream") = "",
      py::arg("cpu_body") = "", py::arg("traits") = std::map<std::string, std::vector<std::string>>{},
      py::arg("joined_by") = "", py::arg("tiled_by") = "", py::arg("hands_over") = false,
      py::arg("scales_rows") = false, py::arg("behind_rows") = false,
      "Register a task kind. Raises ValueError when the name is taken by another signature.");
  m.def("task_names", [] { return TaskRegistry::global().names(); });
  m.def("op_names", &op_names, "The operations of pointwise programs.");

  py::class_<Instr>(m, "Instr")
      .def_property_readonly("op", [](const Instr& i) { return op_name(i.op); })
      .def_property_readonly("dtype", [](const Instr& i) { return info(i.dtype).name; })
      .def_readonly("args", &Instr::args)
      .def_readonly("operand", &Instr::operand)
      .def_readonly("strides", &Instr::strides)
      .def_property_readonly("imm", [](const Instr& i) -> py::object {
        if (i.op != Op::kConst) return py::none();
        if (is_float(i.dtype)) return py::float_(i.imm);
        return i.dtype == DType::kBool ? py::object(py::bool_(i.imm_int != 0)) : py::object(py::int_(i.imm_int));
      });

  py::class_<Program>(m, "Program")
      .def(py::init([](std::vector<int64_t> domain) { return Program{std::move(domain), {}}; }), py::arg("domain"))
      .def("emit", &emit, py::arg("op"), py::arg("dtype"), py::arg("args") = std::vector<int>{},
           py::arg("operand") = -1, py::arg("strides") = std::vector<int64_t>{}, py::arg("imm") = py::none(),
           "Append an instruction; returns its index.")
      .def("check", [](const Program& p, int num_operands) { check(p, num_operands); })
      .def_readonly("domain", &Program::domain)
      .def_readonly("instrs", &Program::instrs)
      .def("__str__", [](const Program& p) { return to_string(p); });

  py::class_<Tensor>(m, "Tensor")
      .def(py::init([](int buffer, const std::string& dtype, std::vector<int64_t> shape, std::vector<int64_t> strides,
                       int64_t offset) {
             return Tensor{buffer, parse_dtype(dtype), std::move(shape), std::move(strides), offset};
           }),
           py::arg("buffer"), py::arg("dtype"), py::arg("shape"), py::arg("strides"), py::arg("offset") = 0)
      .def_readonly("buffer", &Tensor::buffer)
      .def_property_readonly("dtype", [](const Tensor& t) { return info(t.dtype).name; })
      .def_readonly("shape", &Tensor::shape)
      .def_readonly("strides", &Tensor::strides)
      .def_readonly("offset", &Tensor::offset);

  py::class_<Buffer>(m, "Buffer")
      .def_readonly("name", &Buffer::name)
      .def_property_readonly("kind", [](const Buffer& b) { return kKindNames[static_cast<int>(b.kind)]; })
      .def_readonly("index", &Buffer::index)
      .def_readonly("bytes", &Buffer::bytes);

  py::class_<Operand>(m, "Operand")
      .def_readonly("name", &Operand::name)
      .def_readonly("tensor", &Operand::tensor)
      .def_readonly("is_read", &Operand::is_read)
      .def_readonly("is_write", &Operand::is_write);

  py::class_<Node>(m, "Node")
      .def_readonly("id", &Node::id)
      .def_property_readonly("task", [](const Node& n) { return n.def->name; })
      .def_property_readonly("role", [](const Node& n) { return kRoleNames[static_cast<int>(n.def->role)]; })
      .def_readonly("operands", &Node::operands)
      .def_readonly("attrs", &Node::attrs)
      .def_readonly("program", &Node::program)
      .def_readonly("label", &Node::label);

  py::class_<Dependency>(m, "Dependency")
      .def_readonly("source", &Dependency::from)
      .def_readonly("target", &Dependency::to)
      .def_readonly("buffer", &Dependency::buffer)
      .def_property_readonly("hazard", [](const Dependency& d) { return kHazardNames[static_cast<int>(d.hazard)]; });

  py::class_<TBGraph>(m, "TBGraph")
      .def(py::init<>())
      .def(
          "add_buffer",
          [](TBGraph& g, std::string name, const std::string& kind, int index, int64_t bytes) {
            return g.add_buffer(std::move(name), parse<BufferKind>(kKindNames, kind, "buffer kind"), index, bytes);
          },
          py::arg("name"), py::arg("kind"), py::arg("index"), py::arg("bytes"))
      .def("add_node", &add_node, py::arg("task"), py::arg("operands"),
           py::arg("attrs") = std::map<std::string, Attr>{}, py::arg("program") = py::none(), py::arg("label") = "",
           "Append a node; operands are (name, Tensor, is_read, is_write). Raises ValueError naming task, operand, "
           "expected and actual.")
      .def_property_readonly("buffers", &TBGraph::buffers)
      .def_property_readonly("nodes", &TBGraph::nodes)
      .def("dependencies", &TBGraph::dependencies)
      .def("to_json", &TBGraph::to_json);
}

}  // namespace mpk
