#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <optional>

#include "../errors.h"
#include "torch_mpk/jit/launch.h"

namespace py = pybind11;

namespace mpk {
namespace jit {
namespace {

py::object from_torch(const char* module, const char* name) { return py::module_::import(module).attr(name); }

const dlpack::ExchangeApi* exchange_api() {
  const py::object capsule = from_torch("torch", "Tensor").attr("__dlpack_c_exchange_api__");
  const auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (!api) throw py::error_already_set();
  if (api->version.major != dlpack::kMajorVersion)
    throw std::runtime_error("PyTorch speaks DLPack " + std::to_string(api->version.major) + ", torch_mpk 1");
  return api;
}

// The parts of PyTorch that each call uses.
struct Torch {
  const dlpack::ExchangeApi* api = exchange_api();
  py::object tensor = from_torch("torch", "Tensor"), parameter = from_torch("torch.nn", "Parameter");
  py::object is_grad_enabled = from_torch("torch", "is_grad_enabled");
  py::object increment_version = from_torch("torch._C", "_increment_version");
  py::object empty = from_torch("torch", "empty"), empty_keywords = py::make_tuple("dtype", "device");
  py::object requires_grad = py::str("requires_grad"), is_neg = py::str("is_neg");
  std::vector<py::object> dtypes;

  Torch() {
    for (int i = 0; i < kNumDTypes; i++) dtypes.push_back(from_torch("torch", kDTypeInfo[i].name));
  }

  static const Torch& get() {
    static const auto* torch = new Torch;  // never freed: Python may be gone by then
    return *torch;
  }
};

bool is_true(PyObject* result) {
  if (!result) throw py::error_already_set();
  const bool value = result == Py_True;
  Py_DECREF(result);
  return value;
}

// A keyword-only parameter of the declaration. A float is kept as its bits, a dtype as a DType.
struct Attribute {
  enum Type { kInt, kFloat, kBool, kDType } type;
  std::string name;
  int slot;
  bool has_default;
  int64_t default_value;
};

std::optional<int64_t> attribute_value(Attribute::Type type, py::handle value) {
  if (type == Attribute::kDType) {
    const auto& dtypes = Torch::get().dtypes;
    const auto found = std::find_if(dtypes.begin(), dtypes.end(), [&](const py::object& d) { return d.is(value); });
    return found == dtypes.end() ? std::nullopt : std::optional<int64_t>(found - dtypes.begin());
  }
  if (type == Attribute::kFloat) {
    if (!PyFloat_Check(value.ptr()) && !PyLong_Check(value.ptr())) return std::nullopt;
    const double number = value.cast<double>();
    int64_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    return bits;
  }
  if (type == Attribute::kBool ? !PyBool_Check(value.ptr()) : !PyLong_Check(value.ptr())) return std::nullopt;
  int overflow;
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  return overflow ? std::nullopt : std::optional<int64_t>(number);
}

class Kernel {
 public:
  // `declaration`: an object with the fields of torch_mpk.jit.declaration.Declaration.
  Kernel(py::handle declaration, py::object compile, py::object dispatch);

  // Checks the arguments and launches. `dispatched`: PyTorch's dispatcher passed them, and has nothing left to do.
  // Otherwise arguments that are no plain tensors, or require grad, go to the dispatcher.
  py::object call(const py::args& args, const py::kwargs& kwargs, bool dispatched);

  // The next call compiles, or finds compiled code. Calls in flight keep theirs.
  void forget() { specializations_.clear(); }

 private:
  using Codes = std::vector<std::shared_ptr<Code>>;  // for each launch
  struct Specialization {
    std::vector<int64_t> key;  // values of key_slots_, then the device
    std::shared_ptr<const Codes> codes;
  };

  void read_attributes(const py::kwargs& kwargs, PyObject** operands, Binding& binding) const;
  // False, with a Python error, for a tensor without readable memory: a fake one, or one of a transform.
  bool read_tensor(PyObject* object, int operand, Binding& binding) const;
  py::object allocate(int operand, PyObject* device, Binding& binding) const;
  std::shared_ptr<const Codes> codes_for(const Binding& binding);
  // Lets other threads of Python run meanwhile. The versions of what is written are bumped.
  void run(const Codes& codes, const Binding& binding, void* stream, const py::list& written) const;

