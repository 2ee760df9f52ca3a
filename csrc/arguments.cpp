#include "arguments.h"

#include <algorithm>

namespace py = pybind11;

namespace mpk {
namespace {

// Looking up `data_ptr` costs as much as calling it, so it is looked up once for each type in a row of tensors. A model
// has two types, Tensor and Parameter.
class AddressReader {
 public:
  explicit AddressReader(const char* what) : what_(what) {}

  uint64_t operator()(PyObject* item, size_t index) {
    py::object number;
    if (PyLong_Check(item)) {
      number = py::reinterpret_borrow<py::object>(item);
    } else if (PyObject* method = find(Py_TYPE(item))) {
      number = py::reinterpret_steal<py::object>(PyObject_Vectorcall(method, &item, 1, nullptr));
    }
    // Wide enough for every address, and quicker than the conversions to 64 bits.
    const uint64_t address = number ? PyLong_AsSize_t(number.ptr()) : 0;
    if (PyErr_Occurred()) {
      const std::string message = std::string(what_) + " " + std::to_string(index) +
                                  " of the megakernel: expected a tensor or an address, got " + Py_TYPE(item)->tp_name;
      py::raise_from(PyExc_TypeError, message.c_str());
      throw py::error_already_set();
    }
    return address;
  }

 private:
  // Null, and an error set, for a type without data_ptr.
  PyObject* find(PyTypeObject* type) {
    for (const auto& [known, method] : methods_)
      if (known.ptr() == reinterpret_cast<PyObject*>(type)) return method.ptr();
    static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
    const auto key = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
    auto method = py::reinterpret_steal<py::object>(PyObject_GetAttr(key.ptr(), data_ptr));
    if (!method) return nullptr;
    return methods_.emplace_back(key, std::move(method)).second.ptr();
  }

  const char* what_;
  std::vector<std::pair<py::object, py::object>> methods_;
};

void check_count(const char* what, size_t num_expected, size_t num_given) {
  if (num_given != num_expected)
    throw py::value_error("the megakernel expects " + std::to_string(num_expected) + " " + what + "s, got " +
                          std::to_string(num_given));
}

// A tuple: data_ptr() may run Python code, which must not change the sequence under us.
py::tuple as_tuple(py::handle sequence, const char* what, size_t num_expected) {
  auto tuple = py::reinterpret_steal<py::tuple>(PySequence_Tuple(sequence.ptr()));
  if (!tuple) throw py::error_already_set();
  check_count(what, num_expected, tuple.size());
  return tuple;
}

int64_t as_size(PyObject* item) {
  const int64_t size = PyLong_AsLongLong(item);
  if (size == -1 && PyErr_Occurred()) throw py::error_already_set();
  return size;
}

// From a tensor's first byte to behind its last.
int64_t extent_of(PyObject* item) {
  const auto tensor = py::reinterpret_borrow<py::object>(item);
  const py::tuple shape = tensor.attr("shape"), strides = tensor.attr("stride")();
  int64_t last = 0;
  for (size_t d = 0; d < shape.size(); d++) {
    const auto size = shape[d].cast<int64_t>();
    if (size == 0) return 0;
    last += (size - 1) * strides[d].cast<int64_t>();
  }
  return (last + 1) * tensor.attr("element_size")().cast<int64_t>();
}

}  // namespace

void read_addresses(py::handle sequence, const char* what, std::span<uint64_t> addresses) {
  const py::tuple items = as_tuple(sequence, what, addresses.size());
  AddressReader address_of(what);
  for (size_t i = 0; i < addresses.size(); i++) addresses[i] = address_of(PyTuple_GET_ITEM(items.ptr(), i), i);
}

void read_sizes(py::handle sequence, std::span<int64_t> sizes) {
  const py::tuple items = as_tuple(sequence, "size", sizes.size());
  for (size_t i = 0; i < sizes.size(); i++) sizes[i] = as_size(PyTuple_GET_ITEM(items.ptr(), i));
}

Arguments::Arguments(std::vector<int> inputs, std::vector<int> sizes, bool freeze,
                     const std::vector<InputMemory>& memory)
    : inputs_(std::move(inputs)), sizes_(std::move(sizes)), freeze_(freeze) {
  for (const std::vector<int>* positions : {&inputs_, &sizes_})
    for (int position : *positions) {
      if (position < 0) throw py::value_error("a position among the arguments is " + std::to_string(position));
      num_needed_ = std::max<size_t>(num_needed_, position + 1);
    }
  if (memory.empty()) return;
  if (memory.size() != inputs_.size()) throw py::value_error("the memory must be said of each input or of none");
  std::vector<size_t> written;
  std::vector<Turns> all_turns;
  for (const auto& [name, bytes, is_written, turns] : memory) {
    if (is_written) written.push_back(names_.size());
    names_.push_back(name);
    bytes_.push_back(bytes);
    has_unknown_bytes_ |= bytes == kUnknownBytes;
    all_turns.push_back(turns);
  }
  overlaps_ = Overlaps(std::move(all_turns), std::move(written));
}

void Arguments::read(const py::tuple& args, std::span<uint64_t> addresses, std::span<int64_t> sizes) {
  check_count("input", addresses.size(), inputs_.size());
  if (sizes_.size() < sizes.size()) check_count("size", sizes.size(), sizes_.size());  // the graph may use fewer
  if (args.size() < num_needed_) check_count("argument", num_needed_, args.size());
  for (size_t i = 0; i < sizes.size(); i++) sizes[i] = as_size(PyTuple_GET_ITEM(args.ptr(), sizes_[i]));
  AddressReader address_of("argument");
  // Another thread's call may come between two tensors, and then last_ is that call's.
  for (size_t i = 0; i < inputs_.size(); i++) {
    PyObject* item = PyTuple_GET_ITEM(args.ptr(), inputs_[i]);
    const bool is_known = last_ && PyTuple_GET_ITEM(last_.ptr(), inputs_[i]) == item;
    addresses[i] = is_known ? last_addresses_[i] : address_of(item, inputs_[i]);
  }
  if (overlaps_.may_occur()) check_apart(args, addresses);
  if (!freeze_) return;
  last_addresses_.assign(addresses.begin(), addresses.end());
  const py::object before = std::exchange(last_, args);  // freed last, since that may run Python code
}

void Arguments::check(const py::tuple& args) {
  std::vector<uint64_t> addresses(inputs_.size());
  std::vector<int64_t> sizes(sizes_.size());
  read(args, addresses, sizes);
}

void Arguments::check_apart(const py::tuple& args, std::span<const uint64_t> addresses) {
  std::vector<int64_t> extents;
  if (has_unknown_bytes_) {
    extents = bytes_;
    for (size_t i = 0; i < extents.size(); i++)
      if (extents[i] == kUnknownBytes) extents[i] = extent_of(PyTuple_GET_ITEM(args.ptr(), inputs_[i]));
  }
  const auto found = overlaps_.find(addresses, has_unknown_bytes_ ? extents : bytes_);
  if (!found) return;
  const py::object type = py::module_::import("torch_mpk.errors").attr("SharedMemoryError");
  const py::object error = type(py::arg("first") = names_[found->first], py::arg("second") = names_[found->second]);
  PyErr_SetObject(type.ptr(), error.ptr());
  throw py::error_already_set();
}

}  // namespace mpk
