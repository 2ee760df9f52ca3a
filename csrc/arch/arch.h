// The generations of GPUs that kernels are generated for: their features and costs. Each is an object in a file of its
// name, which registers itself. Outside of this folder nothing compares an architecture's number: code asks for
// features by name.
#pragma once

#include <string>
#include <vector>

#include "torch_mpk/kernel_api.h"

namespace mpk {

// Costs of linears with few rows of x, by warps or by warpgroups, on a multiprocessor while all are busy.
struct FewRowsCosts {
  double stages_bytes_per_ns;  // of stages of x
  double bytes_per_ns;         // of stages and weights together
  double hop_ns;               // to exchange with the workers that share a tile
  double sums_bytes_per_ns;    // of the exchanged sums
};

// Bandwidths and times by which kernels compare cuts.
struct Costs {
  const char* measured_on;  // empty: estimates, from data sheets and measurements elsewhere

  double memory_bytes_per_ns;  // a multiprocessor's share, while all read
  double warp_tile_ns;         // of a warp, for one tile of a vector product: wait, sum over lanes, store
  double attended_per_cycle;   // products of a prompt's attention, on a multiprocessor
  FewRowsCosts by_warps, by_warpgroups;

  // For tiles of many rows of x:
  double cycles_per_ns;
  double own_bytes_per_cycle, all_bytes_per_cycle;  // of L2: one multiprocessor's, and that of all together
  double all_memory_bytes_per_cycle;                // the same of memory
  double trip_cycles, memory_trip_cycles;           // latency of L2, and of memory
  double column_cycles;                             // tensor cores: 128 rows of x by one row of weights, 64 columns
  double hop_cycles, event_cycles;                  // to another worker by polled words, to all by an event
};

struct Arch {
  int number;                // its lowest compute capability, 90 for 9.0, which names it in targets, options and JSON
  std::vector<int> devices;  // compute capabilities of its devices
  int num_sms;               // multiprocessors of its largest chip
  int64_t smem_bytes;        // shared memory of a CTA there

  // Code is compiled for each device by its name (sm_90a), since it has instructions that other devices lack. Otherwise
  // later devices of the generation run the same machine code, and the driver compiles PTX for others.
  bool is_compiled_by_device;

  // A copy engine: it copies bytes in bulk, and boxes described by tensor maps, and reports bytes to mbarriers.
  bool has_bulk_copies;
  // Warpgroups multiply matrices in shared memory (wgmma).
  bool has_warpgroup_products;
  // Warpgroups pass registers to each other (setmaxnreg).
  bool moves_registers;
  // CTAs can be launched in clusters.
  bool has_clusters;
  // A kernel may start before the previous one has ended (griddepcontrol).
  bool overlaps_launches;

  Costs costs;
};

// Each object's file calls it in an initialiser. Returns true.
bool add_arch(const Arch& arch);

// All generations, by number.
const std::vector<const Arch*>& archs();

// Their numbers as a message lists them: "80, 90 or 100".
std::string known_archs();

// The generation of this number. Throws std::invalid_argument if there is none.
MPK_KERNEL_API const Arch& arch_of(int number);

// The generation of a device. An unknown device gets the newest earlier generation whose code can be PTX. Null: the
// device is too old.
const Arch* arch_of_device(int capability);

// Whether a device has all features that code of a generation may use.
bool can_run(int capability, const Arch& arch);

// The architecture of a device as compilers name it: sm_90a; as PTX, sm_90.
std::string compiled_name(int capability, bool as_ptx = false);

// The line that defines MPK_ARCH (see device/arch/arch.cuh) for code that is compiled for another architecture than it
// is generated for. Empty where compilers define it.
std::string told_to_device_code(int number, int compiled_for);

// Whether a device runs machine code for a compute capability.
bool runs_on(int compiled_for, int capability);

// Explains that a generation lacks a feature that `what` needs, and names the generations that have it.
std::string lacks(int number, bool Arch::* capability, const std::string& what);

// As in "compute capability 9.0".
std::string capability_text(int capability);

}  // namespace mpk
