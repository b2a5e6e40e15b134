// Bulk and tensor copies run on the uniform path of an SM: lanes with equal operands run one copy.
#pragma once

#include "machine/warp.h"

namespace halfbyte::gpu {

// Lanes of the mask whose operands equal those of `lane`. The last two attributes of such a form are
// bit masks of the operand entries that are 32-bit and 64-bit slots.
inline uint32_t lanes_with_equal_operands(const Warp& warp, const Instruction& in, uint32_t mask,
                                          int lane) {
  uint32_t equal = mask;
  const int64_t* widths = in.attributes + in.num_attributes - 2;
  for (uint64_t rest = static_cast<uint64_t>(widths[0]); rest; rest &= rest - 1) {
    const int32_t slot = in.operands[__builtin_ctzll(rest)];
    if (slot < 0) continue;  // constant or absent
    const uint32_t* values = warp.read32(slot);
    equal = lanes_where(equal, [&](int other) { return values[other] == values[lane]; });
  }
  for (uint64_t rest = static_cast<uint64_t>(widths[1]); rest; rest &= rest - 1) {
    const int32_t slot = in.operands[__builtin_ctzll(rest)];
    if (slot < 0) continue;
    const uint64_t* values = warp.read64(slot);
    equal = lanes_where(equal, [&](int other) { return values[other] == values[lane]; });
  }
  return equal;
}

// Calls body(lane, lanes) once for each group of lanes with equal operands.
template <class Body>
void for_different_lanes(Warp& warp, const Instruction& in, uint32_t mask, Body&& body) {
  while (mask) {
    const int lane = first_lane(mask);
    const uint32_t lanes =
        mask & (mask - 1) ? lanes_with_equal_operands(warp, in, mask, lane) : mask;
    body(lane, lanes);
    mask &= ~lanes;
  }
}

}  // namespace halfbyte::gpu
