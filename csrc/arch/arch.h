// Generations of GPUs that kernels are generated for: what each has, and what things cost there. Each is an object in a
// file of its name, which registers itself. Outside of this folder nothing compares the number of an architecture: code
// asks for what it needs, by name.
#pragma once

#include <string>
#include <vector>

#include "torch_mpk/kernel_api.h"

namespace mpk {

// Of linears of few rows of x, whose weights are multiplied by warps or by warpgroups, on a multiprocessor while all
// are at work.
struct FewRowsCosts {
  double windows_bytes_per_ns;  // of windows onto x,
  double bytes_per_ns;          // and of these and the weights together
  double hop_ns;                // to meet the workers that share a tile,
  double sums_bytes_per_ns;     // and for the sums that these send each other
};

// Bandwidths and times by which planners compare the ways that a job may be cut.
struct Costs {
  const char* measured_on;  // empty: estimates, by data sheets and by what was measured elsewhere

  double memory_bytes_per_ns;  // a multiprocessor's share, while all read
  double warp_tile_ns;         // a warp's, for one tile of a vector product: to await it, add up its lanes' sums, store
  double attended_per_cycle;   // products of attention of many positions, on a multiprocessor
  FewRowsCosts by_warps, by_warpgroups;

  // These are of tiles of many rows of x.
  double cycles_per_ns;
  double own_bytes_per_cycle, all_bytes_per_cycle;  // of L2, that one multiprocessor gets, and that all get together
  double all_memory_bytes_per_cycle;                // the same of memory
  double trip_cycles, memory_trip_cycles;           // to L2, and to memory
  double column_cycles;                             // tensor cores: 128 rows of x, of 64 columns, by one of weights
  double hop_cycles, event_cycles;                  // to another worker by words that it polls, to all by an event
};

struct Arch {
  int number;                // 90 for 9.0: its lowest compute capability, by which targets, options and JSON name it
  std::vector<int> devices;  // compute capabilities of the devices that it is the generation of
  int num_sms;               // multiprocessors of its largest chip,
  int64_t smem_bytes;        // and bytes of shared memory that a CTA may have there

  // Code is compiled for each device by its name, sm_90a: it has instructions that devices of other names lack.
  // Otherwise later devices of the generation run the same machine code, and the driver makes that of others from PTX.
  bool is_compiled_by_device;

  // A copy engine: it copies bytes in bulk, and boxes by the maps of tensors, and tells mbarriers how many have come.
  bool has_bulk_copies;
  // Warpgroups multiply matrices that stand in shared memory (wgmma).
  bool has_warpgroup_products;
  // Warpgroups hand registers to each other (setmaxnreg).
  bool moves_registers;
  // CTAs are launched in clusters.
  bool has_clusters;
  // A kernel may begin before the one in front of it has ended (griddepcontrol).
  bool overlaps_launches;

  Costs costs;
};

// Called by each object's file. Returns true, for the initialiser to be one of a variable.
bool add_arch(const Arch& arch);

// All, by their numbers.
const std::vector<const Arch*>& archs();

// Their numbers, as a message lists them: "80, 90 or 100".
std::string known_archs();

// The generation of a number, as targets have it. Throws std::invalid_argument where there is none.
MPK_KERNEL_API const Arch& arch_of(int number);

// The generation of a device. A device that is not known yet has the newest before it whose code can go as PTX. Null:
// the device is too old.
const Arch* arch_of_device(int capability);

// Whether a device has all that code of a generation may use.
bool can_run(int capability, const Arch& arch);

// The architecture of a device as compilers name it, sm_90a; as PTX, sm_90.
std::string compiled_name(int capability, bool as_ptx = false);

// What device code is told that is compiled for another architecture than that which it is generated for, and empty
// where compilers say so: the line that defines MPK_ARCH, see device/arch/arch.cuh.
std::string told_to_device_code(int number, int compiled_for);

// Whether a device runs what was compiled, to machine code, for a compute capability.
bool runs_on(int compiled_for, int capability);

// Why code of a generation cannot do what takes `what`, which it lacks: names it, and the generations that have it.
std::string lacks(int number, bool Arch::* capability, const std::string& what);

// As in "compute capability 9.0".
std::string capability_text(int capability);

}  // namespace mpk
