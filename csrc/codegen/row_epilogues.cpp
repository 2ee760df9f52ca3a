#include "row_epilogues.h"

#include <algorithm>

#include "../schedule/access.h"
#include "checks.h"
#include "program.h"
#include "text.h"

namespace mpk::codegen {
namespace {

// Neighbouring elements that a lane takes at a time for the epilogues, where `lanes` lanes share a row: as many as one
// access may have, while each lane has some and they are neighbours in all programs.
int64_t epilogue_width(const KernelContext& context, const Job& job, const std::vector<int>& nodes, const Tensor& y,
                       int64_t lanes) {
  const int64_t size = y.shape.back();
  const auto are_neighbours = [&](int64_t width) {
    return size % width == 0 && std::all_of(nodes.begin(), nodes.end(), [&](int n) {
             const Program& program = *context.node(n).program;
             const std::vector<int64_t> strides = *strides_behind(context.graph(), makers_of(job, n), context.node(n));
             const std::vector<size_t> order = by_falling_stride(program.domain, strides);
             return width == 1 || (!order.empty() && program.domain[order.back()] % width == 0);
           });
  };
  int64_t width = kAccessBytes / size_bytes(y.dtype);
  while (width > 1 && (width * lanes > size || !are_neighbours(width))) width /= 2;
  return width;
}

}  // namespace

std::string emit_row_epilogues(KernelContext& context, Refs& refs, const Job& job, const std::vector<int>& nodes,
                               const Tensor& y, int64_t lanes, const std::string& store) {
  const int64_t points = y.numel(), size = y.shape.back();
  const Node& row = context.node(job.body.front());
  require(points < (int64_t(1) << 31), row, "more than 2^31 results");
  for (int n : nodes)
    require(strides_behind(context.graph(), makers_of(job, n), context.node(n)).has_value(), context.node(n),
            "it does not follow from the elements of " + row.title() + " one by one");
  const int64_t width = epilogue_width(context, job, nodes, y, lanes);
  std::vector<LocalValue> locals{{y.buffer, pattern(y), "elements", y.dtype}};
  std::string fields, common, body = store;
  if (!nodes.empty()) body += "    const uint32_t point = row * " + str(size) + " + column;\n";
  for (size_t i = 0; i < nodes.size(); i++) {
    const Node& node = context.node(nodes[i]);
    const ProgramCode program =
        emit_program(context, refs, node,
                     {.prefix = "e" + str(static_cast<int64_t>(i)) + "_",
                      .point = "point",
                      .strides = *strides_behind(context.graph(), makers_of(job, node.id), node),
                      .width = width,
                      .common_loads = true,
                      .locals = &locals,
                      .unstored = &job.unstored});
    fields += program.common_fields;
    common += program.common;
    body += program.body;
  }
  return constant("kWidth", width) + common_loads(fields, common) +
         function("void",
                  "finish(const Job& job, uint32_t row, uint32_t column, const Vec<T, kWidth>& elements, "
                  "const Common& common)",
                  body);
}

}  // namespace mpk::codegen
