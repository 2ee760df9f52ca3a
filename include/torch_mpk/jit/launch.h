// A call of a single kernel: its launches, and their compiled code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "torch_mpk/jit/expression.h"
#include "torch_mpk/jit/signature.h"
#include "torch_mpk/runtime/driver.h"

namespace mpk::jit {

inline constexpr int kMaxArguments = 128;
inline constexpr size_t kMaxParameterBytes = 4096;  // as CUDA has it, with each parameter in a multiple of 16

// One value that is passed: a parameter of the C++ function, or a field of one that is a struct.
struct Argument {
  enum Kind { kPointer, kInteger, kFloat } kind;
  int index;         // kPointer: the operand; kFloat: the slot with a double's bits
  Expression value;  // kInteger
  int parameter;
  std::string field;  // if the parameter is a struct
};

struct Geometry {
  unsigned grid[3], block[3], cluster[3];
  unsigned shared_bytes;
  bool cooperative, pdl;
};

struct Launch {
  std::vector<Expression> grid, block;  // three each; none on the CPU
  Expression shared_bytes;
  std::vector<Argument> arguments;  // in the order of their parameters
  int num_parameters;
};

// Turns a call's operands into launches, which run in sequence.
struct Plan {
  std::vector<Expression> requirements;
  std::vector<Expression> cluster;  // three
  Expression pdl;
  bool cooperative;
  std::vector<Launch> launches;

  // Throws SignatureError for the first requirement that does not hold.
  void require(const Binding& binding, const Signature& signature) const;

  // Throws SignatureError for sizes that no launch can have.
  Geometry geometry(const Launch& launch, const Binding& binding, const Signature& signature) const;
};

// The place of an argument in its parameter. `bits`: an integer's, negative if it is signed; 1 for a bool.
struct Place {
  int offset, bytes, bits;
};

// The layout of a compiled function's parameters.
struct Layout {
  std::vector<int> parameter_bytes;
  std::vector<Place> arguments;  // none: each is a parameter, and integers are signed

  Place place(const Launch& launch, size_t argument) const;
};

// Throws std::runtime_error if a function cannot take a launch's arguments.
void check(const Layout& layout, const Launch& launch);

// The values of a function's parameters, each in the parameter's size.
class Parameters {
 public:
  // Throws SignatureError where an integer does not fit its parameter.
  Parameters(const Launch& launch, const Layout& layout, const Binding& binding, const Signature& signature);
  void** pointers() { return pointers_; }

 private:
  alignas(16) std::byte values_[kMaxParameterBytes];
  void* pointers_[kMaxArguments];
};

// A function compiled for one device and one choice of template arguments. Called from any thread.
class Code {
 public:
  virtual ~Code() = default;
  // Returns once the kernel is in the stream; on the CPU, once it has run.
  virtual void run(const Geometry& geometry, void** parameters, void* stream) = 0;
  const Layout& layout() const { return layout_; }

 protected:
  Layout layout_;
};

class CpuCode : public Code {
 public:
  // Throws std::runtime_error for a library that cannot be loaded. It stays loaded for the life of the process.
  // `entry`: of several functions in it, as its exported names end.
  CpuCode(const std::string& library, const std::string& entry);
  void run(const Geometry&, void** parameters, void*) override { run_(parameters); }

 private:
  void (*run_)(void**);
};

class CudaCode : public Code {
 public:
  // Loads a cubin; works during a graph capture. Throws cu::Error. It stays loaded for the life of the process, since
  // launches of it may be in flight, or in graphs, at any time.
  CudaCode(const std::string& image, std::string kernel, std::string symbol, int device, int num_parameters,
           std::vector<Place> arguments);
  void run(const Geometry& geometry, void** parameters, void* stream) override;

 private:
  cu::Module module_of(const std::string& image);
  void allow(const Geometry& geometry);

  const cu::Driver& driver_;
  const cu::DeviceInfo device_;
  const std::string kernel_;
  cu::Context context_ = nullptr;
  cu::Function function_ = nullptr;
  int64_t static_shared_bytes_ = 0;
  std::mutex mutex_;  // of the below
  int64_t allowed_shared_bytes_ = 48 << 10;
  unsigned allowed_cluster_ = 8;
};

}  // namespace mpk::jit
