// Ampere and Ada: A100 (8.0), consumers' Ampere (8.6), Orin (8.7), Ada (8.9).
#include "arch.h"

namespace mpk {
namespace {

const Arch kArch = {
    .number = 80,
    .devices = {80, 86, 87, 88, 89},
    .num_sms = 108,
    .smem_bytes = 163 << 10,
    .is_compiled_by_device = false,
    .has_bulk_copies = false,
    .has_warpgroup_products = false,
    .moves_registers = false,
    .has_clusters = false,
    .overlaps_launches = false,
};
[[maybe_unused]] const bool kRegistered = add_arch(kArch);

}  // namespace
}  // namespace mpk
