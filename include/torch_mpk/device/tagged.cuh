// Tagged words: workers of one phase pass partial results to the workers among them that merge these.
//
// A 64-bit word holds 32 bits of a result and, above them, the tag of its launch and phase, so a poller has it one trip
// to L2 after the store. Lengths may decide which words a launch writes, so they cannot be cleared for the next launch,
// as polled vectors are. A tag recurs after 2^31 phases. No later phase writes to a place before all readers of this
// phase's words are done, see allocate_partials in codegen.
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

// The report of a wait for polled words, and keep_waiting for it.
MPK_DEVICE Stall polling(uint32_t phase) {
  return stall(phase, WarpRole::kConsumer, Waiting::kElement, phase, 0, 0, 0);
}
MPK_DEVICE uint64_t keep_polling(const Watchdog& dog, uint32_t phase, uint64_t since) {
  return keep_waiting(dog, polling(phase), since);
}

// Polls until nothing is missing. missing() starts all its loads before it checks the first, and returns 0 once all
// words have come. False when the launch was aborted.
template <class Missing>
MPK_DEVICE bool poll(const Watchdog& dog, uint32_t phase, Missing missing) {
  uint64_t since = 0;
  for (uint32_t polls = 1;; polls++) {
    if (missing() == 0) return true;
    if ((polls & 4095) == 0 && (since = keep_polling(dog, phase, since)) == 0) return false;
  }
}

}  // namespace mpk
