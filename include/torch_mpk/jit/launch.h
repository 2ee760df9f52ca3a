// One call of a single kernel: the expressions of its launch, and the compiled code that it runs.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "torch_mpk/jit/signature.h"
#include "torch_mpk/runtime/driver.h"

namespace mpk::jit {

inline constexpr int kMaxArguments = 128;

enum class Op { kConstant, kSlot, kAdd, kSub, kMul, kFloorDiv, kMod, kCdiv, kMin, kMax };

struct Instruction {
  Op op;
  int64_t operand;  // of kConstant and kSlot
};

// An integer expression over what a call has bound, in postfix order.
struct Expression {
  std::vector<Instruction> code;
  std::string text;

  // Throws SignatureError for a division by zero and for a result beyond 64 bits.
  int64_t evaluate(const Binding& binding, const Signature& signature) const;
};

// One argument of the C++ function.
struct Argument {
  enum Kind { kPointer, kInteger, kFloat } kind;
  int index;         // of kPointer: the operand; of kFloat: the slot that holds a double's bits
  Expression value;  // of kInteger
};

struct Geometry {
  unsigned grid[3], block[3], cluster[3];
  unsigned shared_bytes;
  bool cooperative, pdl;
};

// How the operands of a call become a launch.
struct Plan {
  std::vector<Expression> grid, block, cluster;  // three each; no grid and block on the CPU
  Expression shared_bytes;
  bool cooperative, pdl;
  std::vector<Argument> arguments;

  // Throws SignatureError for sizes that no launch can have.
  Geometry geometry(const Binding& binding, const Signature& signature) const;
};

// The values of a function's parameters, each in as many bytes as the function has for it.
class Parameters {
 public:
  // Throws SignatureError where an integer does not fit its parameter.
  Parameters(const Plan& plan, const std::vector<int>& bytes, const Binding& binding, const Signature& signature);
  void** pointers() { return pointers_; }

 private:
  uint64_t values_[kMaxArguments];
  void* pointers_[kMaxArguments];
};

// A function compiled for one device and one choice of template arguments. Called from any thread.
class Code {
 public:
  virtual ~Code() = default;
  // Returns once the kernel is in the stream; on the CPU, once it has run.
  virtual void run(const Geometry& geometry, void** parameters, void* stream) = 0;
  const std::vector<int>& parameter_bytes() const { return parameter_bytes_; }

 protected:
  std::vector<int> parameter_bytes_;
};

class CpuCode : public Code {
 public:
  // Throws std::runtime_error for a library that cannot be loaded. It stays loaded for the life of the process.
  explicit CpuCode(const std::string& library);
  void run(const Geometry&, void** parameters, void*) override { run_(parameters); }

 private:
  void (*run_)(void**);
};

class CudaCode : public Code {
 public:
  // Loads a cubin; works during a graph capture. Throws cu::Error. It stays loaded for the life of the process, since
  // launches of it may be in flight, or in graphs, at any time.
  CudaCode(const std::string& image, std::string kernel, std::string symbol, int device, int num_parameters);
  void run(const Geometry& geometry, void** parameters, void* stream) override;

 private:
  void allow(const Geometry& geometry);

  const cu::Driver& driver_;
  const cu::DeviceInfo device_;
  const std::string kernel_;
  cu::Context context_ = nullptr;
  cu::Module module_ = nullptr;
  cu::Function function_ = nullptr;
  int64_t static_shared_bytes_ = 0;
  std::mutex mutex_;  // of the below
  int64_t allowed_shared_bytes_ = 48 << 10;
  unsigned allowed_cluster_ = 8;
};

}  // namespace mpk::jit
