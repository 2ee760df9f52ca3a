#include "torch_mpk/cpu/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <thread>

namespace mpk::cpu {
namespace {

constexpr int kMadvCollapse = 25;        // Linux 6.1; older C libraries do not name it
constexpr ptrdiff_t kMaxGap = 64 << 10;  // between neighbours of one heap: bookkeeping and small tensors

bool is_allowed() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string setting;
  return std::getline(file, setting) && setting.find("[never]") == std::string::npos;
}

// Moves whole huge pages inside [begin, end). Memory around them belongs to others.
void move(const uint8_t* begin, const uint8_t* end) {
  const auto first = (reinterpret_cast<uintptr_t>(begin) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const auto last = reinterpret_cast<uintptr_t>(end) / kHugePageBytes * kHugePageBytes;
  if (first >= last) return;
  void* pages = reinterpret_cast<void*>(first);
  // the kernel moves them later
  if (madvise(pages, last - first, kMadvCollapse) != 0) madvise(pages, last - first, MADV_HUGEPAGE);
}

}  // namespace

void move_to_huge_pages(std::vector<std::span<const uint8_t>> memory) {
  if (memory.empty() || !is_allowed()) return;
  std::thread([memory = std::move(memory)]() mutable {
    std::sort(memory.begin(), memory.end(), [](const auto& a, const auto& b) { return a.data() < b.data(); });
    for (size_t i = 0; i < memory.size();) {
      const uint8_t* const begin = memory[i].data();
      const uint8_t* end = begin;
      for (; i < memory.size() && memory[i].data() - end <= kMaxGap; i++)
        end = std::max(end, memory[i].data() + memory[i].size());
      move(begin, end);
    }
  }).detach();
}

}  // namespace mpk::cpu
