// The tiers' includes. They come before the target pragma: the linker could keep a standard library function that was
// compiled for one tier, for the whole program.
#include <cstdint>
#include <limits>
#include <type_traits>

#include "torch_mpk/abi/pointwise_ops.h"
#include "torch_mpk/cpu/microkernels.h"
