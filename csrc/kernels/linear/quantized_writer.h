// The kernels of quantized_linear have this in common.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "torch_mpk/graph/weight_format.h"
#include "writer.h"

namespace mpk {

// Why no kernel takes the node, or the job.
std::optional<std::string> refuses_quantized(const Node& node);
std::optional<std::string> refuses_quantized(const Schedule& schedule, const Job& job);
// Why no kernel of an x of 16-bit floats takes the node.
std::optional<std::string> refuses_reduced(const Node& node);
// Why no kernel takes the job that has boxes of weights, and up to some rows of x.
std::optional<std::string> refuses_boxes(const Schedule& schedule, const Job& job, int64_t most_rows);

// Whether each scale is of rows of a block of products, or of one row, and lines of 128 bytes are whole.
bool has_blocks_of_rows(const WeightFormat& format);

// Why a scale is not for whole lines of 128 bytes, nor are lines for whole blocks of columns.
std::optional<std::string> refuses_lines(const WeightFormat& format);

// Why warpgroups do not convert the node's weights in registers: numbers take scales of x's type, slice by slice.
std::optional<std::string> refuses_conversion(const Node& node);

// Writes what the kernels have in common: the places of scales.
class QuantizedWriter : public codegen::LinearWriter {
 protected:
  QuantizedWriter(const codegen::JobPlace& place, codegen::JobCode code)
      : LinearWriter(place, std::move(code)), format_(WeightFormat::of(first_)) {}

  // Where each row has one scale, that is a factor of its results; else scales stand beside the weights.
  std::string row_factor(const Node& node) override;
  std::string write_places() override;

  const WeightFormat format_;
};

// Where weights come in boxes. `constants`: the kernel's own. With `by_rows` all of a box's chunks follow each other.
class BoxedWriter : public QuantizedWriter {
 protected:
  BoxedWriter(const codegen::JobPlace& place, codegen::JobCode code, int64_t mainloop_tiles, std::string constants,
              bool by_rows)
      : QuantizedWriter(place, std::move(code)),
        mainloop_tiles_(mainloop_tiles),
        constants_(std::move(constants)),
        by_rows_(by_rows) {}

  StreamRow stream_row() const override;
  std::string shape_constants() const override;

 private:
  void add_weight(const Node& node, const Tensor& weight) override;
  const char* type_of_x() const override { return job_.cut.is_staged() ? "const uint16_t*" : "const T*"; }
  void write_behind() override { write_row_sums(); }

  const int64_t mainloop_tiles_;
  const std::string constants_;
  const bool by_rows_;
};

}  // namespace mpk
