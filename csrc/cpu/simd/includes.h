// What the tiers' source needs from outside. Included before the target pragma: a function of the standard library that
// was compiled for a tier could be the copy the linker keeps for the whole program.
#include <cstdint>
#include <limits>
#include <type_traits>

#include "torch_mpk/abi/pointwise_ops.h"
#include "torch_mpk/cpu/kernels.h"
