// The state token that mbarrier.arrive returns: opaque to programs, [0,20) pending arrivals,
// [20,36) the barrier's offset / 8, [36,64) the phase.
#pragma once

#include "machine/barriers.h"

namespace halfbyte::gpu {

constexpr int kStateOffsetShift = 20;
constexpr int kStatePhaseShift = 36;
constexpr uint64_t kStatePhaseMask = (1ull << (64 - kStatePhaseShift)) - 1;

inline uint64_t encode_mbarrier_state(const Mbarrier& barrier) {
  return (barrier.phase & kStatePhaseMask) << kStatePhaseShift |
         static_cast<uint64_t>((barrier.offset >> 3) & 0xFFFF) << kStateOffsetShift |
         (static_cast<uint64_t>(barrier.pending) & 0xFFFFF);
}

inline uint32_t pending_of_state(uint64_t state) { return static_cast<uint32_t>(state & 0xFFFFF); }
inline uint32_t offset_of_state(uint64_t state) {
  return static_cast<uint32_t>(state >> kStateOffsetShift & 0xFFFF) << 3;
}
// Phases completed since the state was taken.
inline uint64_t phases_since(uint64_t state, const Mbarrier& barrier) {
  return (barrier.phase - (state >> kStatePhaseShift)) & kStatePhaseMask;
}

}  // namespace halfbyte::gpu
