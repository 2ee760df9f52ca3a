// Blackwell for consumers: RTX 50, RTX PRO (12.0), GB10 (12.1).
#include "arch.h"

namespace mpk {
namespace {

const Arch kArch = {
    .number = 120,
    .devices = {120, 121},
    .num_sms = 170,
    .smem_bytes = 99 << 10,
    .is_compiled_by_device = true,
    .has_bulk_copies = true,
    .has_warpgroup_products = false,
    .moves_registers = true,
    .has_clusters = true,
    .overlaps_launches = true,
};
[[maybe_unused]] const bool kRegistered = add_arch(kArch);

}  // namespace
}  // namespace mpk
