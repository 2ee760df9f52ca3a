#include "torch_mpk/cpu/isa.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace mpk::cpu {
namespace {

#if defined(__x86_64__)
struct CpuidLeaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  CpuidLeaf(unsigned leaf, unsigned subleaf) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
};

bool all_set(unsigned value, unsigned mask) { return (value & mask) == mask; }

// Tile registers are large, so a process must request them, once for all of its threads.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// The oldest supported compiler's __builtin_cpu_supports lacks some features, so this asks the processor. A feature
// counts only if the operating system saves its registers (XCR0).
void detect_x86(std::vector<Isa>& isas) {
  const CpuidLeaf base(1, 0), features(7, 0), more(7, 1);
  constexpr unsigned kFma = 1u << 12, kOsxsave = 1u << 27, kF16c = 1u << 29;
  if (!all_set(base.ecx, kFma | kOsxsave | kF16c)) return;
  unsigned xcr0, high;
  asm volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
  constexpr unsigned kYmmState = 0x6, kZmmState = 0xe6;
  constexpr unsigned kBmi = 1u << 3, kAvx2 = 1u << 5, kBmi2 = 1u << 8;
  if (!all_set(xcr0, kYmmState) || !all_set(features.ebx, kBmi | kAvx2 | kBmi2)) return;
  isas.push_back(Isa::kAvx2);
  constexpr unsigned kAvx512 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;  // F, DQ, CD, BW, VL
  if (!all_set(xcr0, kZmmState) || !all_set(features.ebx, kAvx512)) return;
  isas.push_back(Isa::kAvx512);
  constexpr unsigned kAvx512Bf16 = 1u << 5, kAvx512Vbmi = 1u << 1;
  if (!all_set(more.eax, kAvx512Bf16) || !all_set(features.ecx, kAvx512Vbmi)) return;
  isas.push_back(Isa::kAvx512Bf16);                                     // that has look-ups of bytes, too
  constexpr unsigned kTileState = 0x60000, kAmx = 1u << 22 | 1u << 24;  // bfloat16 products, tiles
  if (all_set(xcr0, kTileState) && all_set(features.edx, kAmx) && may_use_tiles()) isas.push_back(Isa::kAmx);
}
#endif

std::vector<Isa> detect() {
  std::vector<Isa> isas = {Isa::kGeneric};
#if defined(__x86_64__)
  detect_x86(isas);
#endif
  return isas;
}

}  // namespace

const std::vector<Isa>& supported_isas() {
  static const std::vector<Isa> isas = detect();
  return isas;
}

Isa parse_isa(const std::string& name) {
  if (name.empty()) return supported_isas().back();
  std::string known;
  for (Isa isa : supported_isas()) {
    if (name == kIsaNames[static_cast<int>(isa)]) return isa;
    known += (known.empty() ? "'" : ", '") + std::string(kIsaNames[static_cast<int>(isa)]) + "'";
  }
  throw std::invalid_argument("isa '" + name + "' is not available: this machine has " + known +
                              " (leave it empty for the fastest)");
}

}  // namespace mpk::cpu
