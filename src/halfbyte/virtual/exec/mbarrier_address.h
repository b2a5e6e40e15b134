// How mbarrier operands name their barrier: 32-bit shared addresses or generic ones.
#pragma once

#include "machine/simulation.h"

namespace halfbyte::gpu {

enum class MbarrierSpace : int64_t { kShared = 0, kGeneric = 1 };

// The 32-bit shared address of one lane's address operand (slot, byte offset); faults when a generic
// address does not lie in the shared window.
inline uint32_t read_mbarrier_address(Warp& warp, const Instruction& in, int lane, const int32_t* operand,
                                      MbarrierSpace space) {
  if (space == MbarrierSpace::kShared) {
    return warp.read32(operand[0])[lane] + static_cast<uint32_t>(operand[1]);
  }
  const uint64_t address = warp.read64(operand[0])[lane] + static_cast<uint64_t>(static_cast<int64_t>(operand[1]));
  if ((address & kWindowMask) != kSharedWindow) {
    raise_fault(warp, in, lane, "not-shared-memory",
                format_text("the generic address 0x%llx of an mbarrier is not in shared memory",
                            static_cast<unsigned long long>(address)));
  }
  return static_cast<uint32_t>(address);
}

}  // namespace halfbyte::gpu
