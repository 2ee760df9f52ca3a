#include "torch_mpk/cpu/kernels.h"

#include <stdexcept>

namespace mpk::cpu {

const Kernels& generic_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512_bf16_kernels();
const Kernels& amx_kernels();
#endif

const Kernels& kernels(Isa isa) {
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
