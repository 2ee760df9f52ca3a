// Runs a Program over blocks of kBlock points, one kernel call per instruction and block.
#pragma once

#include <vector>

#include "torch_mpk/cpu/kernel.h"

namespace mpk::cpu {

class ProgramRunner {
 public:
  // With `keep_inner`, the last dimension of the domain is walked apart from the others (a reduction's).
  ProgramRunner(const Node& node, const Microkernels& microkernels, bool keep_inner);

  int64_t scratch_bytes() const { return scratch_bytes_; }
  double point_cost() const { return point_cost_; }

  // Call it before a thread's first block of each run. Fills the registers that are the same at every point.
  void start(const Frame& frame, uint8_t* scratch) const;
  // Executes the points [first, first + count) of the domain in row-major order, count <= kBlock.
  void run_block(const Frame& frame, int64_t first, int count, uint8_t* scratch) const;

  // The value of the last instruction, converted to class `as` (see require_result).
  const void* result(const uint8_t* scratch) const { return scratch + result_offset_; }
  // Adds a conversion of the last instruction's value to `dtype`.
  void require_result(DType dtype);
  ValueClass result_class() const { return result_class_; }

 private:
  static constexpr int kMaxDims = 8;

  struct Step {
    Op op = Op::kConst;
    DType dtype = DType::kF32;
    ValueClass value_class = kFloat;  // of the result
    int args[3] = {-1, -1, -1};       // steps
    int64_t out_offset = 0;           // place of its register in the scratch memory
    bool invariant = false;
    Place place;
    int64_t element_bytes = 0;
    std::vector<int64_t> strides;  // one per merged dimension
    int dim = -1;                  // kIndex: merged dimension
    int scalar = -1;               // kSize
    double imm = 0;
    int64_t imm_int = 0;
    bool checks_divisors = false;  // integers, any of which may be zero
    Microkernels::Arith arith = nullptr;
    Microkernels::Round round = nullptr;
    Microkernels::Cast cast = nullptr;
  };

  // Points of a block that differ in the innermost coordinate only.
  struct Run {
    int begin, count;
    int64_t coords[kMaxDims];
  };

  void merge_dims(const Program& program, bool keep_inner);
  int add(Step step);
  int convert(int step, DType dtype);
  void compile(const Node& node);
  void complete(Step& step, const Node& node, const Instr& instr);
  void complete_access(Step& step, const Node& node, const Instr& instr);
  void complete_operation(Step& step, const Node& node, const Instr& instr);
  void allocate();
  void execute(const Step& step, const Frame& frame, const Run* runs, int num_runs, int count, uint8_t* scratch) const;
  uint8_t* argument(const Step& step, int i, uint8_t* scratch) const;  // where its values are; nullptr without
  static void fill_constant(const Step& step, uint8_t* out);
  void access(const Step& step, const Frame& frame, const Run& run, uint8_t* scratch) const;

  const Microkernels& microkernels_;
  std::vector<int64_t> sizes_;             // of the merged dimensions
  std::vector<std::vector<int>> members_;  // program dimensions of each merged dimension
  std::vector<Step> steps_;
  int result_step_ = -1;
  int64_t result_offset_ = 0;
  ValueClass result_class_ = kFloat;
  int64_t scratch_bytes_ = 0;
  double point_cost_ = 0;
};

}  // namespace mpk::cpu
