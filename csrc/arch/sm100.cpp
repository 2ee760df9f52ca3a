// Data-centre Blackwell: B200 (10.0), B300 (10.3), Thor (11.0). Its own tensor-core instructions, tcgen05, are not
// used.
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
    // For 8.0 TB/s. The rest is an H200's, but for tensor cores without instructions of their own.
    .costs = {.measured_on = "",
              .memory_bytes_per_ns = 52,
              .warp_tile_ns = 200,
              .attended_per_cycle = 800,
              .by_warps = {.stages_bytes_per_ns = 30, .bytes_per_ns = 56, .hop_ns = 2000, .sums_bytes_per_ns = 23},
              .by_warpgroups = {.stages_bytes_per_ns = 30, .bytes_per_ns = 56, .hop_ns = 2000, .sums_bytes_per_ns = 23},
              .cycles_per_ns = 1.9,
              .own_bytes_per_cycle = 42,
              .all_bytes_per_cycle = 5500,
              .all_memory_bytes_per_cycle = 3500,
              .trip_cycles = 2000,
              .memory_trip_cycles = 4400,
              .column_cycles = 8,
              .hop_cycles = 2500,
              .event_cycles = 2500},
};
[[maybe_unused]] const bool kRegistered = add_arch(kArch);

}  // namespace
}  // namespace mpk
