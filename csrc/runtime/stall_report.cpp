#include "stall_report.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace mpk {
namespace {

constexpr int kNumColumns = 7;
using Row = std::array<std::string, kNumColumns>;

std::string phase_name(uint32_t phase, const std::vector<std::string>& names) {
  return phase < names.size() ? std::to_string(phase) + " " + names[phase] : std::to_string(phase) + " (no such phase)";
}

std::string what(const Stall& stall, const std::vector<std::string>& names) {
  switch (stall.waiting) {
    case Waiting::kEvent:
      return "event of phase " + phase_name(stall.event, names);
    case Waiting::kFullSlot:
      return "full ring slot " + std::to_string(stall.event);
    case Waiting::kFreeSlot:
      return "free ring slot " + std::to_string(stall.event);
    case Waiting::kLoader:
      return "the loader's progress";
    case Waiting::kElement:
      return "results of other workers, which it polls";
    case Waiting::kSum:
      return "another warp's sums";
    case Waiting::kRank:
      return "rank " + std::to_string(stall.event);
  }
  return "unknown (" + std::to_string(static_cast<uint32_t>(stall.waiting)) + ")";
}

std::string awaited(const StallRecord& record, const std::vector<std::string>& names) {
  const std::string awaited = what(record.stall, names);
  if (record.expert == 0) return awaited;
  return awaited + ", for tile " + std::to_string(record.tile) + " of expert " + std::to_string(record.expert - 1);
}

Row describe(size_t first, size_t last, const StallRecord& record, const std::vector<std::string>& names) {
  const std::string workers =
      first == last ? std::to_string(first) : std::to_string(first) + "-" + std::to_string(last);
  if (record.written == 0) return {workers, "-", "-", "nothing: left when it saw the abort", "-", "-", "-"};
  const Stall& stall = record.stall;
  return {workers,
          phase_name(stall.phase, names),
          stall.role == WarpRole::kConsumer ? "consumer" : "loader",
          awaited(record, names),
          std::to_string(stall.seen),
          std::to_string(stall.expected),
          std::to_string(stall.entry)};
}

}  // namespace

std::string describe_stalls(const std::vector<StallRecord>& stalls, const std::vector<std::string>& phase_names) {
  std::vector<Row> rows = {{"workers", "in phase", "role", "waits for", "seen", "expected", "entry"}};
  for (size_t first = 0; first < stalls.size();) {
    size_t last = first;
    while (last + 1 < stalls.size() && std::memcmp(&stalls[first], &stalls[last + 1], sizeof(StallRecord)) == 0) last++;
    rows.push_back(describe(first, last, stalls[first], phase_names));
    first = last + 1;
  }
  std::array<size_t, kNumColumns> widths{};
  for (const Row& row : rows)
    for (int i = 0; i < kNumColumns; i++) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  for (const Row& row : rows) {
    for (int i = 0; i < kNumColumns; i++) {
      text += row[i];
      if (i + 1 < kNumColumns) text += std::string(widths[i] - row[i].size() + 2, ' ');
    }
    text += "\n";
  }
  return text;
}

}  // namespace mpk
