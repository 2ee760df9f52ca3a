// A run's exchanges with the other ranks of its group, through mailboxes in shared memory.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "torch_mpk/launch_times.h"
#include "torch_mpk/schedule/mailboxes.h"

namespace mpk::cpu {

// A run has waited too long for another rank, or that rank has aborted.
struct RankLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Exchanges {
 public:
  // See CpuExecutable::join.
  Exchanges(const Mailboxes& mailboxes, int rank, std::vector<uint8_t*> bases, int64_t watchdog_ns,
            std::function<void()> look);

  int rank() const { return rank_; }
  int ranks() const { return static_cast<int>(bases_.size()); }

  // Pushes `bytes` of data to all other ranks, so that none of them waits for this rank's next steps.
  void push(int node, const uint8_t* data, int64_t bytes);
  // Waits for the bytes [begin, end) of another rank's data. Both are multiples of 4, but for the data's end. Throws
  // RankLost.
  void take(const Node& node, int from, int64_t begin, int64_t end, uint8_t* data);

  // From now on notes in `times` when data was first pushed, and adds to waited[rank] how long that rank was waited
  // for. Null: does not.
  void record(PhaseTimes* times, int64_t* waited) {
    times_ = times;
    waited_ = waited;
  }
  void end_launch() { launch_++; }
  // Tells all other ranks that they wait in vain.
  void abort();
  bool is_aborted() const { return is_aborted_; }

 private:
  uint64_t* words(int of_rank, int node, int from) const;
  uint32_t tag(int node) const;
  void await(const uint64_t* word, uint32_t tag, const Node& node, int from) const;

  const Mailboxes mailboxes_;
  const int rank_;
  const std::vector<uint8_t*> bases_;
  const int64_t watchdog_ns_;
  const std::function<void()> look_;
  uint32_t launch_ = 0;  // since all ranks have joined
  bool is_aborted_ = false;
  PhaseTimes* times_ = nullptr;
  int64_t* waited_ = nullptr;
};

}  // namespace mpk::cpu
