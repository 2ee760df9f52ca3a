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
    // See docs/experiments.md.
    .costs = {.measured_on = "H200",
              .memory_bytes_per_ns = 35,
              .warp_tile_ns = 200,
              .attended_per_cycle = 800,
              .by_warps = {.stages_bytes_per_ns = 30, .bytes_per_ns = 46, .hop_ns = 2000, .sums_bytes_per_ns = 23},
              .by_warpgroups = {.stages_bytes_per_ns = 38, .bytes_per_ns = 55, .hop_ns = 1000, .sums_bytes_per_ns = 10},
              .cycles_per_ns = 1.755,
              .own_bytes_per_cycle = 42,
              .all_bytes_per_cycle = 5500,
              .all_memory_bytes_per_cycle = 2100,
              .trip_cycles = 2000,
              .memory_trip_cycles = 4400,
              .column_cycles = 4,
              .hop_cycles = 2500,
              .event_cycles = 2500},
};
[[maybe_unused]] const bool kRegistered = add_arch(kArch);

}  // namespace
}  // namespace mpk
