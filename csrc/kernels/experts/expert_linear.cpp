// Products of few rows with the experts that they chose, on tensor cores. Which experts' weights are read is known when
// the launch has chosen: `boxes` has the loader await that, and bring them as boxes; with `rows` consumers read weights
// that no boxes can be made of where they are.
#include "experts.h"

namespace mpk {
namespace {

const ExpertKernel kExpertRows{"expert_linear.rows", "experts::compute_rows", "", 0.65};
const BoxedExperts kExpertBoxes{"expert_linear.boxes", "experts::compute_boxes"};
[[maybe_unused]] const bool kRegistered =
    add_kernel("expert_linear", kExpertRows) && add_kernel("expert_linear", kExpertBoxes);

}  // namespace
}  // namespace mpk
