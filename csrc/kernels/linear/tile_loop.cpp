#include "tile_loop.h"

#include "../../codegen/text.h"

namespace mpk::codegen {
namespace {

using Variants = std::vector<Variant>;

Variants of_shared_loop(const Variants& variants) {
  Variants sharing;
  std::string type;
  for (const Variant& variant : variants) {
    if (type.empty()) type = variant.code.shared_loop;
    if (!type.empty() && variant.code.shared_loop == type) sharing.push_back(variant);
  }
  return sharing;
}

// Code that runs `leaf` for the job's variant, which is one of these. It compares: a switch would jump by a table in
// memory, which is slower outside of loops.
template <class Leaf>
std::string by_variant(const Variants& variants, size_t begin, size_t end, const Leaf& leaf) {
  if (begin == end) return "";
  if (end - begin == 1) return leaf(variants[begin].name);
  const size_t middle = (begin + end) / 2;
  return "    if (job.variant < " + str(variants[middle].number) + "u) {\n" +
         by_variant(variants, begin, middle, leaf) + "    } else {\n" + by_variant(variants, middle, end, leaf) +
         "    }\n";
}

// An expression: whether the job has one of these variants.
std::string is_one_of(const Variants& variants) {
  std::string text;
  for (const Variant& variant : variants)
    text += (text.empty() ? "job.variant == " : " || job.variant == ") + str(variant.number);
  return text.empty() ? "false" : text;
}

// The members that compute_shared needs, by variant.
std::string declarations(const Variants& sharing) {
  Variants with_extra;
  std::string extras;
  uint32_t row_counts = 0;
  for (const Variant& variant : sharing) {
    const Stream& stream = variant.code.stream.stream;
    row_counts |= 1u << (stream.tile_rows * stream.chunk_parts);
    extras += "    " + variant.name + "::Extra of_" + variant.name + ";\n";
    if (variant.code.has_extra) with_extra.push_back(variant);
  }
  const auto choose = [](const Variants& variants, const auto& leaf) {
    return by_variant(variants, 0, variants.size(), leaf);
  };
  const std::string prepare =
      choose(sharing, [](const std::string& name) { return "    return linear::prepare<" + name + ">(c, job);\n"; });
  const std::string preload = choose(with_extra, [](const std::string& name) {
    return "    extra.of_" + name + " = " + name + "::preload(job, segment, 0, n);\n";
  });
  const std::string finish = choose(sharing, [](const std::string& name) {
    return "    linear::finish_row<" + name + ">(c, job, segment, n, values, extra.of_" + name + ");\n";
  });
  return "struct Linears {\n  using T = " + sharing.front().name +
         "::T;\n  static constexpr uint32_t kRowCounts = " + str(row_counts) +
         ";\n  static MPK_DEVICE bool has(const Job& job) { return " + is_one_of(sharing) +
         "; }\n  static MPK_DEVICE bool has_extra(const Job& job) { return " + is_one_of(with_extra) +
         "; }\n  union Extra {\n    uint32_t none;\n" + extras +
         "  };\n  template <class C>\n  static MPK_DEVICE bool prepare(C& c, const Job& job) {\n" + prepare +
         "  }\n  static MPK_DEVICE Extra preload(const Job& job, int segment, uint32_t n) {\n    Extra extra{};\n" +
         preload + "    return extra;\n  }\n  template <class C>\n" +
         "  static MPK_DEVICE void finish(C& c, const Job& job, int segment, uint32_t n, const float "
         "(&values)[4],\n" +
         "                                const Extra& extra) {\n" + finish + "  }\n};\n\n";
}

}  // namespace

std::optional<SharedCode> share_tile_loop(const Variants& variants) {
  const Variants sharing = of_shared_loop(variants);
  if (sharing.size() < 2) return std::nullopt;
  SharedCode code{
      {}, declarations(sharing), "    if (Linears::has(job)) return linear::compute_shared<Linears>(c, job);\n"};
  for (const Variant& variant : sharing) code.variants.push_back(variant.number);
  return code;
}

}  // namespace mpk::codegen