  const Torch& torch_ = Torch::get();
  std::unique_ptr<const Signature> signature_;
  int num_inputs_ = 0;
  std::vector<Attribute> attributes_;
  Plan plan_;
  std::vector<int> key_slots_;
  int sms_slot_;  // of the device's number of multiprocessors; -1 where nothing asks for it
  std::vector<Specialization> specializations_;  // changed under Python's lock
  py::object compile_, dispatch_;
};

// The position of a name in a list, which has the names of an enum's constants.
template <class Enum, size_t n>
Enum read_enum(py::handle name, const char* const (&names)[n]) {
  const auto text = name.cast<std::string>();
  const auto found = std::find(std::begin(names), std::end(names), text);
  if (found == std::end(names)) throw std::invalid_argument("there is no '" + text + "'");
  return static_cast<Enum>(found - std::begin(names));
}

constexpr const char* kOps[] = {"constant", "slot", "+",  "-", "*",  "//",  "%",   "cdiv", "min", "max", "==",
                                "!=",       "<",    "<=", ">", ">=", "not", "and", "or",   "if",  "skip"};
constexpr const char* kExtents[] = {"slot", "literal", "any", "expression"};
constexpr const char* kArguments[] = {"pointer", "integer", "float"};
constexpr const char* kAttributes[] = {"int", "float", "bool", "ScalarType"};

std::vector<Extent> read_extents(py::handle sequence) {
  std::vector<Extent> extents;
  for (py::handle item : sequence) {
    const auto [kind, value] = item.cast<std::pair<py::object, int64_t>>();
    extents.push_back({read_enum<Extent::Kind>(kind, kExtents), value});
  }
  return extents;
}

Expression read_expression(py::handle object) {
  Expression expression;
  expression.text = object.attr("text").cast<std::string>();
  for (py::handle item : object.attr("code")) {
    const auto [op, operand] = item.cast<std::pair<py::object, int64_t>>();
    expression.code.push_back({read_enum<Op>(op, kOps), operand});
  }
  return expression;
}

std::vector<Expression> read_expressions(py::handle sequence) {
  std::vector<Expression> expressions;
  for (py::handle item : sequence) expressions.push_back(read_expression(item));
  return expressions;
}

Operand read_operand(py::handle object) {
  uint32_t dtypes = 0;
  for (py::handle name : object.attr("dtypes")) dtypes |= 1u << static_cast<int>(parse_dtype(name.cast<std::string>()));
  return {.name = object.attr("name").cast<std::string>(),
          .text = py::str(object).cast<std::string>(),
          .has_leading = object.attr("has_leading").cast<bool>(),
          .sizes = read_extents(object.attr("size_extents")),
          .strides = read_extents(object.attr("stride_extents")),
          .dtypes = dtypes,
          .dtype_slot = object.attr("dtype_slot").cast<int>(),
          .numel_slot = object.attr("numel_slot").cast<int>(),
          .is_optional = object.attr("optional").cast<bool>(),
          .is_output = object.attr("is_output").cast<bool>(),
          .is_written = object.attr("is_write").cast<bool>(),
          .is_scratch = object.attr("is_scratch").cast<bool>()};
}

Launch read_launch(py::handle object) {
  Launch launch;
  launch.grid = read_expressions(object.attr("grid"));
  launch.block = read_expressions(object.attr("block"));
  if (const py::object shared = object.attr("shared_bytes"); !shared.is_none())
    launch.shared_bytes = read_expression(shared);
  launch.num_parameters = object.attr("num_parameters").cast<int>();
  for (py::handle item : object.attr("arguments")) {
    Argument argument = {.kind = read_enum<Argument::Kind>(item.attr("kind"), kArguments),
                         .index = item.attr("index").cast<int>(),
                         .value = {},
                         .parameter = item.attr("parameter").cast<int>(),
                         .field = {}};
    if (const py::object field = item.attr("field"); !field.is_none()) argument.field = field.cast<std::string>();
    if (argument.kind == Argument::kInteger) argument.value = read_expression(item.attr("value"));
    launch.arguments.push_back(std::move(argument));
  }
  if (launch.num_parameters > kMaxArguments)
    throw std::invalid_argument("a kernel takes at most " + std::to_string(kMaxArguments) + " arguments");
  return launch;
}

Kernel::Kernel(py::handle declaration, py::object compile, py::object dispatch)
    : compile_(std::move(compile)), dispatch_(std::move(dispatch)) {
  std::vector<Operand> operands;
  for (py::handle object : declaration.attr("operands")) operands.push_back(read_operand(object));
  num_inputs_ = static_cast<int>(
      std::count_if(operands.begin(), operands.end(), [](const Operand& operand) { return !operand.is_output; }));
  for (py::handle object : declaration.attr("attributes")) {
    const auto type = read_enum<Attribute::Type>(object.attr("type_name"), kAttributes);
    const py::object given = object.attr("default");
    attributes_.push_back({type, object.attr("name").cast<std::string>(), object.attr("slot").cast<int>(),
                           !given.is_none(), given.is_none() ? 0 : attribute_value(type, given).value()});
  }
  signature_ = std::make_unique<Signature>(
      declaration.attr("name").cast<std::string>(), declaration.attr("signature").cast<std::string>(),
      declaration.attr("is_cuda").cast<bool>() ? dlpack::kCuda : dlpack::kCpu, std::move(operands),
      declaration.attr("slots").cast<std::vector<std::string>>(), read_expressions(declaration.attr("extents")));
  sms_slot_ = declaration.attr("sms_slot").cast<int>();
  key_slots_ = declaration.attr("key_slots").cast<std::vector<int>>();
  plan_.requirements = read_expressions(declaration.attr("requirements"));
  plan_.cluster = read_expressions(declaration.attr("cluster"));
  plan_.cooperative = declaration.attr("cooperative").cast<bool>();
  plan_.pdl = read_expression(declaration.attr("pdl"));
  for (py::handle object : declaration.attr("launches")) plan_.launches.push_back(read_launch(object));
}

void Kernel::read_attributes(const py::kwargs& kwargs, PyObject** operands, Binding& binding) const {
  for (const Attribute& attribute : attributes_) {
    binding.values[attribute.slot] = attribute.default_value;
    binding.bound_by[attribute.slot] = attribute.has_default ? Binding::kAttribute : Binding::kFree;
  }
  for (const auto& [key, value] : kwargs) {
    const auto name = key.cast<std::string>();
    const auto attribute =
        std::find_if(attributes_.begin(), attributes_.end(), [&](const Attribute& a) { return a.name == name; });
    if (attribute != attributes_.end()) {
      const std::optional<int64_t> given = attribute_value(attribute->type, value);
      constexpr const char* kTypes[] = {"an int of 64 bits", "a float", "a bool", "a dtype that kernels take"};
      if (!given)
        signature_->fail(name + " is " + py::repr(value).cast<std::string>() + ", expected " + kTypes[attribute->type]);
      binding.values[attribute->slot] = *given;
      binding.bound_by[attribute->slot] = Binding::kAttribute;
      continue;
    }
    int operand = 0;
    while (operand < num_inputs_ && signature_->operands()[operand].name != name) operand++;
    if (operand == num_inputs_) signature_->fail("there is no argument " + name);
    if (operands[operand]) signature_->fail(name + " was given twice");
    operands[operand] = value.ptr();
  }
  for (const Attribute& attribute : attributes_)
    if (binding.bound_by[attribute.slot] == Binding::kFree) signature_->fail(attribute.name + " is missing");
}

bool Kernel::read_tensor(PyObject* object, int operand, Binding& binding) const {
  const Operand& o = signature_->operands()[operand];
  dlpack::Tensor& tensor = binding.tensors[operand];
  if (torch_.api->tensor_from_object(object, &tensor) != 0) return false;
  signature_->match(operand, binding);
  // A view like x.conj().imag is the negative of its memory. It has odd strides, or one element.
  const bool may_be_negative = !o.strides.empty() || std::all_of(tensor.shape, tensor.shape + tensor.ndim,
                                                                 [](int64_t size) { return size == 1; });
  if (may_be_negative && is_true(PyObject_CallMethodNoArgs(object, torch_.is_neg.ptr())))
    signature_->fail(o.name + " is a lazily negated view: pass " + o.name + ".resolve_neg()");
  return true;
}

py::object Kernel::allocate(int operand, PyObject* device, Binding& binding) const {
  const Operand& o = signature_->operands()[operand];
  const int num_leading = o.has_leading ? binding.num_leading : 0;
  py::tuple shape(num_leading + o.sizes.size());
  for (int i = 0; i < num_leading; i++) shape[i] = binding.leading->shape[i];
  for (size_t i = 0; i < o.sizes.size(); i++)
    shape[num_leading + i] = signature_->size_of(operand, o.sizes[i], binding);
  const int dtype = o.dtype_slot >= 0 ? static_cast<int>(binding.values[o.dtype_slot]) : std::countr_zero(o.dtypes);
  PyObject* const arguments[] = {shape.ptr(), torch_.dtypes[dtype].ptr(), device};
  auto tensor = py::reinterpret_steal<py::object>(
      PyObject_Vectorcall(torch_.empty.ptr(), arguments, 1, torch_.empty_keywords.ptr()));
  if (!tensor || torch_.api->tensor_from_object(tensor.ptr(), &binding.tensors[operand]) != 0)
    throw py::error_already_set();
  signature_->match(operand, binding);
  binding.is_present[operand] = true;
  return tensor;
}

std::shared_ptr<const Kernel::Codes> Kernel::codes_for(const Binding& binding) {
  const auto fits = [&](const Specialization& s) {
    for (size_t i = 0; i < key_slots_.size(); i++)
      if (s.key[i] != binding.values[key_slots_[i]]) return false;
    return s.key.back() == binding.device.id;
  };
  const auto look_up = [&] { return std::find_if(specializations_.begin(), specializations_.end(), fits); };
  auto found = look_up();
  if (found == specializations_.end()) {
    std::vector<int64_t> key;
    for (int slot : key_slots_) key.push_back(binding.values[slot]);
    auto codes = std::make_shared<const Codes>(
        compile_(py::tuple(py::cast(key)), binding.device.id).cast<std::vector<std::shared_ptr<Code>>>());
    for (size_t i = 0; i < plan_.launches.size(); i++) check(codes->at(i)->layout(), plan_.launches[i]);
    found = look_up();  // another thread may have compiled it
    if (found == specializations_.end()) {
      key.push_back(binding.device.id);
      found = specializations_.insert(specializations_.end(), {std::move(key), std::move(codes)});
    }
  }
  return found->codes;
}

void Kernel::run(const Codes& codes, const Binding& binding, void* stream, const py::list& written) const {
  const auto prepare = [&](size_t i, bool launches) {
    const Geometry geometry = plan_.geometry(plan_.launches[i], binding, *signature_);
    Parameters parameters(plan_.launches[i], codes[i]->layout(), binding, *signature_);
    if (launches) codes[i]->run(geometry, parameters.pointers(), stream);
  };
  const auto tell_of_writes = [&] {
    if (!written.empty()) torch_.increment_version(written);
  };
  try {
    // A CPU kernel runs now, and a launch blocks while the device's queue is full.
    const py::gil_scoped_release release;
    // Refuses what cannot be launched, before anything runs.
    for (size_t i = 1; i < codes.size(); i++) prepare(i, false);
    for (size_t i = 0; i < codes.size(); i++) prepare(i, true);
  } catch (...) {  // a kernel may have written before it threw
    tell_of_writes();
    throw;
  }
  tell_of_writes();
}

py::object Kernel::call(const py::args& args, const py::kwargs& kwargs, bool dispatched) {
  const std::vector<Operand>& operands = signature_->operands();
  PyObject* objects[kMaxOperands] = {};
  if (args.size() > static_cast<size_t>(num_inputs_))
    signature_->fail("expected " + std::to_string(num_inputs_) + " tensors, got " + std::to_string(args.size()));
  for (size_t i = 0; i < args.size(); i++) objects[i] = PyTuple_GET_ITEM(args.ptr(), i);
  Binding binding;
  signature_->start(binding);
  read_attributes(kwargs, objects, binding);

  const bool has_grad_mode = !dispatched && is_true(PyObject_CallNoArgs(torch_.is_grad_enabled.ptr()));
  py::list written;
  for (int i = 0; i < num_inputs_; i++) {
    binding.is_present[i] = objects[i] && objects[i] != Py_None;
    if (!binding.is_present[i]) {
      if (!operands[i].is_optional) signature_->fail(operands[i].name + " is missing");
      continue;
    }
    PyTypeObject* type = Py_TYPE(objects[i]);
    const bool is_plain = reinterpret_cast<PyObject*>(type) == torch_.tensor.ptr() ||
                          reinterpret_cast<PyObject*>(type) == torch_.parameter.ptr();
    if (!is_plain && !py::isinstance(objects[i], torch_.tensor))
      signature_->fail(operands[i].name + " is " + py::repr(py::handle(objects[i])).cast<std::string>() +
                       ", expected a tensor");
    if (!dispatched && !is_plain) return dispatch_(*args, **kwargs);
    // Autograd refuses it, and says why.
    if (has_grad_mode && is_true(PyObject_GetAttr(objects[i], torch_.requires_grad.ptr())))
      return dispatch_(*args, **kwargs);
    if (!read_tensor(objects[i], i, binding)) {
      if (dispatched) throw py::error_already_set();
      PyErr_Clear();
      return dispatch_(*args, **kwargs);
    }
    if (operands[i].is_written) written.append(py::handle(objects[i]));
  }
  if (binding.device_by < 0) signature_->fail("no tensor was given");
  if (sms_slot_ >= 0) binding.values[sms_slot_] = cu::device_info(binding.device.id).num_sms;
  plan_.require(binding, *signature_);
  py::list results, scratch;
  if (static_cast<size_t>(num_inputs_) < operands.size()) {
    const py::object device = py::handle(objects[binding.device_by]).attr("device");
    for (size_t i = num_inputs_; i < operands.size(); i++)
      (operands[i].is_scratch ? scratch : results).append(allocate(static_cast<int>(i), device.ptr(), binding));
  }

  const std::shared_ptr<const Codes> codes = codes_for(binding);
  void* stream = nullptr;
  if (binding.device.type == dlpack::kCuda &&
      torch_.api->current_stream(binding.device.type, binding.device.id, &stream) != 0)
    throw py::error_already_set();
  run(*codes, binding, stream, written);
  if (results.empty()) return py::none();
  return results.size() == 1 ? py::object(results[0]) : py::tuple(results);
}

}  // namespace

}  // namespace jit

void bind_jit(py::module_& m) {
  using namespace jit;
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const SignatureError& error) {
      set_error("KernelSignatureError", error);
    }
  });
  py::list dtypes;
  for (int i = 0; i < kNumDTypes; i++) dtypes.append(kDTypeInfo[i].name);
  m.attr("DTYPES") = py::tuple(dtypes);
  py::class_<Code, std::shared_ptr<Code>>(m, "JitCode", "A function compiled for one choice of template arguments.");
  py::class_<CpuCode, Code, std::shared_ptr<CpuCode>>(m, "CpuCode")
      .def(py::init<const std::string&, const std::string&>(), py::arg("library"), py::arg("entry"));
  py::class_<CudaCode, Code, std::shared_ptr<CudaCode>>(m, "CudaCode")
      .def(py::init([](const py::bytes& image, std::string kernel, std::string symbol, int device, int num_parameters,
                       const std::vector<std::tuple<int, int, int>>& arguments) {
             const std::string copy = image;
             std::vector<Place> places;
             for (const auto& [offset, bytes, bits] : arguments) places.push_back({offset, bytes, bits});
             const py::gil_scoped_release release;
             return std::make_shared<CudaCode>(copy, std::move(kernel), std::move(symbol), device, num_parameters,
                                               std::move(places));
           }),
           py::arg("image"), py::arg("kernel"), py::arg("symbol"), py::arg("device"), py::arg("num_parameters"),
           py::arg("arguments"));
  py::class_<Kernel>(m, "JitKernel", "Checks the arguments of a single kernel and launches it.")
      .def(py::init<py::handle, py::object, py::object>(), py::arg("declaration"), py::arg("compile"),
           py::arg("dispatch"),
           "compile(key, device) returns the code of each launch for the values of the declaration's key slots. "
           "dispatch: the operator, which takes tensors that are not plain ones.\n\n"
           "A call raises KernelSignatureError, LaunchError and what compile raises.")
      .def("__call__",
           [](Kernel& k, const py::args& args, const py::kwargs& kwargs) { return k.call(args, kwargs, false); })
      .def(
          "dispatched",
          [](Kernel& k, const py::args& args, const py::kwargs& kwargs) { return k.call(args, kwargs, true); },
          "A call whose arguments come from PyTorch's dispatcher.")
      .def("forget", &Kernel::forget, "Drops the code of every choice: the next call asks compile again.");
}

}  // namespace mpk
