// Consumer Blackwell: RTX 50, RTX PRO (12.0), GB10 (12.1).
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
    // For 1.79 TB/s, and 4.6 TB/s of L2.
    .costs = {.measured_on = "",
              .memory_bytes_per_ns = 10,
              .warp_tile_ns = 200,
              .attended_per_cycle = 800,
              .by_warps = {.stages_bytes_per_ns = 20, .bytes_per_ns = 22, .hop_ns = 2000, .sums_bytes_per_ns = 18},
              .by_warpgroups = {.stages_bytes_per_ns = 20, .bytes_per_ns = 22, .hop_ns = 2000, .sums_bytes_per_ns = 18},
              .cycles_per_ns = 2.4,
              .own_bytes_per_cycle = 24,
              .all_bytes_per_cycle = 1900,
              .all_memory_bytes_per_cycle = 700,
              .trip_cycles = 2000,
              .memory_trip_cycles = 4400,
              .column_cycles = 32,
              .hop_cycles = 2500,
              .event_cycles = 2500},
};
[[maybe_unused]] const bool kRegistered = add_arch(kArch);

}  // namespace
}  // namespace mpk
