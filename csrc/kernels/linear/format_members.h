// What a variant says of the format of its weights, see QuantizedSizes in quantized_format.cuh.
#pragma once

#include <string>

#include "../../codegen/text.h"
#include "torch_mpk/graph/weight_format.h"

namespace mpk::codegen {

// All but where scales are.
inline std::string format_members(const WeightFormat& format) {
  return constant("kWeightBits", format.bits()) + constant("kWordRows", format.word_rows) +
         flag("kIsE4M3", format.storage == DType::kE4M3) + flag("kIsE2M1", format.is_e2m1()) +
         flag("kHasMiddle", format.has_middle()) + constant("kZero", static_cast<int64_t>(format.zero)) +
         flag("kHasGroups", format.has_groups) + flag("kHasCode", format.has_code) +
         flag("kNestedScales", format.has_nested_scales()) + constant("kXScaleColumns", format.x_columns);
}

}  // namespace mpk::codegen
