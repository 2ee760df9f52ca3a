// latent_attention on tensor cores: FlashDecoding over latents, which all heads of a row share.
#include <algorithm>
#include <array>

#include "../../codegen/checks.h"
#include "../../codegen/job_code.h"
#include "../../codegen/pattern.h"
#include "../../codegen/text.h"
#include "../../schedule/refusals.h"
#include "../../schedule/staging.h"
#include "../fields.h"
#include "scores.h"
#include "torch_mpk/abi/partition.h"
#include "torch_mpk/abi/sizes.h"

namespace mpk {
namespace {

using namespace codegen;

constexpr int64_t kFewestStages = 2;
constexpr int kMostSize = kLatentWarps * kLatentColumns, kMostRope = 128;

struct LatentFields {
  int64_t stages = 0;       // tiles in shared memory
  int64_t split_tiles = 0;  // with several rows: the most of a split,
  int64_t few_splits = 1;   // and the splits of a long enough row, see kv_own_count
  int64_t splits = 0;       // the most of all rows

  static constexpr std::array<FieldOf<LatentFields>, 4> kAll = {{
      {"stages", "kStages", &LatentFields::stages},
      {"split_tiles", "kSplitTiles", &LatentFields::split_tiles},
      {"few_splits", "kFewSplits", &LatentFields::few_splits},
      {"splits", "kSplits", &LatentFields::splits},
  }};
};

struct LatentSizes {
  int64_t batch, heads, size, rope, length;

  explicit LatentSizes(const Node& node)
      : batch(node.operand("q").tensor.shape[0]),
        heads(node.operand("q").tensor.shape[1]),
        size(node.operand("q").tensor.shape[2]),
        rope(node.operand("q_rope").tensor.shape[2]),
        length(node.operand("latent").tensor.shape[2]) {}

  int64_t groups() const { return divide_up(heads, kWarpRows); }
  int64_t units() const { return batch * groups(); }
  uint32_t row_tiles() const { return static_cast<uint32_t>(divide_up(length, kLatentTile)); }
  // The most splits of a row with these fields, and of all rows.
  int64_t of_row(const LatentFields& own, int64_t workers) const {
    const auto num_groups = static_cast<uint32_t>(groups()), num_workers = static_cast<uint32_t>(workers);
    if (batch == 1) return kv_max_splits(num_groups, num_workers) / groups();
    return kv_own_count(row_tiles(), static_cast<uint32_t>(own.few_splits), static_cast<uint32_t>(own.split_tiles));
  }
  int64_t bytes(const LatentFields& own, int64_t workers) const {
    return latent_bytes(size, rope, own.stages, of_row(own, workers));
  }
};

class LatentAttention : public Kernel {
 public:
  LatentAttention() : Kernel("latent_attention.split_kv") {}

 private:
  std::optional<std::string> refuses_node(const Node& node, const Target&) const override {
    const Operand& q = node.operand("q");
    const LatentSizes sizes(node);
    if (q.tensor.dtype != DType::kBF16 && q.tensor.dtype != DType::kF16)
      return "q is " + std::string(info(q.tensor.dtype).name) + ", and tensor cores take bfloat16 and float16 alone";
    if (sizes.units() < 1) return "there are no queries";
    if (sizes.size % kLatentColumns != 0 || sizes.size < kLatentColumns || sizes.size > kMostSize)
      return "latents must have a multiple of " + str(kLatentColumns) + " elements up to " + str(kMostSize) + ", got " +
             str(sizes.size);
    if (sizes.rope % 16 != 0 || sizes.rope < 16 || sizes.rope > kMostRope)
      return "rotated keys must have a multiple of 16 elements up to " + str(kMostRope) + ", got " + str(sizes.rope);
    if (sizes.length < 1 || sizes.length >= int64_t{1} << 31)
      return "a cache of " + str(sizes.length) + " positions is not supported";
    for (const char* name : {"q", "q_rope", "latent", "rope", "y"}) {
      if (auto why = refuses_dtype(node.operand(name), q.tensor.dtype)) return why;
      if (auto why = refuses_inner_stride(node.operand(name))) return why;
      if (!has_aligned_rows(node.operand(name).tensor))
        return "rows of " + std::string(name) + " do not begin at multiples of 16 bytes";
    }
    if (const Operand* limit = node.find("limit"))
      if (auto why = refuses_dtype(*limit, DType::kI64)) return why;
    return refuses_scores(node);
  }

