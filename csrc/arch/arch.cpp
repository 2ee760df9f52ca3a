#include "arch.h"

#include <algorithm>
#include <stdexcept>

namespace mpk {
namespace {

// Never freed: the files of the objects fill it, in any order.
std::vector<const Arch*>& registered() {
  static auto* all = new std::vector<const Arch*>;
  return *all;
}

const Arch* find_number(int number) {
  for (const Arch* arch : registered())
    if (arch->number == number) return arch;
  return nullptr;
}

const Arch* find_device(int capability) {
  for (const Arch* arch : registered())
    if (std::ranges::find(arch->devices, capability) != arch->devices.end()) return arch;
  return nullptr;
}

bool is_compiled_alone(int capability) {
  const Arch* arch = find_device(capability);
  return arch != nullptr && arch->is_compiled_by_device;
}

}  // namespace

bool add_arch(const Arch& arch) {
  std::vector<const Arch*>& all = registered();
  all.insert(std::ranges::find_if(all, [&](const Arch* other) { return other->number > arch.number; }), &arch);
  return true;
}

const std::vector<const Arch*>& archs() { return registered(); }

std::string known_archs() {
  const std::vector<const Arch*>& all = registered();
  std::string text;
  for (size_t i = 0; i < all.size(); i++)
    text += (i == 0 ? "" : i + 1 < all.size() ? ", " : " or ") + std::to_string(all[i]->number);
  return text;
}

const Arch& arch_of(int number) {
  if (const Arch* arch = find_number(number)) return *arch;
  throw std::invalid_argument("no kernels are generated for arch " + std::to_string(number) + ": expected " +
                              known_archs());
}

const Arch* arch_of_device(int capability) {
  if (const Arch* known = find_device(capability)) return known;
  const Arch* newest = nullptr;
  for (const Arch* arch : registered())
    if (arch->number < capability && !arch->has_warpgroup_products) newest = arch;
  return newest;
}

bool can_run(int capability, const Arch& arch) {
  const Arch* own = arch_of_device(capability);
  const auto has = [&](bool Arch::* what) { return !(arch.*what) || own->*what; };
  return own != nullptr && has(&Arch::has_bulk_copies) && has(&Arch::has_warpgroup_products) &&
         has(&Arch::moves_registers);
}

std::string compiled_name(int capability, bool as_ptx) {
  return "sm_" + std::to_string(capability) + (is_compiled_alone(capability) && !as_ptx ? "a" : "");
}

std::string told_to_device_code(int number, int compiled_for) {
  return number == compiled_for ? "" : "#define MPK_ARCH " + std::to_string(number) + "0\n";
}

bool runs_on(int compiled_for, int capability) {
  if (is_compiled_alone(compiled_for)) return capability == compiled_for;
  return capability / 10 == compiled_for / 10 && capability >= compiled_for;
}

std::string lacks(int number, bool Arch::* capability, const std::string& what) {
  std::string having;
  for (const Arch* arch : registered())
    if (arch->*capability) having += (having.empty() ? "" : " and ") + capability_text(arch->number);
  return "it needs " + what + ", which compute capability " + having + " has, and code for " + capability_text(number) +
         " has not";
}

std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

}  // namespace mpk
