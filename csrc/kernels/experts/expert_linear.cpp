// Products of few rows with their chosen experts, on tensor cores. The launch itself chooses the experts. In `boxes`
// the loader awaits the choice, and copies weights as boxes. In `rows` consumers read in place weights that cannot be
// boxes.
#include "experts.h"

namespace mpk {
namespace {

const ExpertKernel kExpertRows{kExpertLinear, "rows", "experts::compute_rows", "", 0.65};
const BoxedExperts kExpertBoxes{kExpertLinear, "boxes", "experts::compute_boxes"};
[[maybe_unused]] const bool kRegistered =
    add_kernel(kExpertLinear, kExpertRows) && add_kernel(kExpertLinear, kExpertBoxes);

}  // namespace
}  // namespace mpk
