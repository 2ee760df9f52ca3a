// Blackwell for data centres: B200 (10.0), B300 (10.3), Thor (11.0). What its tensor cores have of their own, tcgen05,
// is not used.
#include "arch.h"

namespace mpk {
namespace {

const Arch kArch = {
    .number = 100,
    .devices = {100, 103, 110},
    .num_sms = 148,
    .smem_bytes = 227 << 10,
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
