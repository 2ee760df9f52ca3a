// Ampere and Ada: A100 (8.0), consumer Ampere (8.6), Orin (8.7), Ada (8.9).
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
    // For 2.0 TB/s. No choice depends on these costs yet: no job has boxes here.
    .costs = {.measured_on = "",
              .memory_bytes_per_ns = 18,
              .warp_tile_ns = 200,
              .attended_per_cycle = 800,
              .by_warps = {.stages_bytes_per_ns = 24, .bytes_per_ns = 37, .hop_ns = 2000, .sums_bytes_per_ns = 18},
              .by_warpgroups = {.stages_bytes_per_ns = 24, .bytes_per_ns = 37, .hop_ns = 2000, .sums_bytes_per_ns = 18},
              .cycles_per_ns = 1.41,
              .own_bytes_per_cycle = 40,
              .all_bytes_per_cycle = 4300,
              .all_memory_bytes_per_cycle = 1300,
              .trip_cycles = 2000,
              .memory_trip_cycles = 4400,
              .column_cycles = 8,
              .hop_cycles = 2500,
              .event_cycles = 2500},
};
[[maybe_unused]] const bool kRegistered = add_arch(kArch);

}  // namespace
}  // namespace mpk
