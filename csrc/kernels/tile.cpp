// A tile task: its function, called for each tile of its worker.
#include <algorithm>

#include "../codegen/job_code.h"
#include "../codegen/pattern.h"
#include "../codegen/text.h"
#include "../codegen/tile_writer.h"
#include "../schedule/kernel.h"
#include "../schedule/proof.h"
#include "../schedule/staging.h"

namespace mpk {
namespace {

using namespace codegen;

std::string missing_code(const TaskDef& task, int arch) {
  if (task.headers.empty()) return "it has no device code: declare its header with @task(header=...)";
  std::string known;
  for (const auto& [each, header] : task.headers) known += (known.empty() ? "sm_" : ", sm_") + str(each);
  const std::string file = task.name + ".cuh";
  return "it has no device code for sm_" + str(arch) + ", only for " + known + ": write sm" + str(arch) + "/" + file +
         ", or " + file + " for all others";
}

class Tiles : public Kernel {
 public:
  Tiles() : Kernel("tile") {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target& target) const override {
    if (!node.def->header_for(target.device_arch, target.arch).empty()) return std::nullopt;
    return missing_code(*node.def, target.device_arch);
  }

  // Only the compiler knows the shared memory of its device code. The cost is an estimate: loads are seldom as wide,
  // and as far ahead, as memory needs.
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    constexpr double kSlower = 2;
    Cut cut = job.cut;
    cut.staged_bytes = std::clamp<int64_t>(room(schedule), 0, kMaxTileBytes);
    cut.cost_ns = kSlower * memory_ns(schedule, job);
    return {cut};
  }

  void prove(const CutProof& proof) const override { proof.require_nothing_else(); }

  JobCode emit(const JobPlace& place) const override {
    KernelContext& context = place.context;
    const Node& node = place.node();
    const Target& target = context.schedule.target;
    const std::string& header = node.def->header_for(target.device_arch, target.arch);
    JobCode code{"Tile", "run_tiles", "", "kTileStagedBytes<V>", "", {"torch_mpk/device/tile.cuh", header}};
    Refs refs(context, code.refs);
    Dialect cuda = cuda_dialect(context, refs, node);
    cuda.max_shared_bytes = place.job.cut.staged_bytes;
    const TileWriter writer(node, cuda);
    const Operand* streamed = node.find(node.def->stream);
    const bool through_ring =
        streamed != nullptr && context.aligned_rows(streamed->tensor, false) && has_short_rows(streamed->tensor);
    if (through_ring) {
      code.compute = "run_stream_tiles";
      code.load = "load_tiles";
      code.staged_bytes = "kStreamStagedBytes<V>";
    }
    code.body = writer.body(through_ring);
    code.num_small_workers = std::min<uint32_t>(writer.num_tiles(), 1 << 20);
    return code;
  }
};

const Tiles kTiles{};
[[maybe_unused]] const bool kRegistered = add_kernel(Role::kTile, kTiles);

}  // namespace
}  // namespace mpk
