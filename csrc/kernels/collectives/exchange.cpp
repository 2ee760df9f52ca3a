// all_reduce and all_gather: each worker pushes its part of the vector to the other ranks, and polls the same part of
// theirs. See device/tasks/exchange.cuh.
#include <algorithm>

#include "../../codegen/checks.h"
#include "../../codegen/job_code.h"
#include "../../codegen/pattern.h"
#include "../../codegen/program.h"
#include "../../codegen/text.h"
#include "../../schedule/access.h"
#include "../../schedule/kernel.h"
#include "../../schedule/proof.h"
#include "../../schedule/refusals.h"
#include "../../schedule/staging.h"
#include "torch_mpk/abi/mailboxes.h"
#include "torch_mpk/schedule/mailboxes.h"

namespace mpk {
namespace {

using namespace codegen;

constexpr int64_t kDataBytes = 8;     // pushed by a thread at a time
constexpr double kExchangeNs = 1400;  // of one, while memory streams, between two H200s over NVLink
constexpr double kLinkBytesPerNs = 300;

class ExchangeWriter {
 public:
  ExchangeWriter(const JobPlace& place, const char* compute)
      : context_(place.context),
        job_(place.job),
        node_(place.node()),
        x_(node_.operand("x").tensor),
        y_(output(node_).tensor),
        code_{"Exchange", compute},
        refs_(context_, code_.refs) {
    code_.headers = {node_.def->header};
  }

  JobCode sum() {
    write_common();
    write_finish();
    return std::move(code_);
  }

  JobCode rows() {
    write_common();
    code_.body += constant("kRow", x_.shape.back()) +
                  function("void", "put(const Job& job, int64_t index, T value)",
                           "    " + emit_store(context_, refs_, node_, y_, "index", "value") + "\n");
    return std::move(code_);
  }

 private:
  void write_common() {
    const Mailboxes boxes = place_mailboxes(context_.schedule);
    const Mailbox& own = boxes.of_nodes.at(node_.id);
    const bool polled = context_.polled(x_.buffer);
    const std::string x = refs_.pointer(node_, x_), turn = refs_.number(own.turn);
    const std::string offset = refs_.number(own.offset / kUnitBytes);
    code_.body =
        "  using T = " + std::string(cuda_type(x_.dtype)) + ";\n" + constant("kRanks", node_.int_attr("ranks")) +
        constant("kElements", x_.numel()) + flag("kPolledX", polled) +
        flag("kAlignedX", context_.graph().buffers()[x_.buffer].kind != BufferKind::kInput) +
        returning(polled ? "const uint16_t*" : "const T*", "x(const Job& job)", x) + flag("kByTurns", boxes.by_turns) +
        constant("kTurns", boxes.turns) + "  static constexpr int64_t kPlaceBytes = " + str(boxes.place_bytes) + ";\n" +
        constant("kWords", own.words) + returning("uint32_t", "turn(const Job& job)", turn) +
        returning("uint32_t", "offset(const Job& job)", offset);
  }

  // Finishes a sum: stores it, if anybody reads it there, and evaluates the pointwise tasks behind it.
  void write_finish() {
    std::string fields, loads, body;
    if (!contains(job_.unstored, y_.buffer))
      body = "    " + emit_store(context_, refs_, node_, y_, "point", "value") + "\n";
    std::vector<LocalValue> locals{{y_.buffer, pattern(y_), "value", x_.dtype}};
    for (size_t i = 0; i < job_.epilogue.size(); i++) {
      const Node& node = context_.node(job_.epilogue[i]);
      const auto strides = strides_behind(context_.graph(), makers_of(job_, node.id), node);
      require(node.program && strides && node.program->num_points() == y_.numel(), node,
              "an epilogue must have as many points as there are sums, each of one of them");
      const ProgramCode program = emit_program(context_, refs_, node,
                                               {.prefix = "e" + str(static_cast<int64_t>(i)) + "_",
                                                .point = "point",
                                                .strides = *strides,
                                                .early_loads = true,
                                                .locals = &locals,
                                                .unstored = &job_.unstored});
      fields += program.preload_fields;
      loads += program.preload;
      body += program.body;
    }
    code_.body += "  struct Extra {\n" + fields + "  };\n" +
                  function("Extra", "preload(const Job& job, int32_t point)",
                           "    Extra extra{};\n" + loads + "    return extra;\n") +
                  "  template <class C>\n" +
                  function("void", "finish(C& c, const Job& job, int32_t point, T value, const Extra& extra)", body);
  }

  KernelContext& context_;
  const Job& job_;
  const Node& node_;
  const Tensor &x_, &y_;
  JobCode code_;
  Refs refs_;
};

class ExchangeKernel : public Kernel {
 public:
  ExchangeKernel(std::string name, bool sums) : Kernel(std::move(name)), sums_(sums) {}

 private:
  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    const Node& node = schedule.graph.nodes()[job.body.front()];
    const Tensor &x = node.operand("x").tensor, &y = output(node).tensor;
    const int64_t element = size_bytes(x.dtype), part = sums_ || x.shape.empty() ? x.numel() : x.shape.back();
    if (job.body.size() != 1) return "it exchanges one vector at a time";
    if (!is_row_dtype(x.dtype) || y.dtype != x.dtype) return "it exchanges float32, bfloat16 and float16";
    if (!x.is_contiguous() || !y.is_contiguous()) return "x and y must be contiguous";
    if (x.numel() == 0 || y.numel() >= int64_t{1} << 31) return "it exchanges 1 to 2^31 elements";
    if (part * element % kDataBytes != 0 || x.offset * element % kDataBytes != 0)
      return "the bytes of x must be a multiple of " + str(kDataBytes);
    return std::nullopt;
  }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    const Node& node = schedule.graph.nodes()[job.body.front()];
    const Tensor& x = node.operand("x").tensor;
    const auto others = static_cast<double>(node.int_attr("ranks") - 1);
    const auto pushed = static_cast<double>(2 * x.numel() * size_bytes(x.dtype)) * others;  // with tags
    Cut cut = job.cut;
    cut.input = Input::kInPlace;
    cut.cost_ns = memory_ns(schedule, job) + (others > 0 ? kExchangeNs + pushed / kLinkBytesPerNs : 0);
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    proof.require(!proof.cut().is_staged(), "it reads x where it is");
    proof.require_nothing_else();
  }

  // Sums take epilogues.
  bool takes_companions() const override { return sums_; }

  JobCode emit(const JobPlace& place) const override {
    if (sums_) return ExchangeWriter(place, "exchange::compute_sum").sum();
    return ExchangeWriter(place, "exchange::compute_rows").rows();
  }

  // A worker polls its part alone.
  int64_t polled_elements(const Schedule& schedule, const Job&, const Tensor& made) const override {
    return divide_up(made.numel(), schedule.target.num_workers) + kDataBytes;
  }

  const bool sums_;
};

const ExchangeKernel kSums("all_reduce", true), kRows("all_gather", false);
[[maybe_unused]] const bool kRegistered = add_kernel("all_reduce", kSums) && add_kernel("all_gather", kRows);

}  // namespace
}  // namespace mpk
