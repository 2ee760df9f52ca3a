// Tagged words: how workers of one phase hand partial results to those among them that put these together.
//
// A word of 64 bits holds 32 bits of a result and, above them, the tag of the launch and phase that made it, so that
// whoever polls it has it after one trip to L2. Which of these words a launch writes may depend on lengths, so they
// cannot be cleared for the next one, as polled vectors are. A tag comes again after 2^31 phases. No later phase writes
// in a place before all that this one has written there is read, see allocate_partials in codegen.
#pragma once

#include "torch_mpk/device/consumer.cuh"

namespace mpk {

template <class C>
MPK_DEVICE uint32_t tag_of(const C& c) {
  return (c.epoch * C::Config::kNumPhases + c.phase) | 1u << 31;
}

MPK_DEVICE ulonglong2 tagged(uint32_t a, uint32_t b, uint32_t tag) {
  const uint64_t high = uint64_t(tag) << 32;
  return {high | a, high | b};
}
MPK_DEVICE ulonglong2 tagged(float a, float b, uint32_t tag) {
  return tagged(__float_as_uint(a), __float_as_uint(b), tag);
}
MPK_DEVICE uint32_t differing(const ulonglong2& words, uint32_t tag) {
  return (static_cast<uint32_t>(words.x >> 32) ^ tag) | (static_cast<uint32_t>(words.y >> 32) ^ tag);
}
MPK_DEVICE float float_of(uint64_t word) { return __uint_as_float(static_cast<uint32_t>(word)); }

// What to report of a wait for what is polled in a phase, and keep_waiting for it.
MPK_DEVICE StallRecord polling(uint32_t phase) {
  return stall(phase, WarpRole::kConsumer, Waiting::kElement, phase, 0, 0, 0);
}
MPK_DEVICE uint64_t keep_polling(const Watchdog& dog, uint32_t phase, uint64_t since) {
  return keep_waiting(dog, polling(phase), since);
}

// Until nothing is missing of what a thread polls: missing() begins all its loads before it looks at the first, and
// gives 0 where all has come. False where the launch was given up.
template <class Missing>
MPK_DEVICE bool poll(const Watchdog& dog, uint32_t phase, Missing missing) {
  uint64_t since = 0;
  for (uint32_t polls = 1;; polls++) {
    if (missing() == 0) return true;
    if ((polls & 4095) == 0 && (since = keep_polling(dog, phase, since)) == 0) return false;
  }
}

}  // namespace mpk
