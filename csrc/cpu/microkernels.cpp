#include "torch_mpk/cpu/microkernels.h"

#include <stdexcept>

namespace mpk::cpu {

const Microkernels& generic_kernels();
#if defined(__x86_64__)
const Microkernels& avx2_kernels();
const Microkernels& avx512_kernels();
const Microkernels& avx512_bf16_kernels();
const Microkernels& amx_kernels();
#endif

const Microkernels& microkernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx2:
      return avx2_kernels();
    case Isa::kAvx512:
      return avx512_kernels();
    case Isa::kAvx512Bf16:
      return avx512_bf16_kernels();
    case Isa::kAmx:
      return amx_kernels();
#endif
    default:
      return generic_kernels();
  }
}

}  // namespace mpk::cpu
