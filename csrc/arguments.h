// Turns a call's arguments into the addresses and sizes of a run. All per-tensor work of a call is here: it is most of
// a call's host time.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "overlaps.h"

namespace mpk {

// Reads the addresses of a sequence's items: tensors (anything with data_ptr()) or integers.
// Throws py::value_error unless there are as many as `addresses` has room for, py::type_error for any other item.
void read_addresses(pybind11::handle sequence, const char* what, std::span<uint64_t> addresses);

// Reads integers. Throws py::value_error unless there are as many as `sizes` has room for.
void read_sizes(pybind11::handle sequence, std::span<int64_t> sizes);

// The memory of an input.
struct InputMemory {
  std::string name;
  int64_t bytes;  // extent; kUnknownBytes where it differs from call to call
  bool is_written;
  Turns turns;
};
constexpr int64_t kUnknownBytes = -1;

// The arguments of a call that are an executable's inputs and sizes.
class Arguments {
 public:
  // `inputs` and `sizes`: positions among a call's arguments. `freeze`: a tensor object of the last call keeps its
  // address. The last call's arguments are then kept alive, so that no other object takes their place in memory.
  // `memory`: of each input; empty if no overlap matters.
  Arguments(std::vector<int> inputs, std::vector<int> sizes, bool freeze, const std::vector<InputMemory>& memory = {});

  size_t num_inputs() const { return inputs_.size(); }
  size_t num_sizes() const { return sizes_.size(); }

  // `args` is a tuple. The spans are as long as the executable has inputs and sizes. Throws what the functions above
  // throw, and Python's SharedMemoryError if an input that is written overlaps another.
  void read(const pybind11::tuple& args, std::span<uint64_t> addresses, std::span<int64_t> sizes);

  // Throws what `read` throws for these arguments.
  void check(const pybind11::tuple& args);

 private:
  void check_apart(const pybind11::tuple& args, std::span<const uint64_t> addresses);

  const std::vector<int> inputs_, sizes_;
  const bool freeze_;
  size_t num_needed_ = 0;           // arguments that are read
  std::vector<std::string> names_;  // of the inputs, like the next; empty if no overlap matters
  std::vector<int64_t> bytes_;
  bool has_unknown_bytes_ = false;
  Overlaps overlaps_;
  pybind11::object last_;  // the last call's arguments, if frozen
  std::vector<uint64_t> last_addresses_;
};

}  // namespace mpk
