#include "torch_mpk/cpu/exchanges.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "torch_mpk/abi/mailboxes.h"

namespace mpk::cpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kPollsBeforeYield = 200;  // another rank may need this processor to proceed
constexpr int kYieldsBeforeLook = 256;
constexpr int64_t kWordData = sizeof(uint32_t);

static_assert(std::atomic_ref<uint64_t>::is_always_lock_free && std::atomic_ref<uint32_t>::is_always_lock_free);

int64_t nanoseconds(Clock::duration time) { return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count(); }

std::atomic_ref<uint32_t> abort_word(uint8_t* base, int rank) {
  return std::atomic_ref<uint32_t>(reinterpret_cast<uint32_t*>(base)[rank]);
}

uint64_t look_at(const uint64_t* word) {
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(word)).load(std::memory_order_relaxed);
}

std::string seconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", static_cast<double>(ns) * 1e-9);
  return text;
}

}  // namespace

Exchanges::Exchanges(const Mailboxes& mailboxes, int rank, std::vector<uint8_t*> bases, int64_t watchdog_ns,
                     std::function<void()> look)
    : mailboxes_(mailboxes), rank_(rank), bases_(std::move(bases)), watchdog_ns_(watchdog_ns), look_(std::move(look)) {}

uint64_t* Exchanges::words(int of_rank, int node, int from) const {
  const Mailbox& own = mailboxes_.of_nodes.at(node);
  const int64_t place = mailboxes_.place_of(launch_, own.turn);
  uint8_t* base = bases_[of_rank] + kMailboxHeaderBytes + place * mailboxes_.place_bytes + own.offset;
  return reinterpret_cast<uint64_t*>(base) + from * own.words;
}

// Differs between two consecutive exchanges that use the same word.
uint32_t Exchanges::tag(int node) const {
  const auto turns = static_cast<uint32_t>(mailboxes_.turns);
  return (launch_ * turns + static_cast<uint32_t>(mailboxes_.of_nodes.at(node).turn)) | 1u << 31;
}

void Exchanges::push(int node, const uint8_t* data, int64_t bytes) {
  const uint64_t high = uint64_t{tag(node)} << 32;
  for (int i = 1; i < ranks(); i++) {
    uint64_t* to = words((rank_ + i) % ranks(), node, rank_);
    for (int64_t at = 0; at < bytes; at += kWordData, to++) {
      uint32_t part = 0;
      std::memcpy(&part, data + at, std::min(kWordData, bytes - at));
      std::atomic_ref<uint64_t>(*to).store(high | part, std::memory_order_relaxed);
    }
  }
  if (times_ != nullptr && times_->staged == 0) times_->staged = nanoseconds(Clock::now().time_since_epoch());
}

void Exchanges::take(const Node& node, int from, int64_t begin, int64_t end, uint8_t* data) {
  const uint64_t* word = words(rank_, node.id, from) + begin / kWordData;
  const uint32_t expected = tag(node.id);
  for (int64_t at = begin; at < end; at += kWordData, word++, data += kWordData) {
    uint64_t seen = look_at(word);
    if (seen >> 32 != expected) {
      await(word, expected, node, from);
      seen = look_at(word);
    }
    const auto part = static_cast<uint32_t>(seen);
    std::memcpy(data, &part, std::min(kWordData, end - at));
  }
}

void Exchanges::await(const uint64_t* word, uint32_t tag, const Node& node, int from) const {
  const auto start = Clock::now();
  const auto lost = [&](const std::string& why) {
    throw RankLost("rank " + std::to_string(rank_) + " of " + std::to_string(ranks()) + " of group " +
                   mailboxes_.group + " waited for rank " + std::to_string(from) + " in " + node.title() + ": " + why);
  };
  for (int64_t polls = 1; look_at(word) >> 32 != tag; polls++) {
    if (polls % kPollsBeforeYield != 0) continue;
    sched_yield();
    if (polls / kPollsBeforeYield % kYieldsBeforeLook != 0) continue;
    if (look_) look_();
    for (int r = 0; r < ranks(); r++)
      if (abort_word(bases_[rank_], r).load(std::memory_order_relaxed) == kRankAborted)
        lost("rank " + std::to_string(r) + " has aborted");
    if (watchdog_ns_ != 0 && nanoseconds(Clock::now() - start) > watchdog_ns_)
      lost("it has not come for " + seconds(watchdog_ns_) + " s");
  }
  if (waited_ != nullptr) waited_[from] += nanoseconds(Clock::now() - start);
}

void Exchanges::abort() {
  is_aborted_ = true;
  for (int r = 0; r < ranks(); r++)
    if (r != rank_) abort_word(bases_[r], rank_).store(kRankAborted, std::memory_order_relaxed);
}

}  // namespace mpk::cpu
