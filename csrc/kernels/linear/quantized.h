// What the kernels of quantized_linear have in common.
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

}  // namespace mpk
