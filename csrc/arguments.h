// How the arguments of a call become the addresses and sizes of a run. All that is done for each tensor of each call is
// here: what a call costs the host is mostly this.
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

// Which of a call's arguments are the inputs and the sizes of an executable.
class Arguments {
 public:
  // `inputs` and `sizes` are positions among a call's arguments. `freeze`: a tensor that is the same object as in the
  // last call has the address it had then. The last call's arguments are then kept alive, so that no other object can
  // take their place in memory. `memory`: that of each input; empty where none may overlap in a way that counts.
  Arguments(std::vector<int> inputs, std::vector<int> sizes, bool freeze, const std::vector<InputMemory>& memory = {});

  size_t num_inputs() const { return inputs_.size(); }
  size_t num_sizes() const { return sizes_.size(); }

  // `args` is a tuple. The spans are as long as the executable has inputs, and sizes. Throws what the functions above
  // do, and Python's SharedMemoryError where an input that is written overlaps another.
  void read(const pybind11::tuple& args, std::span<uint64_t> addresses, std::span<int64_t> sizes);

  // What `read` throws for these arguments.
  void check(const pybind11::tuple& args);

 private:
  void check_apart(const pybind11::tuple& args, std::span<const uint64_t> addresses);

  const std::vector<int> inputs_, sizes_;
  const bool freeze_;
  size_t num_needed_ = 0;           // arguments
  std::vector<std::string> names_;  // of the inputs, as is the next; empty where none may overlap in a way that counts
  std::vector<int64_t> bytes_;
  bool has_unknown_bytes_ = false;
  Overlaps overlaps_;
  pybind11::object last_;  // the last call's, where frozen
  std::vector<uint64_t> last_addresses_;
};

}  // namespace mpk
