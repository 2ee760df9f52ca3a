#include "../chain.h"
#include "../checks.h"
#include "../pattern.h"
#include "../text.h"

namespace mpk::codegen {
namespace {

RowCode emit(const RowPlace& at) {
  require(at.size % 2 == 0, at.task, "the head size must be even, got " + str(at.size));
  const int64_t heads = at.task.operand("x").tensor.shape[1];
  RowCode code;
  code.row = at.options.batch_row ? "batch_row" : "row / " + str(heads);
  code.vectorized = at.vectorized;
  bool aligned = true;
  for (const char* angle : {"cos", "sin"}) {
    const Tensor& t = at.task.operand(angle).tensor;
    code.early &= at.known(t);
    require(t.dtype == at.dtype, at.task, std::string("expected ") + angle + " of x's dtype " + info(at.dtype).name);
    code.traits += "    static MPK_DEVICE const T* " + std::string(angle) + "(const Job& job, uint32_t row) { return " +
                   at.refs.pointer(at.task, t) + " + " + row_offset(t, "row") + "; }\n";
    aligned &= at.context.aligned_rows(t, true);
  }
  code.traits += "    static constexpr bool kVectorized = " + std::string(truth(at.vectorized)) +
                 ", kAlignedTables = " + truth(aligned) + ";\n";
  return code;
}

[[maybe_unused]] const bool kRegistered = add_row_emitter("rope", emit);

}  // namespace
}  // namespace mpk::codegen