  // As many tiles as leave the ring half of shared memory, or else as few as its loop needs.
  std::vector<Cut> candidates(const Schedule& schedule, const Job& job) const override {
    constexpr int64_t kMostOfSplit = 1024;    // positions, with several rows
    constexpr int64_t kMostBytes = 64 << 20;  // of all splits' results in the workspace
    const LatentSizes sizes(schedule.graph.nodes()[job.body.front()]);
    const int64_t workers = schedule.target.num_workers;
    Cut cut = job.cut;
    LatentFields own;
    own.few_splits = std::max<int64_t>(workers / sizes.units(), 1);
    own.split_tiles = kMostOfSplit / kLatentTile;
    while (sizes.of_row(own, workers) > own.few_splits &&
           sizes.of_row(own, workers) * sizes.units() * latent_split_bytes(sizes.size) > kMostBytes)
      own.split_tiles *= 2;
    own.splits = sizes.of_row(own, workers) * sizes.units();
    own.stages = kMostLatentStages;
    while (own.stages > kFewestStages && sizes.bytes(own, workers) > schedule.target.smem_bytes / 2) own.stages--;
    cut.staged_bytes = sizes.bytes(own, workers);
    if (cut.staged_bytes > room(schedule)) return {};
    cut.num_tiles = own.splits;
    cut.scratch = Scratch{own.splits * latent_split_bytes(sizes.size)};
    cut.fields = list_fields(own);
    // Each group of heads reads all latents, the first from memory, the others from L2, which is twice as fast.
    cut.cost_ns = memory_ns(schedule, job) * (1 + static_cast<double>(sizes.groups() - 1) / 2);
    return {cut};
  }

  void prove(const CutProof& proof) const override {
    const auto own = fields_of<LatentFields>(proof.cut());
    const LatentSizes sizes(proof.first());
    const int64_t consumers = proof.schedule().warps.consumers, workers = proof.schedule().target.num_workers;
    proof.require(own.stages >= kFewestStages && own.stages <= kMostLatentStages,
                  str(own.stages) + " tiles in shared memory are none that its loop takes turns at");
    proof.require(own.few_splits > 0 && own.split_tiles > 0, "a size of its splits is not positive");
    proof.require(consumers >= kLatentWarps,
                  str(kLatentWarps) + " warps multiply, but there are " + str(consumers) + " consumers");
    proof.require(proof.cut().staged_bytes >= sizes.bytes(own, workers),
                  "its tiles take " + str(sizes.bytes(own, workers)) + " bytes of " + str(proof.cut().staged_bytes));
    proof.require(own.splits == sizes.of_row(own, workers) * sizes.units(),
                  str(own.splits) + " splits are not as many as lengths at run time may give");
    proof.require_scratch(own.splits * latent_split_bytes(sizes.size));
    proof.require_plain_end();
  }

  JobCode emit(const JobPlace& place) const override {
    KernelContext& context = place.context;
    const Node& node = place.node();
    const LatentSizes sizes(node);
    const auto own = fields_of<LatentFields>(place.job.cut);
    JobCode code{"LatentAttention", "latent_attention::compute", "", "latent_attention::Shape<V>::kStagedBytes"};
    code.headers = {"torch_mpk/device/tasks/latent_attention.cuh"};
    Refs refs(context, code.refs);
    const std::string type = cuda_type(node.operand("q").tensor.dtype);
    code.body = "  using T = " + type + ";\n" + constant("kBatch", sizes.batch) + constant("kHeads", sizes.heads) +
                constant("kGroups", sizes.groups()) + constant("kPasses", 1) + constant("kSize", sizes.size) +
                constant("kRope", sizes.rope) + constant("kLength", sizes.length) +
                constant("kTilePositions", kLatentTile) + constant("kWorkers", context.schedule.target.num_workers) +
                constants(own) + flag("kOverlaps", false) + scores(refs, node, true);
    for (const char* name : {"q", "q_rope"}) {
      const Tensor& t = node.operand(name).tensor;
      require(context.aligned_rows(t, false), node, "rows of q are not aligned to 16 bytes");
      code.body += returning("const T*", std::string(name) + "(const Job& job, uint32_t b, uint32_t h)",
                             refs.pointer(node, t) + element_at(t, {"b", "h"}));
    }
    for (const auto& [name, pitch] : {std::pair{"latent", "kPitchLatent"}, std::pair{"rope", "kPitchRope"}}) {
      const Tensor& t = node.operand(name).tensor;
      require(context.aligned_rows(t, false), node, "rows of the cache are not aligned to 16 bytes");
      code.body += "  static constexpr int64_t " + std::string(pitch) + " = " + str(t.strides[2]) + ";\n" +
                   returning("const T*", std::string(name) + "(const Job& job, uint32_t b)",
                             refs.pointer(node, t) + element_at(t, {"b"}));
    }
    const Tensor& y = node.operand("y").tensor;
    code.body += returning("T*", "y(const Job& job, uint32_t b, uint32_t h)",
                           refs.pointer(node, y, true) + element_at(y, {"b", "h"}));
    const Operand* limit = node.find("limit");
    code.body +=
        returning("int64_t", "limit(const Job& job, uint32_t b)",
                  limit == nullptr ? "kLength"
                                   : "*(" + refs.pointer(node, limit->tensor) + element_at(limit->tensor, {"b"}) + ")");
    code.body += mask_of_position(refs, node) +
                 returning("uint8_t*", "partials(const Job& job)", refs.workspace(place.job.cut.scratch->offset));
    return code;
  }
};

const LatentAttention kKernel{};
[[maybe_unused]] const bool kRegistered = add_kernel("latent_attention", kKernel);

}  // namespace
}  // namespace mpk
