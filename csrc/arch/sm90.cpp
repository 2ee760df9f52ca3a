// Hopper: H100, H200.
#include "arch.h"

namespace mpk {
namespace {

const Arch kArch = {
    .number = 90,
    .devices = {90},
    .num_sms = 132,
    .smem_bytes = 227 << 10,
    .is_compiled_by_device = true,
    .has_bulk_copies = true,
    .has_warpgroup_products = true,
    .moves_registers = true,
    .has_clusters = true,
    .overlaps_launches = true,
};
[[maybe_unused]] const bool kRegistered = add_arch(kArch);

}  // namespace
}  // namespace mpk
