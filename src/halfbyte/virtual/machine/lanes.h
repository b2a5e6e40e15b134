// The 32 lanes of a warp: masks, and loops over them.
#pragma once

#include <cstdint>
#include <cstring>

namespace halfbyte::gpu {

constexpr int kLanes = 32;
constexpr uint32_t kFullMask = 0xFFFFFFFFu;

inline int first_lane(uint32_t mask) { return __builtin_ctz(mask); }
inline int count_lanes(uint32_t mask) { return __builtin_popcount(mask); }

// Calls body(lane) for every lane of the mask; the full mask is one loop that compilers vectorize.
template <class Body>
inline __attribute__((always_inline)) void for_lanes(uint32_t mask, Body&& body) {
  if (mask == kFullMask) {
    for (int lane = 0; lane < kLanes; ++lane) body(lane);
  } else {
    for (uint32_t rest = mask; rest; rest &= rest - 1) body(__builtin_ctz(rest));
  }
}

// Returns the mask of lanes whose condition(lane) holds.
template <class Condition>
inline __attribute__((always_inline)) uint32_t lanes_where(uint32_t mask, Condition&& condition) {
  uint32_t result = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    result |= static_cast<uint32_t>(static_cast<bool>(condition(lane))) << lane;
  }
  return result & mask;
}

template <class To, class From>
inline To bit_cast(const From& value) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

}  // namespace halfbyte::gpu
