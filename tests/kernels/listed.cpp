// A kernel of a task outside the core, whose loader streams the rows of a table that the launch itself has listed. How
// many there are is counted as it runs. It is compiled against the core's headers by test_a_kernel_elsewhere.py.
#include "codegen/checks.h"
#include "codegen/job_code.h"
#include "codegen/text.h"
#include "schedule/kernel.h"
#include "schedule/proof.h"
#include "schedule/staging.h"
#include "torch_mpk/abi/sizes.h"

namespace mpk {
namespace {

using namespace codegen;

constexpr int64_t kMostOfWorker = 32;  // a lane of its loader has one each

struct Listed {
  const Tensor &table, &ids, &y;

  explicit Listed(const Node& node)
      : table(node.operand("table").tensor), ids(node.operand("ids").tensor), y(output(node).tensor) {}

  int64_t row_bytes() const { return table.shape[1] * size_bytes(table.dtype); }
  int64_t most_of_worker(const Schedule& schedule) const {
    return divide_up(ids.shape[0], int64_t{schedule.target.num_workers});
  }
};

class ListedRows : public Kernel {
 public:
  ListedRows() : Kernel("listed_sums.rows") {}

 private:
  std::optional<std::string> refuses(const Schedule& schedule, const Job& job) const override {
    const Listed own(schedule.graph.nodes()[job.body.front()]);
    if (schedule.warps.all_read_entries) return "all warps of the launch read every entry of the ring";
    if (own.most_of_worker(schedule) > kMostOfWorker) return "a worker's rows are more than its loader's lanes";
    if (own.row_bytes() > schedule.warps.slot_bytes || own.row_bytes() % 16 != 0 || !has_aligned_rows(own.table))
      return "rows of " + str(own.row_bytes()) + " bytes do not come to a slot by copies of 16";
    return std::nullopt;
  }

  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    Cut cut = job.cut;
    cut.input = Input::kInPlace;
    cut.num_tiles = Listed(schedule.graph.nodes()[job.body.front()]).ids.shape[0];
    cut.cost_ns = memory_ns(schedule, job);
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    const Listed own(proof.first());
    const int64_t slot = proof.schedule().warps.slot_bytes;
    proof.require(own.row_bytes() <= slot, "its rows do not fit slots of " + CutProof::str(slot) + " bytes");
    proof.require(own.most_of_worker(proof.schedule()) <= kMostOfWorker, "a worker may have more rows than lanes");
    proof.require_nothing_else();
  }

  JobCode emit(const JobPlace& place) const override {
    const Node& node = place.node();
    const Listed own(node);
    require(place.context.aligned_rows(own.table, false), node, "rows of the table are not aligned to 16 bytes");
    JobCode code{"Listed", "listed::compute", "listed::load"};
    code.headers = {LISTED_HEADER};
    Refs refs(place.context, code.refs);
    const std::string type = cuda_type(own.table.dtype);
    const auto getter = [&](const std::string& of, const char* name, const Tensor& t, bool writable = false) {
      return returning(of, std::string(name) + "(const Job& job)", refs.pointer(node, t, writable));
    };
    code.body = "  using T = " + type + ";\n" + constant("kRows", own.table.shape[0]) +
                constant("kSize", own.table.shape[1]) + constant("kPitch", own.table.strides[0]) +
                constant("kListed", own.ids.shape[0]) + getter("const " + type + "*", "table", own.table) +
                getter("const int64_t*", "ids", own.ids) + getter(type + "*", "y", own.y, true);
    return code;
  }
};

const ListedRows kListedRows{};
[[maybe_unused]] const bool kRegistered = add_kernel("listed_sums", kListedRows);

}  // namespace
}  // namespace mpk
