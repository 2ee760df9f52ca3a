#include "split_kv_writer.h"

#include <algorithm>
#include <utility>

#include "../../codegen/checks.h"
#include "../../codegen/pattern.h"
#include "../../codegen/text.h"
#include "../../schedule/access.h"
#include "../../schedule/staging.h"
#include "../tiles_of_row.h"
#include "scores.h"

namespace mpk::codegen {

AttentionWriter::AttentionWriter(const JobPlace& place, const std::string& keys, const std::string& values,
                                 const char* kind)
    : place_(place),
      context_(place.context),
      phase_(place.phase),
      job_(place.job),
      own_(fields_of<SplitKvFields>(job_.cut)),
      node_(place.node()),
      q_(node_.operand("q")),
      keys_(node_.operand(keys)),
      values_(node_.operand(values)),
      k_new_(node_.find("k_new")),
      v_new_(node_.find("v_new")),
      y_(node_.operands.back().tensor),
      dtype_(q_.tensor.dtype),
      code_{kind, "attention::compute", "attention::load", "attention::Shape<V>::kStagedBytes",
            "",   {node_.def->header}},
      refs_(context_, code_.refs) {}

JobCode AttentionWriter::run() {
  require(job_.body.size() == 1 && job_.epilogue.size() == tiles_behind(context_.graph(), job_).size(), node_,
          "attention takes no companions, and no epilogue but tiles");
  for (const Operand* operand : {&keys_, &values_}) context_.aligned_rows(operand->tensor, false);
  write_sizes();
  write_positions();
  write_result();
  write_chains();
  return std::move(code_);
}

void AttentionWriter::write_sizes() {
  code_.has_stages = own_.overlaps != 0;
  code_.body = "  using T = " + std::string(cuda_type(dtype_)) + ";\n" + constant("kBatch", batch()) +
               constant("kGroups", groups()) + constant("kPasses", heads() / groups() / own_.heads) + constants(own_) +
               constant("kSize", size()) + constant("kValueSize", value_size()) + constant("kLength", length()) +
               constant("kWorkers", context_.schedule.target.num_workers) +
               returning("int64_t", "limit(const Job& job, uint32_t b)", limit()) +
               returning("uint8_t*", "partials(const Job& job)", refs_.workspace(job_.cut.scratch->offset)) +
               flag("kHasNew", k_new_ != nullptr) + scores(refs_, node_, zero_without_keys());
}

void AttentionWriter::write_result() {
  const bool is_stored = std::ranges::find(job_.unstored, y_.buffer) == job_.unstored.end();
  code_.body += flag("kPolled", context_.polled(y_.buffer)) + flag("kStored", is_stored);
  if (is_stored)
    code_.body +=
        returning(context_.polled(y_.buffer) ? "uint16_t*" : "T*", "y(const Job& job, uint32_t b, uint32_t h)",
                  refs_.pointer(node_, y_, true) + element_at(y_, {"b", "h"}));
  code_.body += emit_tiles_of_rows(place_, refs_, code_);
}

// The chains that stage rows of q, k_new and v_new. Chains number their references from 0, so that equal chains have
// equal code.
void AttentionWriter::write_chains() {
  bool early = true;
  for (const Operand* first : lengths())
    if (first) early &= context_.known_before(first->tensor.buffer, phase_);
  std::vector<ChainCode> chains;
  std::vector<bool> applies;
  using Named = std::pair<const char*, const Operand*>;
  for (const auto& [name, operand] : {Named{"Q", &q_}, Named{"K", k_new_}, Named{"V", v_new_}}) {
    if (!operand) continue;
    const Chain chain = find_chain(context_, job_.prologue, node_, operand->tensor);
    std::vector<uint64_t> numbered;
    Refs own(context_, numbered);
    chains.push_back(emit_chain(context_, own, node_, chain, {.phase = phase_, .batch_row = true}));
    applies.push_back(!chain.tasks.empty());
    const ChainCode& made = chains.back();
    code_.body += "  static constexpr uint32_t " + std::string("kRefs") + name + " = " +
                  str(static_cast<int64_t>(code_.refs.size())) + ";\n" +
                  (made.text == chains.front().text && chains.size() > 1
                       ? std::string("  using Rows") + name + " = RowsQ;\n"
                       : std::string("  struct Rows") + name + " {\n" + made.text + "  };\n");
    code_.refs.insert(code_.refs.end(), numbered.begin(), numbered.end());
    early &= made.early;
    code_.headers.insert(code_.headers.end(), made.headers.begin(), made.headers.end());
  }
  code_.body += flag("kOneChain", chains.size() == 3 && chains[0].text == chains[1].text && !applies[2] &&
                                      chains[2].fetch == chains[0].fetch) +
                flag("kEarly", early);
}

std::string AttentionWriter::pitches(size_t dimension) const {
  const auto pitch = [&](const Operand& operand) {
    return str(operand.tensor.strides[dimension] * size_bytes(dtype_));
  };
  return "  static constexpr uint32_t kPitchK = " + pitch(keys_) + ", kPitchV = " + pitch(values_) + ";\n";
}

}  // namespace mpk::codegen
